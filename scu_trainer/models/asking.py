"""A model that is asked something for a moment, and left in the mode it was in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scu_trainer.imports import without_collector

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each module is in its mode again."""
    import torch

    with in_mode(model, training=False), torch.no_grad():
        yield


def float32_settings(model: nn.Module) -> list[Any]:
    """Of torch, which say how products of float32 are rounded in ``model`` on a card: of matrices, and of convolutions
    and recurrent cells where it has any. To set one of the latter, be it to what it was, ends its default."""
    import torch
    from torch.nn.modules.conv import _ConvNd

    of_cudnn = {_ConvNd: torch.backends.cudnn.conv, torch.nn.RNNBase: torch.backends.cudnn.rnn}
    found = [own for kind, own in of_cudnn.items() if any(isinstance(module, kind) for module in model.modules())]
    return [torch.backends.cuda.matmul, *found]


@contextlib.contextmanager
def exact_products(model: nn.Module) -> Iterator[None]:
    """Products of float32 in float32: on a card a training has set TF32 for the whole process, which keeps 11 bits."""
    import torch

    settings = float32_settings(model)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):  # "none": as the process has it, then and later
            setting.fp32_precision = "none" if precision == torch.backends.fp32_precision else precision


@contextlib.contextmanager
def switches_kept() -> Iterator[None]:
    """Afterwards torch's switches for a whole process are as before: TF32, determinism, how cuDNN chooses kernels."""
    with without_collector():
        import torch
        from transformers.utils import import_utils

    cudnn = torch.backends.cudnn
    precision, mode = torch.backends.fp32_precision, torch.get_deterministic_debug_mode()
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.fp32_precision = precision
        import_utils.enable_tf32.cache_clear()  # cached: the next time it would do nothing
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark


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
