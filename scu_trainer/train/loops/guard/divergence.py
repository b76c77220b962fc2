"""Watch the logged training loss for divergence: ``control/guard/divergence.py`` decides, this reads and reports.

Never waits for the device, because a loss is read when it is logged.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import Trainer

from scu_trainer.control.guard import divergence as control
from scu_trainer.errors import Diverged
from scu_trainer.settings import SafetySettings
from scu_trainer.train.checkpoints.format import checkpoints, step_of
from scu_trainer.train.loop import run_folder

logger = logging.getLogger("scu_trainer")


class DivergenceWatch:
    """Watches one training. ``epochs_differ``: whether epochs choose different samples. ``notices``: what was reported.
    Raises Diverged on all ranks if the settings say stop."""

    def __init__(self, trainer: Trainer, settings: SafetySettings, epochs_differ: bool) -> None:
        self.trainer, self.settings, self._epochs_differ = trainer, settings, epochs_differ
        self.begin()

    def begin(self) -> None:
        """Reset for a new training."""
        self.notices: list[str] = []
        self._state = control.DivergenceState()
        self._counted = self._epoch = 0

    def start(self) -> None:
        """Start counting with the first step of a training."""
        self._counted = 0

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch; a run that resumes within an epoch begins it again. ``epoch``: its number."""
        if self._epochs_differ and epoch != self._epoch:
            # The samples of this epoch may be harder, so their losses cannot be compared.
            self._state = control.DivergenceState()
        self._epoch = epoch

    def count(self) -> None:
        """Count an optimizer step with a loss that goes into the next log."""
        self._counted += 1

    def see(self, step: int, loss: float) -> None:
        """Check ``loss``, which was logged after ``step``, the mean over the steps counted since the last log."""
        steps, self._counted = self._counted, 0
        self._state = control.observe(self.settings.divergence_factor, self._state, step=step, steps=steps, loss=loss)
        if self.notices or not control.diverges(self._state):
            return
        self.notices.append(self._message())
        if self.settings.divergence == "stop":
            raise Diverged(f"{self._message()}. {self._checkpoint_hint()}")
        if self.trainer.is_world_process_zero():
            logger.warning(self._message())

    def _message(self) -> str:
        seen = self._state
        return (
            f"training diverges: the logged loss was {seen.best:.4g} on average at step {seen.best_step}, is now "
            f"{seen.mean:.4g} at step {seen.step}, and has been above {seen.ceiling:.4g} since step "
            f"{seen.above_since}; lower learning_rate, lengthen warmup_steps or set max_grad_norm: 1. If you expect "
            "such a loss here, raise divergence_factor"
        )

    def _checkpoint_hint(self) -> str:
        run, before = run_folder(self.trainer), self._state.above_since
        found = next((path for path in checkpoints(run) if step_of(path) < before), None)
        if found is None:
            return f"No checkpoint is older than step {before}: start over with a smaller save_steps"
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
        return {"state": self._state.to_dict(), "notices": self.notices, "epoch": self._epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._state, self.notices = control.DivergenceState.from_dict(saved["state"]), list(saved["notices"])
        self._epoch = saved.get("epoch", -1)  # older checkpoints do not hold it
