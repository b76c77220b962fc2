"""Shows the data of a job before training, and the runs of this machine in a browser."""
