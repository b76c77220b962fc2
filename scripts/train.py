"""Run ``scu-trainer train``, as a script for launchers that need one: python, accelerate, torchrun, deepspeed."""

import sys

from scu_trainer.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
