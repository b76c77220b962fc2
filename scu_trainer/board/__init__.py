"""The board: web pages that show runs, and start, stop and resume them, through scu_trainer.runs and .report."""
