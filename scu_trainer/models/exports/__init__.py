"""A trained model in the formats of other programs, each read back by the program that it is for."""
