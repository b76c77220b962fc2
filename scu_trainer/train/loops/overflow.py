"""Mark a step that fp16's loss scaler skips as skipped.

The stock loop checks ``accelerator.optimizer_step_was_skipped`` before it moves the schedule, and every loop checks it,
too. accelerate sets it by whether ``optimizer.step`` was called. But a fused optimizer is always called: torch passes
``found_inf`` to it, and its kernel then leaves the weights unchanged. So ``found_inf`` corrects the flag here.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from scu_trainer.train.loop import Loop
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer


class OverflowWatch(Loop):
    """The first of all callbacks, because the others check whether the step was skipped."""

    name = "overflow"
    is_first = True

    def __init__(self) -> None:
        self._found_inf: Optional[torch.Tensor] = None
        self._hook: Any = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.end()
        scaler = self.trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled() and not self.trainer.is_deepspeed_enabled:
            self._hook = inner_optimizer(self.trainer.optimizer).register_step_pre_hook(self._read_found_inf)

    def _read_found_inf(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # Set only during the step of an optimizer that handles the scale itself, and removed after it.
        self._found_inf = getattr(optimizer, "found_inf", None)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        found_inf, self._found_inf = self._found_inf, None
        if found_inf is not None and bool(found_inf):
            self.trainer.optimizer._is_overflow = True

    def end(self) -> None:
        """Remove the hook, so that the optimizer is as the user passed it."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
