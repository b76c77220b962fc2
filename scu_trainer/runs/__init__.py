"""Start, watch and inspect the processes of runs, through their run directories. Does not import torch."""
