"""Checks of the length of the run: epochs of one step, a warm-up that never ends, no checkpoint before the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Optional

import torch
from transformers import get_scheduler
from transformers.trainer_utils import has_length

from scu_trainer.settings.base import as_typed
from scu_trainer.settings.safety import STOCK_SAVE_STEPS
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

BATCH_EXCEEDS_ROWS = Check(
    "batch-exceeds-rows",
    "warning",
    "one optimizer step takes all training rows or more, so an epoch is a single step",
    "lower gradient_accumulation_steps or per_device_train_batch_size; for text, a lower block_size gives more rows",
)
NO_FULL_BATCH = Check(
    "no-full-batch",
    "error",
    "dataloader_drop_last drops the only batch, because it is not full",
    "lower per_device_train_batch_size, or set dataloader_drop_last: false",
)
FEW_STEPS = Check(
    "few-steps",
    "warning",
    "the whole run has fewer than 10 optimizer steps, though max_steps does not ask for so few",
    "lower gradient_accumulation_steps or per_device_train_batch_size, or raise num_train_epochs",
)
WARM_UP = Check(
    "warm-up-covers-run",
    "warning",
    "the warm-up of the learning rate takes half of the run or more",
    "lower warmup_steps (below 1 it is a share of the run, such as 0.05)",
)
SCHEDULE = Check(
    "schedule-cannot-be-made",
    "error",
    "the learning rate schedule lacks an argument or gets an unknown one",
    "fix lr_scheduler_kwargs, or choose another lr_scheduler_type",
)
NO_CHECKPOINT = Check(
    "no-checkpoint-before-end",
    "warning",
    "save_steps is beyond the last step, or a long run saves no checkpoint, so an interruption loses the whole run",
    "set save_strategy: steps, and lower save_steps to about a tenth of the run",
)
NO_EVALUATION = Check(
    "no-evaluation-before-end",
    "warning",
    "eval_steps or eval_delay is beyond the last step, so progress is seen only after the end",
    "lower eval_steps, and eval_delay if it is set",
)
NO_LOG = Check(
    "nothing-logged",
    "warning",
    "logging_steps is beyond the last step, so only one loss is logged, at the end",
    "lower logging_steps",
)
FEW_EVALUATIONS = Check(
    "target-needs-evaluations",
    "warning",
    "the run has too few evaluations for scu_target_s: auto to detect when the held-out loss starts to rise",
    "lower eval_steps",
)

FEWEST_STEPS = 10
SHORT_RUN_STEPS = 20
"""Shorter runs need neither logs nor checkpoints before their end."""
UNASKED_RUN_STEPS, LONG_RUN_STEPS = 100, 1000
"""Shortest runs for a warning about save_steps at its stock default, and about save_strategy: no."""


def before_loading(job: Job) -> Iterator[Finding]:
    """Check the schedule, and everything that follows from max_steps, before loading starts."""
    yield from _check_schedule(job)
    if job.training.max_steps > 0:
        yield from _check_intervals(job, job.training.max_steps)


def before_training(job: Job, train: Any) -> Iterator[Finding]:
    if not has_length(train):
        return
    rows = len(train)
    yield from _check_batches(job, rows)
    if job.training.max_steps <= 0:
        steps = job.planned_steps(rows)
        if 0 < steps < FEWEST_STEPS:
            yield FEW_STEPS.found(f"{rows:,} rows in steps of {rows_per_step(job):,} are {steps} steps in all")
        yield from _check_intervals(job, steps)


def rows_per_step(job: Job) -> int:
    """Return the rows of one optimizer step over all devices and ranks."""
    training = job.training
    return training.train_batch_size * training.gradient_accumulation_steps * training.world_size


def _check_batches(job: Job, rows: int) -> Iterator[Finding]:
    training, wanted = job.training, rows_per_step(job)
    rows_at_once = training.train_batch_size * training.world_size
    where = "per_device_train_batch_size, gradient_accumulation_steps"
    if training.dataloader_drop_last and rows < rows_at_once:
        yield NO_FULL_BATCH.found(f"{rows:,} training rows fill no batch of {rows_at_once:,}", "dataloader_drop_last")
    elif wanted >= rows:
        how = f"{training.train_batch_size} x {training.gradient_accumulation_steps} x {training.world_size} ranks"
        yield BATCH_EXCEEDS_ROWS.found(f"a step takes {wanted:,} rows ({how}), and there are {rows:,}", where)


def _check_intervals(job: Job, steps: int) -> Iterator[Finding]:
    """Check warm-up, saving, evaluation and logging against the number of steps of the run."""
    if steps <= 0:
        return
    yield from _check_warm_up(job, steps)
    yield from _check_saving(job, steps)
    yield from _check_evaluation(job, steps)
    training = job.training
    every = interval(training.logging_steps, steps)
    if training.logging_strategy == "steps" and every > steps >= SHORT_RUN_STEPS:
        yield NO_LOG.found(f"logging_steps is {every:,}, the run has {steps:,} steps", "logging_steps")


def interval(value: float, steps: int) -> int:
    """Return an interval in steps; a ``value`` below 1 is a share of the run."""
    return int(value) if value >= 1 else max(1, math.ceil(steps * value))


def _check_warm_up(job: Job, steps: int) -> Iterator[Finding]:
    training = job.training
    if job.efficiency.has_lr_steps or as_typed(job.training.lr_scheduler_type) in ("constant", "reduce_lr_on_plateau"):
        return  # these have no warm-up
    warm_up = training.get_warmup_steps(steps)
    if warm_up >= max(2, steps / 2):
        reached = f", and the learning rate reaches {percent(steps / warm_up)} of it" if warm_up > steps else ""
        yield WARM_UP.found(f"{warm_up:,} of {steps:,} steps are warm-up{reached}", "warmup_steps")


def _check_saving(job: Job, steps: int) -> Iterator[Finding]:
    training = job.training
    if training.save_strategy == "no" and steps >= LONG_RUN_STEPS:
        yield NO_CHECKPOINT.found(f"save_strategy is no, and the run has {steps:,} steps", "save_strategy")
    if training.save_strategy != "steps":
        return
    every = interval(training.save_steps, steps)
    fewest_steps = SHORT_RUN_STEPS if every != STOCK_SAVE_STEPS else UNASKED_RUN_STEPS
    if every > steps >= fewest_steps:
        yield NO_CHECKPOINT.found(f"save_steps is {every:,}, the run has {steps:,} steps", "save_steps")


def _check_evaluation(job: Job, steps: int) -> Iterator[Finding]:
    training = job.training
    if training.eval_strategy != "steps":
        return
    every = interval(training.eval_steps, steps)
    if every > steps >= SHORT_RUN_STEPS:
        yield NO_EVALUATION.found(f"eval_steps is {every:,}, the run has {steps:,} steps", "eval_steps")
    elif (training.eval_delay or 0) > steps:
        yield NO_EVALUATION.found(f"eval_delay is {training.eval_delay:g}, the run has {steps:,} steps", "eval_delay")
    loop = job.regularization
    if loop is not None and loop.target_s == "auto" and steps // every <= loop.auto_patience:
        what = f"{steps // every} evaluations in {steps:,} steps; {loop.auto_patience + 1} or more are needed"
        yield FEW_EVALUATIONS.found(what, "scu_target_s, eval_steps")


# -- the learning rate -------------------------------------------------------------------------------------------------


def _check_schedule(job: Job) -> Iterator[Finding]:
    """Construct the schedule once with a dummy optimizer, to find out whether its arguments are valid."""
    if job.efficiency.has_lr_steps or job.training.learning_rate <= 0:
        return
    problem = _schedule_error(job)
    if problem is not None:
        what = f"lr_scheduler_type {as_typed(job.training.lr_scheduler_type)}: {problem}"
        yield SCHEDULE.found(what, "lr_scheduler_type, lr_scheduler_kwargs")


def _schedule_error(job: Job) -> Optional[str]:
    training = job.training
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    try:
        get_scheduler(
            training.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=0,
            num_training_steps=100,
            scheduler_specific_kwargs=training.lr_scheduler_kwargs or {},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None
