"""Compute losses from the logits of some rows, and overwrite the logits with their gradient."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

logger = logging.getLogger("scu_trainer")

Kernel = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]

BLOCK_BYTES = 2**20
"""Size of the logits that one CPU thread works on at a time, so that all five passes over them hit its cache."""

_FALLBACK_WARNING = "the Triton kernel for the loss does not work on %s, so torch's slower operations are used: %s"
TRIAL_SHAPE = 4, 5_001
TRIAL_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Maximum difference of losses and gradients from torch's own operations in float32, because results are rounded."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel for logits of ``dtype`` on ``device``."""
    if device.type == "cpu":
        return _block_by_block
    return _fused(device, dtype) if device.type == "cuda" and dtype in TRIAL_BOUNDS else _softmax_in_place


def reads_half(kernel: Kernel) -> bool:
    """Return whether the kernel reads half-precision logits and computes in float32; others need a float32 copy."""
    return kernel not in (_block_by_block, _softmax_in_place)


@functools.cache
def _fused(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel of triton_softmax.py if it agrees with torch's own operations on this ``device``. Checked
    because Triton needs a C compiler, and its output depends on its version and on the GPU."""
    try:
        from scu_trainer.train.loss.rows.triton_softmax import softmax_in_place

        difference = _largest_difference(softmax_in_place, device, dtype)
    except ImportError as error:  # for instance, on Windows
        logger.info("the loss is computed by torch's own operations on %s: %s", device, error)
    except Exception as error:  # compilers fail in many ways, and training does not need the kernel
        # Running out of memory is handled elsewhere, then tried again, unless the host cannot start a compiler.
        if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
            raise
        logger.warning(_FALLBACK_WARNING, device, f"{type(error).__name__}: {str(error)[:200]}")
    else:
        if difference <= TRIAL_BOUNDS[dtype]:
            return softmax_in_place
        logger.warning(_FALLBACK_WARNING, device, f"its results are {difference:.1e} off")
    return _softmax_in_place


def _largest_difference(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference of ``kernel`` from torch's own operations in float32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TRIAL_SHAPE, generator=generator).to(device, dtype)
    targets = torch.arange(len(logits), device=device)
    expected = _softmax_in_place(logits.to(torch.float32, copy=True), targets, True)
    made = kernel(logits, targets, True)
    return max(float((value - other).abs().max()) for value, other in zip(made, expected, strict=True))


def with_soft_cap(kernel: Kernel, soft_cap: float) -> Kernel:
    """Return ``kernel`` for soft_cap · tanh(logits / soft_cap), with the gradient for the logits before that. It holds
    the logits (on a CPU, those of a block) once more."""
    if kernel is _block_by_block:
        return functools.partial(_block_by_block, kernel=with_soft_cap(_softmax_in_place, soft_cap))

    def capped(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        shares = logits.div_(soft_cap).tanh_()
        slopes = shares.square().neg_().add_(1) if with_gradient else None
        losses, signal = kernel(shares.mul_(soft_cap), targets, with_gradient)
        return losses, signal if slopes is None else signal.mul_(slopes)

    return capped


def _block_by_block(
    logits: Tensor, targets: Tensor, with_gradient: bool, kernel: Optional[Kernel] = None
) -> tuple[Tensor, Tensor]:
    """Apply ``_softmax_in_place``, or ``kernel``, to blocks of rows; with a vocabulary of 128,000 that takes 0.6 times
    as long. For logits without content (train/memory_estimate), the first and last blocks show what all blocks need."""
    kernel = kernel or _softmax_in_place
    row_bytes, threads = logits.size(1) * logits.element_size(), torch.get_num_threads()
    rows = threads * max(1, BLOCK_BYTES // row_bytes)
    if len(logits) <= rows:
        return kernel(logits, targets, with_gradient)
    blocks = list(zip(logits.split(rows), targets.split(rows), strict=True))
    skipped = range(2, len(blocks) - 2) if isinstance(logits, FakeTensor) else ()
    losses = [
        block[0].new_empty(len(block[0])) if number in skipped else kernel(*block, with_gradient)[0]
        for number, block in enumerate(blocks)
    ]
    return torch.cat(losses), logits


def _softmax_in_place(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the losses (rows,), and overwrite ``logits`` with their gradient. The exponentials are summed pairwise.
    torch.softmax on a CPU sums them one by one, with a hundred times the error at 128,000 words."""
    targets = targets.unsqueeze(1)
    highest = logits.amax(dim=1, keepdim=True)
    distance = highest - logits.gather(1, targets)
    total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
    losses = (distance + total.log()).squeeze(1)
    if with_gradient:
        logits.div_(total).scatter_add_(1, targets, torch.full_like(total, -1.0))
    return losses, logits
