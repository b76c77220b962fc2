"""Losses and gradient of logits in one kernel for a card, by Triton, which CUDA builds of torch bring with them.

Logits in half precision are read once for the losses and once for the gradient, computed with in float32 and
overwritten; torch's own operations need a copy of them in float32 and five passes over that. ``softmax.kernel_for``
imports this where the device is a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 4096
"""Words of a row that one group of threads holds at a time, sixteen to a thread."""

WARPS = 8


@triton.jit
def _one_row(logits, targets, losses, stride, words, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows times words pass 2^31
    first = logits + row * stride
    target = tl.load(targets + row)
    chosen = tl.load(first + target).to(tl.float32)
    highest = float("-inf")
    total = 0.0
    for begin in range(0, words, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(first + columns, mask=columns < words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of words that are ruled out: -inf less -inf is NaN
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
    """Losses (rows,), float32, and ``logits`` (rows, words), float32 or half, overwritten by their gradient, whose rows
    may lie apart. Targets lie in the vocabulary. Waits for nothing."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):  # where Triton starts kernels
        _one_row[(len(logits),)](
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
