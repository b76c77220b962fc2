"""What protects a run: going on after a kill, mistakes that are found first, numbers that go bad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Optional

from scu_trainer.settings.base import check_fields, option, require

if TYPE_CHECKING:
    from transformers import TrainingArguments


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
    save_epochs: Optional[int] = option(
        None, "with save_strategy: epoch, a checkpoint after so many epochs, and at the end; default: after each"
    )
    early_stopping_patience: Optional[int] = option(
        None,
        "end after so many evaluations in a row without a better metric_for_best_model (default: the held-out loss), "
        "and keep the best model",
    )
    early_stopping_threshold: float = option(0.0, "by how much a better figure must be better to count")
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
            self.save_epochs is None or self.save_epochs >= 1,
            f"save_epochs is {self.save_epochs}; it must be 1 epoch or more",
        )
        patience = self.early_stopping_patience
        require(patience is None or patience >= 1, f"early_stopping_patience is {patience}; it must be 1 or more")
        require(
            self.early_stopping_threshold == 0 or patience is not None,
            "early_stopping_threshold needs early_stopping_patience, the evaluations to wait; give it, such as 3",
        )
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


def check_safety(safety: SafetySettings, training: TrainingArguments) -> None:
    """Raise SettingsError for settings that contradict the stock arguments."""
    strategy = getattr(training.save_strategy, "value", training.save_strategy)
    require(
        safety.save_epochs is None or strategy == "epoch",
        f"save_epochs counts epochs, and save_strategy is {strategy}; set save_strategy: epoch",
    )
    require(
        safety.early_stopping_patience is None or training.load_best_model_at_end,
        "early_stopping_patience keeps the best model; set load_best_model_at_end: true, or drop it",
    )
    require(
        safety.save_epochs in (None, 1) or not training.load_best_model_at_end,
        f"save_epochs: {safety.save_epochs} may leave out the best checkpoint that load_best_model_at_end wants; leave "
        "one of them out",
    )
