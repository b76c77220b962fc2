"""Preflight: checks that find the user's mistakes before training starts.

    before_loading   checks of settings, environment and disk; cheap
    before_training  checks of the prepared data and the loaded model; under 10 seconds for any size

Mistakes that raise an error elsewhere (unknown keys, settings that contradict each other, a model that does not fit its
tokenizer) are not checked again.
"""

from __future__ import annotations

from pathlib import Path

from transformers.trainer_utils import has_length

from scu_trainer.data.samples import PreparedSamples
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight import (
    classes,
    columns,
    counts,
    length,
    optimization,
    pitfalls,
    plan,
    room,
    rows,
    surroundings,
    weights,
)
from scu_trainer.train.preflight.finding import Check, Finding
from scu_trainer.train.preflight.report import CHECKS, report

__all__ = ["CHECKS", "Check", "Finding", "before_loading", "before_training", "report"]

EARLY = (optimization, pitfalls, length, surroundings, columns, plan)


def before_loading(job: Job) -> list[Finding]:
    """Return the findings about settings, environment and disk. Raises DataError for an unreadable local dataset."""
    return [finding for module in EARLY for finding in module.before_loading(job)]


def before_training(job: Job, parts: TrainingComponents, output_dir: Path) -> list[Finding]:
    """Return the findings about the prepared data and the loaded model; large ones are sampled, and findings say so.
    ``output_dir``: the folder for checkpoints; it need not exist."""
    if not optimization.has_rows_per_step(job.training):
        return []  # before_loading has reported this error; without it the number of steps is not defined
    train, training = parts.data.train, job.training
    count = len(train) if has_length(train) else None
    steps = training.max_steps if count is None else job.planned_steps(count)
    findings = [*length.before_training(job, train), *counts.before_training(job, parts)]
    findings += columns.before_training(parts.data.statistics)
    if not isinstance(parts.data, PreparedSamples):
        findings += rows.before_training(job, parts, rows.facts_of(parts))
    findings += classes.before_training(job, parts)
    findings += weights.before_training(job, parts.model)
    findings += room.before_training(job, parts.model, output_dir, steps, count)
    return [*findings, *plan.before_training(job, parts, count, steps)]
