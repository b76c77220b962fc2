"""Compute losses and gradient from logits in one Triton kernel; CUDA builds of torch include Triton.

Half-precision logits are read once for the losses and once for the gradient, processed in float32, and overwritten.
torch's own operations need a float32 copy and five passes over it. ``softmax.kernel_for`` imports this module only if
the device is a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 4096
"""Words of a row that one thread block processes at a time, sixteen per thread."""

WARPS = 8


@triton.jit
def _softmax_of_row(logits, targets, losses, stride, words, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows times words can exceed 2^31
    first = logits + row * stride
    target = tl.load(targets + row)
    chosen = tl.load(first + target).to(tl.float32)
    highest = float("-inf")
    total = 0.0
    for begin in range(0, words, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(first + columns, mask=columns < words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # masked words: -inf minus -inf would be NaN
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(values - base), 0)
        highest = higher
    tl.store(losses + row, (highest - chosen) + tl.log(total))
    if WITH_GRADIENT:
        for begin in range(0, words, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            values = tl.load(first + columns, mask=columns < words, other=0.0).to(tl.float32)
            gradient = tl.exp(values - highest) / total - tl.where(columns == target, 1.0, 0.0)
            tl.store(first + columns, gradient.to(logits.dtype.element_ty), mask=columns < words)


def softmax_in_place(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the losses (rows,) in float32, and overwrite ``logits`` (rows, words) with their gradient.

    ``logits``: float32 or half precision; rows need not be adjacent in memory. Targets must be in the vocabulary. Does
    not wait for the device.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton starts kernels on the current device
        _softmax_of_row[(len(logits),)](
            logits,
            targets,
            losses,
            logits.stride(0),
            logits.size(1),
            WITH_GRADIENT=with_gradient,
            BLOCK=BLOCK_WORDS,
            num_warps=WARPS,
        )
    return losses, logits
