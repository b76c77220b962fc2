"""Contexts in which a model is evaluated for a moment, and which restore its modes and torch's switches afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scu_trainer.imports import without_collector

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; afterwards each module is in its previous mode again."""
    import torch

    with in_mode(model, training=False), torch.no_grad():
        yield


def float32_settings(model: nn.Module) -> list[Any]:
    """Return torch's settings for the precision of float32 products in ``model`` on a GPU. These are the setting of
    matrix products, and those of convolutions and recurrent cells if the model has any: once one of the latter is set,
    even to its current value, it no longer follows torch's default."""
    import torch
    from torch.nn.modules.conv import _ConvNd

    cudnn_settings = {_ConvNd: torch.backends.cudnn.conv, torch.nn.RNNBase: torch.backends.cudnn.rnn}
    used = [setting for kind, setting in cudnn_settings.items() if any(isinstance(m, kind) for m in model.modules())]
    return [torch.backends.cuda.matmul, *used]


@contextlib.contextmanager
def exact_products(model: nn.Module) -> Iterator[None]:
    """Compute float32 products in full: on a GPU, a training may have set TF32 (11 bits) for the whole process."""
    import torch

    settings = float32_settings(model)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):  # "none" follows the setting of the process
            setting.fp32_precision = "none" if precision == torch.backends.fp32_precision else precision


@contextlib.contextmanager
def torch_switches_restored() -> Iterator[None]:
    """Restore torch's process-wide switches afterwards: TF32, determinism, and how cuDNN chooses kernels."""
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
        import_utils.enable_tf32.cache_clear()  # the function is cached, so its next call would do nothing
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all of ``model`` in one mode; afterwards each module is in its previous mode again."""
    was_training = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        model.train(was_training[model])  # the model's own method may do more than set the modes
        for module, mode in was_training.items():
            module.training = mode
