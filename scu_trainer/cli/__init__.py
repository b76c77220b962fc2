"""One module per command. ``scu-trainer COMMAND`` and ``scripts/*.py`` call the same ``main(argv)``."""
