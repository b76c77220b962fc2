"""Processes of runs: started, watched, read through their run directories. Knows no torch."""
