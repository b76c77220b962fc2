"""Whether code of somebody's own draws a random number once per batch: the share of mixup, a temperature, a coin that
adds a term. Each micro-batch would draw its own. What the modules of public packages draw (dropout, layers that are
left out) is noise of the model, and does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from scu_trainer.data.random_states import own_generators, put_back, states
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, host_states
from scu_trainer.train.loss.rows.model_loss import PUBLIC, comes_from

ONCE_PER_BATCH = "the model or its loss draws random numbers once per batch"

OTHERS = tuple(name for name in PUBLIC if name != "scu_trainer")
"""Without our own modules, which call losses of somebody's own (``wrap``)."""

TRIES = 16
"""Of other random numbers, until one gives another loss: a coin may fall on the same side several times."""


def draws_once(loss_of: Callable[[Any], torch.Tensor], together: Any, alone: list[Any], tolerance: float) -> bool:
    """Whether the loss of the rows ``together`` depends on numbers of which as many are drawn for one row ``alone``."""
    start = states()
    whole = _Drawn(loss_of, together)
    if not whole.has_drawn:
        return False
    parts = []
    for row in alone:
        put_back(start)
        parts.append(_Drawn(loss_of, row))
    of_torch_once = sum(part.count for part in parts) > whole.count
    if not (of_torch_once or any(whole.has_moved_alike(part) for part in parts)):
        return False
    for seed in range(TRIES):
        with own_generators((seed,)):
            other = _Drawn(loss_of, together).loss
        if abs(other - whole.loss) > tolerance * max(abs(other), abs(whole.loss)):
            return True
    return False


class _Drawn(WithoutNoise):
    """The ``loss`` of ``inputs`` and what was drawn for it outside of public modules: ``count`` numbers of torch's, and
    the states of Python's and numpy's generators ``before`` and ``after``. Draws of public modules give their means."""

    def __init__(self, loss_of: Callable[[Any], torch.Tensor], inputs: Any) -> None:
        super().__init__()
        self.count, self._depth, self._outside = 0, 0, []
        self.before = host_states()
        with (
            of_torch.register_module_forward_pre_hook(self._enter),
            of_torch.register_module_forward_hook(self._leave, always_call=True),
            torch.no_grad(),
            self,
        ):
            self.loss = float(loss_of(inputs))
        self.after = host_states()

    @property
    def has_drawn(self) -> bool:
        return self.count > 0 or self.before != self.after

    def has_moved_alike(self, other: _Drawn) -> bool:
        """Whether a generator of the host, as it was before both, drew the same numbers for both."""
        pairs = zip(self.before, self.after, other.after, strict=True)
        return any(before != after and after == others for before, after, others in pairs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._depth:
            return super().__torch_dispatch__(func, types, args, kwargs)
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.count += (found[0] if isinstance(found, tuple) else found).numel()
        return found

    def _enter(self, module: nn.Module, given: Any) -> None:
        if self._depth:
            self._depth += 1
        elif all(comes_from(type(one), *OTHERS) for one in module.modules()):
            self._depth, self._outside = 1, states()

    def _leave(self, module: nn.Module, given: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                put_back(self._outside)
