"""Compute prefixes that rows share (a template, a system prompt, a question with several answers) only once.

A token's states depend only on the tokens up to it, so rows that begin with the same tokens have the same states there.
The layers see a shared prefix once. Attention, which looks back over whole rows, and the output head, where each loss
belongs to a row, get a copy of it for each row; the gradients of the copies add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

FEWEST_TOKENS, FEWEST_SHARE = 4, 1 / 16
"""Minimum size of a prefix, and minimum share of all tokens saved; below these, copying for attention costs more."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Prefixes that rows end to end share.

    ``kept`` (kept,): indices of the tokens that the layers see. ``source`` (tokens,): for each token, the index among
    the kept ones of its states.
    """

    kept: Tensor
    source: Tensor

    def copied(self, states: Tensor, dim: int) -> Tensor:
        """Expand the states of kept tokens to all tokens along ``dim``."""
        return _Copied.apply(states, self.source, dim)

    def of_rows(self, output: Any) -> Any:
        """Return the layers' output with the states (1, tokens, size) of all rows in first position."""
        return with_states(output, self.copied(output[0], 1))


def with_states(output: Any, states: Tensor) -> Any:
    """Return the layers' output with ``states`` (1, tokens, size) in first position."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output[next(iter(output))] = states
    return output


class _Copied(torch.autograd.Function):
    """``index_select`` with a backward that sums half-precision gradients in float32, as matrix products do."""

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
    """Return the shared prefixes; None if rows share next to nothing. ids (rows, time), lengths (rows,), places
    (tokens,): on the host."""
    if len({tuple(beginning) for beginning in ids[:, :FEWEST_TOKENS].tolist()}) == len(ids):
        return None
    # After sorting, no earlier row shares a longer prefix with a row than the one directly before it.
    order = torch.tensor(sorted(range(len(ids)), key=ids.tolist().__getitem__))
    rows, ends = ids[order], lengths[order]
    shared_tokens = rows[1:].eq(rows[:-1]).cumprod(dim=1).sum(dim=1)
    shared_tokens = torch.minimum(shared_tokens, torch.minimum(ends[1:], ends[:-1]))
    if int(shared_tokens.sum()) < FEWEST_SHARE * len(places):
        return None
    origin = torch.arange(ids.numel()).view_as(ids)[order]
    for row, shared in enumerate(shared_tokens.tolist(), start=1):
        origin[row, :shared] = origin[row - 1, :shared]
    of_tokens = torch.empty_like(origin).index_copy_(0, order, origin).flatten()[places]
    kept, source = torch.unique(of_tokens, return_inverse=True)
    return SharedPrefixes(torch.searchsorted(places, kept), source)
