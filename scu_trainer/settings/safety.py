"""Settings that protect a run: resume, preflight, early stopping, and losses that are not finite or diverge."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Optional

from scu_trainer.settings.base import Allowed, as_typed, check_fields, option, require

if TYPE_CHECKING:
    from transformers import TrainingArguments

ALLOWED = {
    "save_epochs": Allowed(least=1),
    "early_stopping_patience": Allowed(least=1),
    "spike_threshold": Allowed(above=0),
    "divergence_factor": Allowed(above=1),
    "grace_period_s": Allowed(above=0),
}

SAVE_STEPS = 0.1
"""Default of ``save_steps``, as the largest share of the run that an interruption should cost."""
FEWEST_SAVE_STEPS, STOCK_SAVE_STEPS = 10, 500
"""Bounds on it in steps: short runs should not mainly write checkpoints, nor long ones lose more than stock runs."""


@dataclass(frozen=True)
class SafetySettings:
    """Resume, preflight, early stopping, guards and signals. The flag ``--no_resume`` sets ``resume`` to false."""

    resume: bool = option(
        True,
        "resume the unfinished run of the same configuration in output_dir; --no_resume starts a new run next to it",
    )
    weights_only: bool = option(
        False, "also resume from a checkpoint without optimizer state: use its weights and a new optimizer"
    )
    preflight: Literal["stop", "warn", "off"] = option(
        "stop",
        "what to do about mistakes found before the first step: stop the run, only warn, or do not check (off)",
    )
    save_epochs: Optional[int] = option(
        None,
        "with save_strategy: epoch, save a checkpoint every this many epochs, and at the end; default: every epoch",
    )
    early_stopping_patience: Optional[int] = option(
        None,
        "end the run after this many evaluations in a row without a better metric_for_best_model (default: the "
        "held-out loss), and keep the best model",
    )
    early_stopping_threshold: float = option(0.0, "smallest improvement that counts for early_stopping_patience")
    max_nonfinite_steps: int = option(
        3,
        "how many optimizer steps in a row may have a loss or gradient that is not finite: each is skipped and "
        "counted; one more ends the run with a checkpoint from before them; 0 ends it at the first one",
    )
    spike_guard: Literal["off", "skip"] = option(
        "off",
        "what to do with an optimizer step with a loss or gradient norm far above those of earlier steps: skip drops "
        "its gradient before the optimizer acts, counts the step and logs its rows",
    )
    spike_threshold: float = option(
        12.0,
        "with spike_guard: skip, how far above counts as a spike, in robust standard deviations of the logarithm",
    )
    divergence: Literal["stop", "warn", "off"] = option(
        "warn", "what to do when the training loss diverges and stays high"
    )
    divergence_factor: float = option(
        2.0, "the run counts as diverging when the running mean of its training loss is this many times its best"
    )
    grace_period_s: Optional[float] = option(
        None,
        "seconds after a first SIGTERM or Ctrl-C to finish the step and the checkpoint, for instance 30 under Slurm or "
        "Kubernetes; after that the run ends with its last checkpoint; default: no limit",
    )

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)
        require(
            self.early_stopping_threshold == 0 or self.early_stopping_patience is not None,
            "early_stopping_threshold needs early_stopping_patience, the number of evaluations to wait; set it, for "
            "instance to 3",
        )
        require(
            self.spike_guard != "off" or self.spike_threshold == 12.0,
            "spike_threshold has an effect only with spike_guard: skip; set that as well, or drop it",
        )


def check_safety(safety: SafetySettings, training: TrainingArguments) -> None:
    """Raise SettingsError for settings that contradict the stock arguments."""
    strategy = as_typed(training.save_strategy)
    require(
        safety.save_epochs is None or strategy == "epoch",
        f"save_epochs counts epochs, but save_strategy is {strategy}; set save_strategy: epoch",
    )
    if safety.early_stopping_patience is not None:
        require(
            training.load_best_model_at_end,
            "early_stopping_patience keeps the best model; set load_best_model_at_end: true, or drop it",
        )
        _require_checkpoint_of_best(
            as_typed(training.eval_strategy), strategy, training.eval_steps, training.save_steps
        )
    require(
        safety.save_epochs in (None, 1) or not training.load_best_model_at_end,
        f"save_epochs: {safety.save_epochs} may leave out the best checkpoint that load_best_model_at_end "
        f"needs; drop one of them",
    )


def default_save_steps(steps: int) -> int:
    return min(STOCK_SAVE_STEPS, max(FEWEST_SAVE_STEPS, math.ceil(steps * SAVE_STEPS)))


# -- early stopping ----------------------------------------------------------------------------------------------------


def early_stopping_values(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return values for the fields that early stopping needs and that the user has not ``given``: evaluations, each
    with a checkpoint. ``values``: all fields by name. Raises SettingsError if the given ones rule that out."""
    evaluates, saves = _strategies(values, given)
    every = _steps_between(values, given)
    chosen = {"load_best_model_at_end": True, "eval_strategy": evaluates, "save_strategy": saves}
    if evaluates == "steps":
        chosen |= {"eval_steps": every, **({"save_steps": every} if saves == "steps" else {})}
    together = {**values, **{name: value for name, value in chosen.items() if name not in given}}
    if together["load_best_model_at_end"]:
        _require_checkpoint_of_best(evaluates, saves, together["eval_steps"], together["save_steps"])
    return {name: value for name, value in chosen.items() if name not in given}


def _strategies(values: Mapping[str, Any], given: Collection[str]) -> tuple[str, str]:
    """Return the strategies of evaluations and of checkpoints; if only one is given, the other follows it."""
    evaluates, saves = as_typed(values["eval_strategy"]), as_typed(values["save_strategy"])
    if "eval_strategy" not in given:
        follows = "save_strategy" in given and saves in ("steps", "epoch")
        by_steps = "save_steps" in given or values["max_steps"] > 0 or evaluates == "steps"
        evaluates = saves if follows else "steps" if by_steps else "epoch"
        evaluates = "steps" if "eval_steps" in given else evaluates
    return evaluates, saves if "save_strategy" in given else evaluates


def _steps_between(values: Mapping[str, Any], given: Collection[str]) -> float:
    """Return the steps between evaluations: as given for these or checkpoints; 20 evaluations in max_steps; or those
    between logs."""
    for name in ("eval_steps", "save_steps"):
        if name in given and values[name]:
            return values[name]
    return max(1, values["max_steps"] // 20) if values["max_steps"] > 0 else values["logging_steps"]


def _require_checkpoint_of_best(
    evaluates: str, saves: str, eval_steps: Optional[float], save_steps: Optional[float]
) -> None:
    """Require a checkpoint at each evaluation: the stock Trainer silently forgets a best model between checkpoints."""
    require(
        evaluates != "no",
        "early_stopping_patience needs evaluations, but eval_strategy is no; set eval_strategy: steps or epoch, or "
        "drop early_stopping_patience",
    )
    require(
        saves in (evaluates, "best"),
        f"early_stopping_patience keeps the best model, which is a checkpoint: save_strategy is {saves}, and "
        f"eval_strategy is {evaluates}; set save_strategy: {evaluates}, or drop save_strategy",
    )
    require(
        saves != "steps" or eval_steps == save_steps,
        "early_stopping_patience keeps the best model, which is a checkpoint: evaluations are "
        f"{eval_steps or 0:g} steps apart, and checkpoints {save_steps or 0:g}; set save_steps: "
        f"{eval_steps or 0:g}, or save_strategy: best",
    )
