"""What is learned of the data, before anything is trained."""
