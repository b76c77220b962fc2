"""The parts of ``EfficiencySettings`` that act in a training, put together for the trainer."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scu_trainer.errors import SettingsError
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.models.memory_format import apply_channels_last
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.train.ema import WeightAverage
from scu_trainer.train.profiling import ProfileCallback
from scu_trainer.train.schedules import falling_in_steps
from scu_trainer.train.second_try import second_try
from scu_trainer.train.throughput import Throughput

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")


class Efficiency:
    """Attached to one ``SCUTrainer``, after its controllers: averages see the weights as these leave them.

    Raises SettingsError for settings that contradict the trainer's arguments, ControlError where weights cannot be
    averaged.
    """

    def __init__(self, trainer: SCUTrainer, settings: EfficiencySettings) -> None:
        check_efficiency(settings, trainer.args)
        self.trainer, self.settings = trainer, settings
        self.average: Optional[WeightAverage] = None
        self.throughput: Optional[Throughput] = None
        self.pace: Optional[Throughput] = None
        self.profile: Optional[ProfileCallback] = None
        if settings.channels_last and not apply_channels_last(trainer.model):
            logger.warning("channels_last: the model has no convolution over pictures; nothing is changed")
        if settings.keep_freed_memory and trainer.args.device.type == "cpu":
            keep_freed()
        if settings.ema_decay is not None:
            self.average = WeightAverage(trainer, settings.ema_decay)
            trainer.add_callback(self.average)
        if settings.throughput:
            self.throughput = self.pace = Throughput(trainer, settings.peak_tflops)
            trainer.add_callback(self.throughput)
        if settings.profile_steps:
            self.profile = ProfileCallback(settings.profile_steps)
            trainer.add_callback(self.profile)

    def measure_pace(self) -> None:
        """Rows and tokens per second in every row of the logs, also without ``throughput``, which adds utilization."""
        if self.pace is None:
            self.pace = Throughput(self.trainer, counts_flops=False)
            self.trainer.add_callback(self.pace)

    @property
    def lines(self) -> list[str]:
        """What a person should know before training."""
        return [] if self.average is None else [self.average.line]

    def scheduler(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: Optional[int]) -> Optional[LambdaLR]:
        """None where the stock schedule stays. Raises SettingsError where nobody has said how long an epoch is."""
        if not self.settings.has_lr_steps:
            return None
        if steps_per_epoch is None:
            raise SettingsError(
                "lr_step_size and lr_milestones count epochs, whose length is known once train() has its data; let "
                "train() make the schedule, or give the trainer one of your own: optimizers=(optimizer, scheduler)"
            )
        warmup_steps = self.trainer.args.get_warmup_steps(total_steps)
        return falling_in_steps(
            self.settings,
            optimizer,
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
        )

    def observe(self, inputs: Any, num_items: Any) -> None:
        """An accumulation batch that is about to train."""
        if self.pace is not None:
            second_try(partial(self.pace.observe, inputs, num_items), "counting the tokens of a step")

    def evaluation(self) -> AbstractContextManager:
        """Around an evaluation."""
        return contextlib.nullcontext() if self.average is None else self.average.in_use()

    def finish(self) -> None:
        """After a training, also one that raised."""
        if self.profile is not None:
            self.profile.close()

    def scalars(self) -> dict[str, float]:
        """For a log of a training step."""
        return {} if self.pace is None else self.pace.scalars()

    def figures(self) -> Optional[dict[str, Any]]:
        """What stands under "throughput" in scu_metrics.json; None where it was off."""
        return None if self.throughput is None else self.throughput.figures()

    def save(self, folder: str) -> None:
        if self.average is not None:
            self.average.save(folder)

    def load(self, checkpoint: str) -> None:
        if self.average is not None:
            self.average.load(checkpoint)
