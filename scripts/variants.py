"""``scu-trainer variants`` as a file: every memory-efficient path for a few real steps; --limit finds one that fits."""

import sys

from scu_trainer.cli.variants import main

if __name__ == "__main__":
    sys.exit(main())
