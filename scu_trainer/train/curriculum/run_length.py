"""The length of a run with epochs of unequal length: steps, progress, and position of the learning rate schedule."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments

logger = logging.getLogger("scu_trainer")


class RunLength:
    """Length of a run. ``nominal_steps``: optimizer steps of the first epoch, for which the schedule was made.

    ``epoch``, ``first_step``, ``steps``: of the current plan. It begins at ``progress_before`` epochs (a fraction if
    the start of the epoch was cut into other batches) and ends at ``epoch + 1``.
    """

    def __init__(self, args: TrainingArguments, nominal_batches: int) -> None:
        self._args = args
        self.nominal_steps = math.ceil(nominal_batches / args.gradient_accumulation_steps)
        self.epoch = self.first_step = 0
        self.steps = self.nominal_steps
        self.progress_before = 0.0
        self._has_warned = False

    @property
    def _is_limited_by_steps(self) -> bool:
        return self._args.max_steps > 0

    @property
    def epochs(self) -> float:
        args = self._args
        return args.max_steps / self.nominal_steps if self._is_limited_by_steps else args.num_train_epochs

    @property
    def total_steps(self) -> int:
        """Number of steps if all epochs are like the first."""
        return self._args.max_steps if self._is_limited_by_steps else math.ceil(self.epochs * self.nominal_steps)

    def begin(self, epoch: int, first_step: int, batches: int, progress_before: float) -> None:
        """Begin a plan of ``batches`` micro-batches per rank; its first optimizer step follows ``first_step``."""
        self.epoch, self.first_step, self.progress_before = epoch, first_step, progress_before
        self.steps = math.ceil(batches / self._args.gradient_accumulation_steps)

    def update_trainer_state(self, state: TrainerState) -> None:
        """Set ``max_steps`` of the Trainer's state to what it will be if all later epochs are like this one."""
        state.num_train_epochs = math.ceil(self.epochs)
        if self._is_limited_by_steps:
            return
        left = self.epochs - self.epoch
        share = min(1.0, left) if self.progress_before == self.epoch else 1.0
        this_epoch, later = max(1, math.ceil(share * self.steps)), max(0.0, left - 1) * self.steps
        state.max_steps = self.first_step + this_epoch + math.ceil(later)

    def done(self, step: int) -> float:
        """Return the number of epochs done after ``step`` optimizer steps of the run."""
        share = self.epoch + 1 - self.progress_before
        return self.progress_before + share * (step - self.first_step) / self.steps

    def set_scheduler(self, step: int, scheduler: Any) -> None:
        """Set the schedule's position for the ``step``-th step of the run by the share of epochs that is done."""
        if self._is_limited_by_steps:
            return
        share = self.epoch + 1 - self.progress_before
        # In this order of operations integers stay exact, so without shorter epochs this is the stock schedule.
        position = self.progress_before * self.nominal_steps
        position += (step - self.first_step) * (share * self.nominal_steps) / self.steps
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = (int(position) if position == int(position) else position) - 1
        elif self.steps != self.nominal_steps and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s counts steps, and epochs have become shorter than the first: the learning rate will not reach the "
                "end of its schedule; use one of transformers' lr_scheduler_type, or max_steps",
                type(scheduler).__name__,
            )
