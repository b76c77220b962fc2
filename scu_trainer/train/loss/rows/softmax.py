"""From the logits of some rows to their losses, and in the place of the logits the gradient of these."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Kernel = Callable[[Tensor, Tensor, bool, Optional[float]], tuple[Tensor, Tensor]]

BLOCK_BYTES = 2**20
"""Of the logits that one thread of a CPU works on before the next: the five passes over them then meet in its cache."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    if device.type == "cpu":
        return _block_by_block
    return _liger if device.type == "cuda" and dtype == torch.float32 and _has_liger() else _softmax_in_place


@functools.cache
def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _block_by_block(
    logits: Tensor, targets: Tensor, with_gradient: bool, softcap: Optional[float]
) -> tuple[Tensor, Tensor]:
    """``_softmax_in_place`` of some rows after the others. With 128,000 words the passes take 0.6 times as long.

    Of logits without content (train/memory_estimate) the first and the last blocks show what all of them take; what the
    others leave are losses."""
    row_bytes, threads = logits.size(1) * logits.element_size(), torch.get_num_threads()
    rows = threads * max(1, BLOCK_BYTES // row_bytes)
    if len(logits) <= rows:
        return _softmax_in_place(logits, targets, with_gradient, softcap)
    blocks = list(zip(logits.split(rows), targets.split(rows), strict=True))
    alike = range(2, len(blocks) - 2) if isinstance(logits, FakeTensor) else ()
    losses = [
        block[0].new_empty(len(block[0])) if number in alike else _softmax_in_place(*block, with_gradient, softcap)[0]
        for number, block in enumerate(blocks)
    ]
    return torch.cat(losses), logits


def _softmax_in_place(
    logits: Tensor, targets: Tensor, with_gradient: bool, softcap: Optional[float]
) -> tuple[Tensor, Tensor]:
    """Losses (rows,) and ``logits`` overwritten by their gradient.

    The exponentials are summed pairwise, torch.softmax on a CPU sums one by one: at 128,000 words that is a hundred
    times the error.
    """
    slope = _cap(logits, softcap) if softcap else None
    targets = targets.unsqueeze(1)
    highest = logits.amax(dim=1, keepdim=True)
    distance = highest - logits.gather(1, targets)
    total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
    losses = (distance + total.log()).squeeze(1)
    if with_gradient:
        logits.div_(total).scatter_add_(1, targets, torch.full_like(total, -1.0))
        if slope is not None:
            logits.mul_(slope)
    return losses, logits


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Cap ``logits`` in place; the slope of the cap, 1 - tanh²."""
    tanh = logits.div_(softcap).tanh_().clone()
    logits.mul_(softcap)
    return tanh.square_().neg_().add_(1.0)


def _liger(logits: Tensor, targets: Tensor, with_gradient: bool, softcap: Optional[float]) -> tuple[Tensor, Tensor]:
    """The same by Liger's kernel, which writes the gradient over the logits in its forward.

    Its backward would multiply that by ones into another tensor of this size. Waits for the device three times: the
    kernel counts the targets and looks whether they are in the vocabulary.
    """
    from liger_kernel.transformers.functional import liger_cross_entropy

    with torch.set_grad_enabled(with_gradient):
        leaf = logits.detach().requires_grad_(with_gradient)
        losses = liger_cross_entropy(leaf, targets, reduction="none", softcap=softcap)
    return losses.detach(), logits
