"""The supervisor process of a background run: ``python -m scu_trainer.cli.background.supervisor``."""

from __future__ import annotations

import sys
from pathlib import Path

from scu_trainer.imports import claim_process
from scu_trainer.runs.store import Run
from scu_trainer.runs.supervisor import SupervisorBackend, supervise
from scu_trainer.secrets import hide_in_tracebacks, remember_environment


def main(argv: list[str]) -> int:
    claim_process()
    remember_environment()
    hide_in_tracebacks()
    path = Path(argv[0])
    return supervise(Run(path, path.name), SupervisorBackend(train))


def train(words: list[str]) -> int:
    """Run the training command. It is imported only when it is this run's turn, so that waiting takes little memory."""
    from scu_trainer.cli.train import main as train_main

    return train_main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
