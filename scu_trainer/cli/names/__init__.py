"""Names that other programs use for our settings. ``tools.py`` lists these programs; each has a module of its own."""
