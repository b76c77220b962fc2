"""A learning rate that falls in steps after whole epochs: ``lr_step_size``, ``lr_milestones``."""

from __future__ import annotations

from typing import Optional

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scu_trainer.errors import SettingsError
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.schedules import falling_in_steps


class RateSteps(Loop):
    """Makes the schedule, and does nothing after that."""

    name = "rate_steps"

    def __init__(self, settings: EfficiencySettings) -> None:
        self.settings = settings

    def scheduler(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: Optional[int]) -> LambdaLR:
        """Raises SettingsError where nobody has said how long an epoch is."""
        if steps_per_epoch is None:
            raise SettingsError(
                "lr_step_size and lr_milestones count epochs, whose length is known once train() has its data; let "
                "train() make the schedule, or give the trainer one of your own: optimizers=(optimizer, scheduler)"
            )
        return falling_in_steps(
            self.settings,
            optimizer,
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            warmup_steps=self.trainer.args.get_warmup_steps(total_steps),
        )
