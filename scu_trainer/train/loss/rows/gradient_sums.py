"""Gradients that are added where they belong: straight into ``weight.grad``.

Autograd scales a gradient in one pass and adds it in another, once per micro-batch, and that of an embedding is a whole
table, mostly zeros: 0.1 s on a CPU with 128,000 words of size 256; adding the rows of 510 tokens takes 0.1 ms.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from scu_trainer.train.loss.rows.pages import new_zeros


def may_add_to_gradient(weight: Tensor, ctx: Any, position: int) -> bool:
    """Whether a backward may add to ``weight.grad`` itself, and nobody could tell.

    ctx: of the autograd function, whose input ``position`` is ``weight``. Not where there is no gradient yet, or one of
    another kind; where a hook waits for it, ranks reduce it, or ``torch.autograd.grad`` asks for it.
    """
    gradient = weight.grad
    if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
        return False
    if (gradient.dtype, gradient.shape, gradient.device) != (weight.dtype, weight.shape, weight.device):
        return False
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # ranks hook deeper than is seen here
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


# -- the input embedding of a language model ---------------------------------------------------------------------------


def can_add_rows(module: Any) -> bool:
    """Whether ``embed`` stands for the module's own forward. Not on a card: adding rows there has no fixed order."""
    if type(module) is not nn.Embedding or "forward" in vars(module) or hasattr(module.weight, "ds_id"):
        return False
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_plain and module.weight.device.type == "cpu" and module.weight.requires_grad


def embed(module: nn.Embedding, ids: Tensor) -> Tensor:
    """``module(ids)``."""
    return _Embedding.apply(module.weight, ids, module.padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_idx: Optional[int]):
        ctx.weight, ctx.ids, ctx.padding_idx = weight, ids, padding_idx
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        weight, ids, pad = ctx.weight, ctx.ids, ctx.padding_idx
        rows, words = gradient.reshape(-1, weight.size(1)), ids.reshape(-1)
        if pad is not None:
            rows = rows.masked_fill((words == pad).unsqueeze(1), 0.0)
        if may_add_to_gradient(weight, ctx, 0):
            weight.grad.index_add_(0, words, rows.to(weight.dtype))
            return None, None, None
        whole = new_zeros(weight, weight.shape, weight.dtype)
        return whole.index_add_(0, words, rows.to(weight.dtype)), None, None
