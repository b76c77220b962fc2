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
