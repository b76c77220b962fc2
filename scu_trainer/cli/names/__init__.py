"""What other programs call our settings. ``tools.py``: whose configurations are read; a file per tool holds its keys."""
