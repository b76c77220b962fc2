"""Run ``scu-trainer variants``: train each memory-efficient variant for a few steps, or find one within --limit."""

import sys

from scu_trainer.cli.variants import main

if __name__ == "__main__":
    sys.exit(main())
