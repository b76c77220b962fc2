"""What other programs call our settings. ``tools.py``: whose files are read; a file per tool holds its keys."""
