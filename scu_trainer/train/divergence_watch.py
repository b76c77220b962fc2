"""Watches the logged training loss for divergence: ``control/divergence.py`` decides, this reads and tells.

Nothing waits for the device: a loss is read when it is logged.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from transformers import TrainerCallback

from scu_trainer.control import divergence as control
from scu_trainer.errors import Diverged
from scu_trainer.settings import SafetySettings
from scu_trainer.train.checkpoint import checkpoints, step_of

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")


class DivergenceWatch(TrainerCallback):
    """Of one ``SCUTrainer``. ``notices``: what was told. Raises Diverged on all ranks where the settings say stop."""

    def __init__(self, trainer: SCUTrainer, settings: SafetySettings) -> None:
        self.trainer, self.settings = trainer, settings
        self._law = control.Law(factor=settings.divergence_factor)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Before a training."""
        self.notices: list[str] = []
        self._state = control.State()
        self._counted = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._counted = 0

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        curriculum = self.trainer.curriculum
        if curriculum is not None and curriculum.settings.methods:
            self._forget()  # this epoch's samples may be harder ones, and their loss is another loss

    def _forget(self) -> None:
        self._state = control.State()

    def count(self) -> None:
        """An optimizer step whose loss goes into the next log."""
        self._counted += 1

    def on_log(self, args, state, control, logs: Optional[dict[str, Any]] = None, **kwargs) -> None:
        if not logs or "loss" not in logs:
            return
        steps, self._counted = self._counted, 0
        self._observe(state.global_step, steps, logs["loss"])

    def _observe(self, step: int, steps: int, loss: float) -> None:
        self._state = control.observe(self._law, self._state, step=step, steps=steps, loss=loss)
        if self.notices or not control.diverges(self._state):
            return
        self.notices.append(self._text())
        if self.settings.divergence == "stop":
            raise Diverged(f"{self._text()}. {self._way_back()}")
        if self.trainer.is_world_process_zero():
            logger.warning(self._text())

    def _text(self) -> str:
        seen = self._state
        return (
            f"training diverges: the loss was {seen.best:.4g} on average at step {seen.best_step} and is "
            f"{seen.mean:.4g} at step {seen.step}, since step {seen.above_since} above {seen.ceiling:.4g}; lower "
            "learning_rate, lengthen warmup_steps or set max_grad_norm: 1. If such a loss is to be expected here, "
            "raise divergence_factor"
        )

    def _way_back(self) -> str:
        run, before = Path(self.trainer.args.output_dir), self._state.above_since
        found = next((path for path in checkpoints(run) if step_of(path) < before), None)
        if found is None:
            return f"There is no checkpoint from before step {before}: start anew, with a smaller save_steps"
        return f"The newest checkpoint from before is {found.name}: resume_from_checkpoint: {found}"

    # -- reports and checkpoints ---------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        seen = self._state
        return {
            "diverged": bool(self.notices),
            "mean_loss": seen.mean,
            "best_mean_loss": seen.best,
            "ceiling": None if math.isinf(seen.ceiling) else seen.ceiling,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state.to_dict(), "notices": self.notices}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._state, self.notices = control.State.from_dict(saved["state"]), list(saved["notices"])
