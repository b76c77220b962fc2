"""From the logits of some rows to their losses, and in the place of the logits the gradient of these."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

logger = logging.getLogger("scu_trainer")

Kernel = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]

BLOCK_BYTES = 2**20
"""Of the logits that one thread of a CPU works on before the next: the five passes over them then meet in its cache."""

_BY_TORCH = "The Triton kernel for the loss does not work on %s, torch's own operations take longer: %s"
TRIAL_SHAPE = 4, 5_001
TRIAL_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest difference of losses and gradients from torch's own operations in float32: they round their results."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """For logits of ``dtype`` on ``device``."""
    if device.type == "cpu":
        return _block_by_block
    return _fused(device, dtype) if device.type == "cuda" and dtype in TRIAL_BOUNDS else _softmax_in_place


def reads_half(kernel: Kernel) -> bool:
    """Whether logits in half precision are computed with in float32 as they are; others need a float32 copy."""
    return kernel not in (_block_by_block, _softmax_in_place)


@functools.cache
def _fused(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of triton_softmax.py, once it has given on this ``device`` what torch's own operations give: Triton
    needs a C compiler, and what it makes depends on its version and on the card."""
    try:
        from scu_trainer.train.loss.rows.triton_softmax import softmax_in_place

        farthest = _farthest(softmax_in_place, device, dtype)
    except ImportError as error:  # as on Windows
        logger.info("The loss is computed by torch's own operations on %s: %s", device, error)
    except Exception as error:  # a compiler fails in many ways, and a training can do without
        # Recovered from as everywhere, and tried again; but for a compiler that the host has no room to start.
        if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
            raise
        logger.warning(_BY_TORCH, device, f"{type(error).__name__}: {str(error)[:200]}")
    else:
        if farthest <= TRIAL_BOUNDS[dtype]:
            return softmax_in_place
        logger.warning(_BY_TORCH, device, f"its results are {farthest:.1e} off")
    return _softmax_in_place


def _farthest(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference of ``kernel`` from torch's own operations in float32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TRIAL_SHAPE, generator=generator).to(device, dtype)
    targets = torch.arange(len(logits), device=device)
    expected = _softmax_in_place(logits.to(torch.float32, copy=True), targets, True)
    made = kernel(logits, targets, True)
    return max(float((one - other).abs().max()) for one, other in zip(made, expected, strict=True))


def _block_by_block(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """``_softmax_in_place`` of some rows after the others. With 128,000 words the passes take 0.6 times as long.

    Of logits without content (train/memory_estimate) the first and the last blocks show what all of them take."""
    row_bytes, threads = logits.size(1) * logits.element_size(), torch.get_num_threads()
    rows = threads * max(1, BLOCK_BYTES // row_bytes)
    if len(logits) <= rows:
        return _softmax_in_place(logits, targets, with_gradient)
    blocks = list(zip(logits.split(rows), targets.split(rows), strict=True))
    alike = range(2, len(blocks) - 2) if isinstance(logits, FakeTensor) else ()
    losses = [
        block[0].new_empty(len(block[0])) if number in alike else _softmax_in_place(*block, with_gradient)[0]
        for number, block in enumerate(blocks)
    ]
    return torch.cat(losses), logits


def _softmax_in_place(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses (rows,) and ``logits`` overwritten by their gradient.

    The exponentials are summed pairwise, torch.softmax on a CPU sums one by one: at 128,000 words that is a hundred
    times the error.
    """
    targets = targets.unsqueeze(1)
    highest = logits.amax(dim=1, keepdim=True)
    distance = highest - logits.gather(1, targets)
    total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
    losses = (distance + total.log()).squeeze(1)
    if with_gradient:
        logits.div_(total).scatter_add_(1, targets, torch.full_like(total, -1.0))
    return losses, logits
