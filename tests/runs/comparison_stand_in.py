"""Comparisons without torch: the real command from its lock to its table, on the program of comparison_training.py.

python comparison_stand_in.py FOLDER      the command; its plan is what ``plan`` makes
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.comparison.runs import ComparisonSession
from scu_trainer.cli.main import guarded
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_arms import Arm
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan

STEPS = 4
TRAINING = Path(__file__).with_name("comparison_training.py")
ARMS = {"none": {"lift": 0.5}, "model": {"lift": 0.0}}


def plan(
    folder: Path, arms: Mapping[str, Mapping[str, Any]] = ARMS, seeds: Sequence[int] = (0, 1, 2)
) -> ComparisonPlan:
    """``arms``: settings of the stand-in: those of comparison_training.py."""
    resolved = {name: {"steps": STEPS, "dataset": "same", **own} for name, own in arms.items()}
    made = tuple(Arm(name, name, f"{name} for tests", dict(own)) for name, own in arms.items())
    texts = {name: yaml.safe_dump(settings) for name, settings in resolved.items()}
    return ComparisonPlan(
        folder, "scu-trainer compare --config r.yaml", "r.yaml", made, tuple(seeds), 1, resolved, texts
    )


class Spawner:
    """In place of training. ``started``: names of the runs, in order. ``threads``: what they were given."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, words: Sequence[str], variables: Mapping[str, str], console: Path) -> Any:
        self.started.append(console.stem)
        self.threads.add(variables["OMP_NUM_THREADS"])
        return comparison.spawn([sys.executable, str(TRAINING), *words[2:]], variables, console)


def start(made: ComparisonPlan, console: Any, spawner: Any, jobs: int = 2, retry_failed: bool = False) -> int:
    """As ``scu-trainer compare`` does once the settings are read. The exit code."""
    hands = comparison.ComparisonBackend(spawn=spawner, sleep=lambda s: time.sleep(0.01))
    begun = ComparisonSession(made, "none", ["cpu"] * jobs, console, hands, retry_failed=retry_failed)
    return guarded(lambda words: begun.run())([])


# -- the program -----------------------------------------------------------------------------------------------------


def compare(folder: Path) -> int:
    from rich.console import Console

    arms = {**ARMS, "model": {"lift": 0.0, "hold_at": 3}}
    return start(plan(folder, arms, seeds=(0, 1)), Console(width=80), Spawner(), jobs=1)


if __name__ == "__main__":
    sys.exit(compare(Path(sys.argv[1])))
