"""A model that is asked something for a moment, and left in the mode it was in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each module is in its mode again."""
    import torch

    with in_mode(model, training=False), torch.no_grad():
        yield


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 in float32: on a card a training has set TF32 for the whole process, which keeps 11 bits."""
    import torch

    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):  # "none": as the process has it, then and later
            kind.fp32_precision = "none" if precision == torch.backends.fp32_precision else precision


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All of ``model`` in one mode; afterwards each module is in its own again."""
    was_training = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        model.train(was_training[model])  # by its own method, which may do more
        for module, mode in was_training.items():
            module.training = mode
