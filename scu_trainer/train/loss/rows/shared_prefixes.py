"""Prefixes that rows share (a template, a system prompt, a question with several answers), computed once.

A token's states depend only on the tokens up to it, so rows that begin with the same tokens have the same states
there. The layers get a shared prefix once. Attention, which looks back over whole rows, and the output head, whose
losses belong to rows, get a copy of it for each row, and the gradients of the copies add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

FEWEST_TOKENS, FEWEST_SHARE = 4, 1 / 16
"""Of a prefix, and of all tokens that it saves: below these the copies that attention needs cost more."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Of rows end to end. ``kept`` (kept,): places of the tokens that the layers get. ``source`` (tokens,): for each
    token, the place among those kept that has its states."""

    kept: Tensor
    source: Tensor

    def copied(self, states: Tensor, dim: int) -> Tensor:
        """Of kept tokens along ``dim`` to all tokens."""
        return _Copied.apply(states, self.source, dim)

    def of_rows(self, output: Any) -> Any:
        """What a model's layers return, with the states (1, tokens, size) of all rows in the first place."""
        return with_states(output, self.copied(output[0], 1))


def with_states(output: Any, states: Tensor) -> Any:
    """What a model's layers return, with ``states`` (1, tokens, size) in the first place."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output[next(iter(output))] = states
    return output


class _Copied(torch.autograd.Function):
    """``index_select``. In half precision the sum of many gradients is taken in float32, as a product's is."""

    @staticmethod
    def forward(ctx, states: Tensor, source: Tensor, dim: int) -> Tensor:
        ctx.shape, ctx.source, ctx.dim = states.shape, source, dim
        return states.index_select(dim, source)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        kind = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros(ctx.shape, dtype=kind).index_add(ctx.dim, ctx.source, gradient.to(kind))
        return sums.to(gradient.dtype), None, None


def shared_prefixes(ids: Tensor, lengths: Tensor, places: Tensor) -> Optional[SharedPrefixes]:
    """None where rows share next to nothing. ids (rows, time), lengths (rows,), places (tokens,): on the host."""
    if len({tuple(beginning) for beginning in ids[:, :FEWEST_TOKENS].tolist()}) == len(ids):
        return None
    # Sorted, the row before is the one that a row has most of its beginning in common with.
    order = torch.tensor(sorted(range(len(ids)), key=ids.tolist().__getitem__))
    rows, ends = ids[order], lengths[order]
    alike = rows[1:].eq(rows[:-1]).cumprod(dim=1).sum(dim=1)
    alike = torch.minimum(alike, torch.minimum(ends[1:], ends[:-1]))
    if int(alike.sum()) < FEWEST_SHARE * len(places):
        return None
    origin = torch.arange(ids.numel()).view_as(ids)[order]
    for row, shared in enumerate(alike.tolist(), start=1):
        origin[row, :shared] = origin[row - 1, :shared]
    of_tokens = torch.empty_like(origin).index_copy_(0, order, origin).flatten()[places]
    kept, source = torch.unique(of_tokens, return_inverse=True)
    return SharedPrefixes(torch.searchsorted(places, kept), source)
