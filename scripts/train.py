"""``scu-trainer train`` for launchers that want a file: python, accelerate launch, torchrun, deepspeed."""

import sys

from scu_trainer.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
