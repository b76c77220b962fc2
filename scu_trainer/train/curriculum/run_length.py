"""How long a run is when its epochs are not equally long: steps, progress, and where the learning rate stands."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments

logger = logging.getLogger("scu_trainer")


class RunLength:
    """``nominal_steps``: optimizer steps of the first epoch, what the learning rate's schedule was made for.

    ``epoch``, ``first_step``, ``steps``: of the present plan, which stands at ``progress_before`` epochs (a fraction
    where the beginning of the epoch was cut otherwise) when it begins, and at ``epoch + 1`` when it ends.
    """

    def __init__(self, args: TrainingArguments, nominal_batches: int) -> None:
        self._args = args
        self.nominal_steps = math.ceil(nominal_batches / args.gradient_accumulation_steps)
        self.epoch = self.first_step = 0
        self.steps = self.nominal_steps
        self.progress_before = 0.0
        self._said = False

    @property
    def _counts_steps(self) -> bool:
        return self._args.max_steps > 0

    @property
    def epochs(self) -> float:
        args = self._args
        return args.max_steps / self.nominal_steps if self._counts_steps else args.num_train_epochs

    @property
    def total_steps(self) -> int:
        """Of a run whose epochs are all like the first."""
        return self._args.max_steps if self._counts_steps else math.ceil(self.epochs * self.nominal_steps)

    def begin(self, epoch: int, first_step: int, batches: int, progress_before: float) -> None:
        """A plan of ``batches`` micro-batches per rank; its first optimizer step follows ``first_step``."""
        self.epoch, self.first_step, self.progress_before = epoch, first_step, progress_before
        self.steps = math.ceil(batches / self._args.gradient_accumulation_steps)

    def tell(self, state: TrainerState) -> None:
        """``max_steps`` as it will be if the epochs to come are like this one."""
        state.num_train_epochs = math.ceil(self.epochs)
        if self._counts_steps:
            return
        left = self.epochs - self.epoch
        share = min(1.0, left) if self.progress_before == self.epoch else 1.0
        this, later = max(1, math.ceil(share * self.steps)), max(0.0, left - 1) * self.steps
        state.max_steps = self.first_step + this + math.ceil(later)

    def done(self, step: int) -> float:
        """Epochs that are done after ``step`` optimizer steps of the run."""
        share = self.epoch + 1 - self.progress_before
        return self.progress_before + share * (step - self.first_step) / self.steps

    def set_scheduler(self, step: int, scheduler: Any) -> None:
        """Let the schedule's next step, the ``step``-th of the run, stand where the epochs stand."""
        if self._counts_steps:
            return
        share = self.epoch + 1 - self.progress_before
        # In this order of operations whole numbers stay whole: the stock schedule where nothing is shorter.
        position = self.progress_before * self.nominal_steps
        position += (step - self.first_step) * (share * self.nominal_steps) / self.steps
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = (int(position) if position == int(position) else position) - 1
        elif self.steps != self.nominal_steps and not self._said:
            self._said = True
            logger.warning(
                "%s counts steps, and epochs have become shorter than the first: the learning rate will not reach the "
                "end of its schedule; use one of transformers' lr_scheduler_type, or max_steps",
                type(scheduler).__name__,
            )
