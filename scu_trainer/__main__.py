"""``python -m scu_trainer COMMAND ...``, where the program ``scu-trainer`` is not on the path."""

from __future__ import annotations

import sys

from scu_trainer.cli.main import main

if __name__ == "__main__":  # loader workers that are spawned import this module again
    sys.exit(main())
