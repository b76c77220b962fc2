"""fp16 and its loss scaler: clipping can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator

from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import replaced


@contextlib.contextmanager
def unscaled(accelerator: Accelerator, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the loss scale is out of ``gradients``, and clipping does not take it out again.

    It does so first of all, and torch refuses a second time: a clipping that ran out of memory could not be repeated.
    For an ``accelerator`` whose scaler is enabled.
    """
    second_try(accelerator.unscale_gradients, "dividing the gradients by the loss scale", unchanged=gradients)
    with replaced(accelerator, "unscale_gradients", lambda optimizer=None: None):
        yield
