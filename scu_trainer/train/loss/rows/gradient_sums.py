"""Gradients that are added where they belong: straight into ``weight.grad``.

A gradient that is handed to autograd is scaled in one pass and added in another, once per micro-batch; that of an
embedding is a tensor of the whole table before. With 128,000 words such passes are a tenth of a step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def may_add_to_gradient(weight: Tensor, ctx: Any, position: int) -> bool:
    """Whether a backward may add to ``weight.grad`` itself, and nobody could tell.

    ctx: of the autograd function, whose input ``position`` is ``weight``. No where there is no gradient yet, where it
    is of another kind than the weight, where a hook waits for it, where ranks reduce it (they hook deeper than can be
    seen here), and where somebody asks for it by ``torch.autograd.grad``.
    """
    gradient = weight.grad
    if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
        return False
    if (gradient.dtype, gradient.shape, gradient.device) != (weight.dtype, weight.shape, weight.device):
        return False
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return _is_accumulated(weight, ctx.next_functions[position][0])


def _is_accumulated(weight: Tensor, node: Any) -> bool:
    """Whether this backward ends in ``weight.grad``."""
    if node is None or getattr(node, "variable", None) is not weight:  # a part of it, or a copy
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad captures it
        return False
