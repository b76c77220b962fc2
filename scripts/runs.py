"""Run ``scu-trainer runs``: start, list, status, monitor, logs, stop, resume."""

import sys

from scu_trainer.cli.background.runs import main

if __name__ == "__main__":
    sys.exit(main())
