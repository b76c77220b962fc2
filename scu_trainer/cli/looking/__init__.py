"""Shows data before anything is trained on them, and runs in a browser."""
