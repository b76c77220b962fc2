"""fp16 and its loss scaler: a step that it skips counts as skipped.

``accelerator.optimizer_step_was_skipped`` is what the stock loop asks before it moves the schedule, and what every loop
here asks. accelerate answers it by whether ``optimizer.step`` was called. A fused optimizer is called in any case:
torch hands it ``found_inf``, and its kernel leaves the weights alone. So ``found_inf`` corrects the answer here.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from scu_trainer.train.loop import Loop
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer


class OverflowWatch(Loop):
    """The first of all callbacks, which ask whether the step was skipped."""

    name = "overflow"
    is_first = True

    def __init__(self) -> None:
        self._found_inf: Optional[torch.Tensor] = None
        self._hook: Any = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.end()
        scaler = self.trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled() and not self.trainer.is_deepspeed_enabled:
            self._hook = inner_optimizer(self.trainer.optimizer).register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # There during the step of an optimizer that takes the scale itself, and taken away after it.
        self._found_inf = getattr(optimizer, "found_inf", None)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        found_inf, self._found_inf = self._found_inf, None
        if found_inf is not None and bool(found_inf):
            self.trainer.optimizer._is_overflow = True

    def end(self) -> None:
        """The optimizer is the caller's again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
