"""Add gradients directly to ``weight.grad``.

Autograd scales a gradient in one pass and adds it in another, once per micro-batch, and the gradient of an embedding is
a whole table of mostly zeros. With a vocabulary of 128,000 and size 256 that takes 0.1 s on a CPU; adding the rows of
510 tokens takes 0.1 ms.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from scu_trainer.train.loss.rows.pages import new_zeros


def may_add_to_gradient(weight: Tensor, ctx: Any, position: int) -> bool:
    """Return whether a backward may add to ``weight.grad`` itself without a visible difference.

    ctx: of the autograd function; ``weight`` is its input at ``position``. False if there is no gradient yet, or one of
    another type, if a hook waits for the gradient, if ranks reduce it, or if ``torch.autograd.grad`` asks for it.
    """
    gradient = weight.grad
    if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
        return False
    if (gradient.dtype, gradient.shape, gradient.device) != (weight.dtype, weight.shape, weight.device):
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # DDP's hooks are not visible here
        return False
    return _is_accumulated(weight, ctx.next_functions[position][0])


def _is_accumulated(weight: Tensor, node: Any) -> bool:
    """Return whether this backward accumulates into ``weight.grad``."""
    if node is None or getattr(node, "variable", None) is not weight:  # a part of the weight, or a copy
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad captures the gradient
        return False


# -- the input embedding of a language model ---------------------------------------------------------------------------


def can_add_rows(module: Any) -> bool:
    """Return whether ``embed`` can replace the module's forward. Not on a GPU, where row sums have no fixed order."""
    if type(module) is not nn.Embedding or "forward" in vars(module) or hasattr(module.weight, "ds_id"):
        return False
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_plain and module.weight.device.type == "cpu" and module.weight.requires_grad


def embed(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Return ``module(ids)``, with a backward that adds to ``weight.grad`` directly if possible."""
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
