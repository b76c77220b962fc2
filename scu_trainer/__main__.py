"""Entry point of ``python -m scu_trainer COMMAND ...``, for systems where ``scu-trainer`` is not on the path."""

from __future__ import annotations

import sys

from scu_trainer.cli.main import main

if __name__ == "__main__":  # spawned data loader workers import this module too
    sys.exit(main())
