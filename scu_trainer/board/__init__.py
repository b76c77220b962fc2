"""The board: web pages that show runs in a browser. It reads the files of runs and acts on them through
``scu_trainer.runs`` and ``scu_trainer.report``."""
