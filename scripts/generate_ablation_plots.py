"""Run ``scu-trainer report``, which shows runs or a comparison as plots and one HTML page."""

import sys

from scu_trainer.cli.publishing.report import main

if __name__ == "__main__":
    sys.exit(main())
