"""Run ``scu-trainer hardware``: profile, check, monitor, optimize."""

import sys

from scu_trainer.cli.machine.hardware import main

if __name__ == "__main__":
    sys.exit(main())
