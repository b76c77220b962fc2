"""Run ``scu-trainer eval``, which measures the held-out bits per token of a run, an adapter or a model."""

import sys

from scu_trainer.cli.evaluation.eval import main

if __name__ == "__main__":
    sys.exit(main())
