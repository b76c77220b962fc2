"""The board: web pages that show runs and start, stop and resume them, by means of ``scu_trainer.runs`` and
``scu_trainer.report``."""
