"""fp16 and its loss scaler: a step that it skips counts as skipped, and clipping can be repeated.

``accelerator.optimizer_step_was_skipped`` is what the stock loop asks before it moves the schedule, and what every loop
here asks. accelerate answers it by whether ``optimizer.step`` was called. A fused optimizer is called in any case:
torch hands it ``found_inf``, and its kernel leaves the weights alone. So ``found_inf`` corrects the answer here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from scu_trainer.train.optimizer_state import inner_optimizer
from scu_trainer.train.second_try import second_try

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer


@contextlib.contextmanager
def unscaled(accelerator: Accelerator, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the loss scale is out of ``gradients``, and clipping does not take it out again.

    It does so first of all, and torch refuses a second time: a clipping that ran out of memory could not be repeated.
    """
    scaler = accelerator.scaler
    if scaler is None or not scaler.is_enabled():
        yield
        return
    second_try(accelerator.unscale_gradients, "taking the loss scale out of the gradients", unchanged=gradients)
    before = vars(accelerator).get("unscale_gradients")
    accelerator.unscale_gradients = lambda optimizer=None: None
    try:
        yield
    finally:
        del accelerator.unscale_gradients
        if before is not None:
            accelerator.unscale_gradients = before


class OverflowWatch(TrainerCallback):
    """Of one ``SCUTrainer``; the first of all callbacks, which ask whether the step was skipped."""

    def __init__(self, trainer: SCUTrainer) -> None:
        self.trainer = trainer
        self._found_inf: Optional[torch.Tensor] = None
        self._hook: Any = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.detach()
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

    def detach(self) -> None:
        """After training, also one that raised: the optimizer is the caller's again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
