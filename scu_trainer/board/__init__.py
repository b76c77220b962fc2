"""Runs in a browser: pages over the files of runs. Reads what the rooms of runs and reports read, and acts through
them."""
