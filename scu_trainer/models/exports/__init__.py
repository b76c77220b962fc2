"""Write a trained model in the formats of other programs, and check each file with the program that it is for."""
