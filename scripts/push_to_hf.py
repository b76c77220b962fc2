"""Run ``scu-trainer push``, which uploads a run to the Hub, as an adapter or merged, with a model card."""

import sys

from scu_trainer.cli.publishing.push import main

if __name__ == "__main__":
    sys.exit(main())
