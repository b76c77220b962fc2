"""``scu-trainer hardware`` as a file: check, monitor."""

import sys

from scu_trainer.cli.hardware import main

if __name__ == "__main__":
    sys.exit(main())
