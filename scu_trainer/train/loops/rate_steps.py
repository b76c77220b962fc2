"""Lower the learning rate in steps after whole epochs: ``lr_step_size``, ``lr_milestones``."""

from __future__ import annotations

import functools
import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import Optional

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scu_trainer.errors import SettingsError
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loop import Loop

logger = logging.getLogger("scu_trainer")


class RateSteps(Loop):
    """Creates the learning rate schedule, and does nothing after that.

    Like ``torch.optim.lr_scheduler.StepLR`` or ``MultiStepLR`` with a linear warm-up, stepped per optimizer step.
    Epochs are those of the run; the warm-up is part of the first ones. It is a ``LambdaLR``, because its position can
    be set when a curriculum makes epochs shorter.
    """

    name = "rate_steps"

    def __init__(self, settings: EfficiencySettings) -> None:
        self.settings = settings

    def scheduler(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: Optional[int]) -> LambdaLR:
        """Return the schedule. Raises SettingsError if the length of an epoch is not known."""
        if steps_per_epoch is None:
            raise SettingsError(
                "lr_step_size and lr_milestones count epochs, but their length is only known inside train(); let "
                "train() create the schedule, or pass your own: optimizers=(optimizer, scheduler)"
            )
        drops = _drop_counter(self.settings, steps_per_epoch, total_steps)
        if not drops(total_steps - 1):
            logger.warning(
                "the learning rate never drops: lr_step_size or the first of lr_milestones is after the end of the run "
                "(%d steps, %d per epoch)",
                total_steps,
                steps_per_epoch,
            )
        warmup_steps = self.trainer.args.get_warmup_steps(total_steps)
        return LambdaLR(optimizer, functools.partial(_factor, drops, self.settings.lr_gamma, warmup_steps))


def _factor(drops: Callable[[float], int], gamma: float, warmup_steps: int, position: float) -> float:
    """Return the factor at ``position``, in optimizer steps; a fraction if an epoch is shorter than the first."""
    warm = min(1.0, position / warmup_steps) if warmup_steps else 1.0
    return warm * gamma ** drops(position)


def _drop_counter(settings: EfficiencySettings, steps_per_epoch: int, total_steps: int) -> Callable[[float], int]:
    """Return a function from a position to the number of drops before it."""
    if settings.lr_step_size is not None:
        return functools.partial(_whole_intervals, settings.lr_step_size * steps_per_epoch)
    unit = total_steps if settings.milestones_are_shares else steps_per_epoch
    return functools.partial(bisect_right, [milestone * unit for milestone in settings.lr_milestones])


def _whole_intervals(interval: int, position: float) -> int:
    return int(position // interval)
