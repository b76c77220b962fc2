"""What protects a run: going on after a kill, mistakes that are found first, numbers that go bad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Optional

from scu_trainer.settings.base import check_fields, option, require


@dataclass(frozen=True)
class SafetySettings:
    """Resume, preflight, signals, numbers that go bad. On the command line ``--no_resume`` sets ``resume`` to false."""

    resume: bool = option(
        True,
        "go on with the unfinished run of the same configuration that output_dir holds; --no_resume begins another "
        "one beside it",
    )
    weights_only: bool = option(
        False, "also resume from a checkpoint without optimizer state: its weights, with a fresh optimizer"
    )
    preflight: Literal["stop", "warn", "off"] = option(
        "stop",
        "what a mistake that is found before the first step does: stop the run, only report it, or not be looked for",
    )
    max_nonfinite_steps: int = option(
        3,
        "optimizer steps one after the other whose loss or gradient is no finite number: each is skipped and counted, "
        "one more ends the run with a checkpoint from before; 0 ends it at the first",
    )
    divergence: Literal["stop", "warn", "off"] = option(
        "warn", "what a training loss that has left its own course for good does"
    )
    divergence_factor: float = option(
        2.0, "times the best running mean of the training loss at which the run is said to diverge"
    )
    grace_period_s: Optional[float] = option(
        None,
        "seconds after a first SIGTERM or Ctrl-C in which the step and the checkpoint must be done, for instance 30 "
        "under Slurm or Kubernetes; then the run ends with the checkpoint that it has; default: no limit",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.max_nonfinite_steps >= 0,
            f"max_nonfinite_steps is {self.max_nonfinite_steps}; allowed: 0 or more steps",
        )
        require(
            math.isfinite(self.divergence_factor) and self.divergence_factor > 1,
            f"divergence_factor is {self.divergence_factor}; allowed: above 1, such as 2",
        )
        require(
            self.grace_period_s is None or (math.isfinite(self.grace_period_s) and self.grace_period_s > 0),
            f"grace_period_s is {self.grace_period_s}; allowed: above 0 seconds, such as 30",
        )
