"""Find out whether user code draws a random number once per batch: a mixup ratio, a temperature, a coin flip.

Each micro-batch would draw its own. What modules of public packages draw (dropout, skipped layers) is noise of the
model and does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from scu_trainer.data.random_states import restore_rng_states, rng_states, seeded_generators
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, host_states
from scu_trainer.train.loss.rows.model_loss import PUBLIC, comes_from

ONCE_PER_BATCH = "the model or its loss draws random numbers once per batch"

OTHER_PACKAGES = tuple(name for name in PUBLIC if name != "scu_trainer")
"""Public packages without our own modules, which call the user's losses (``wrap``)."""

SEEDS_TRIED = 16
"""Number of other seeds tried until one gives another loss; a coin may land on the same side several times."""


def draws_once(loss_of: Callable[[Any], torch.Tensor], together: Any, alone: list[Any], tolerance: float) -> bool:
    """Return whether the loss of the rows ``together`` depends on random numbers that are drawn once per batch. Once
    per batch means that a single row (``alone``) draws as many."""
    start = rng_states()
    whole = _LossWithDraws(loss_of, together)
    if not whole.has_drawn:
        return False
    parts = []
    for row in alone:
        restore_rng_states(start)
        parts.append(_LossWithDraws(loss_of, row))
    of_torch_once = sum(part.count for part in parts) > whole.count
    if not (of_torch_once or any(whole.has_moved_alike(part) for part in parts)):
        return False
    for seed in range(SEEDS_TRIED):
        with seeded_generators((seed,)):
            other = _LossWithDraws(loss_of, together).loss
        if abs(other - whole.loss) > tolerance * max(abs(other), abs(whole.loss)):
            return True
    return False


class _LossWithDraws(WithoutNoise):
    """Compute the ``loss`` of ``inputs`` and record what is drawn for it outside of public modules.

    ``count``: how many of torch's random numbers. ``before`` and ``after``: states of Python's and numpy's generators.
    Draws of public modules are replaced by their means.
    """

    def __init__(self, loss_of: Callable[[Any], torch.Tensor], inputs: Any) -> None:
        super().__init__()
        self.count, self._depth, self._outside = 0, 0, []
        self.before = host_states()
        with (
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
            torch.no_grad(),
            self,
        ):
            self.loss = float(loss_of(inputs))
        self.after = host_states()

    @property
    def has_drawn(self) -> bool:
        return self.count > 0 or self.before != self.after

    def has_moved_alike(self, other: _LossWithDraws) -> bool:
        """Return whether a generator of the host drew the same numbers for both, having begun with the same state."""
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
        elif all(comes_from(type(child), *OTHER_PACKAGES) for child in module.modules()):
            self._depth, self._outside = 1, rng_states()

    def _leave(self, module: nn.Module, given: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                restore_rng_states(self._outside)
