"""Run ``scu-trainer compare``, which compares controllers at equal tokens over several seeds."""

import sys

from scu_trainer.cli.comparison.compare import main

if __name__ == "__main__":
    sys.exit(main())
