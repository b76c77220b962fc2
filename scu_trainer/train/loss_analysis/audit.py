"""A batch of the running training as a whole against the sum over its micro-batches: what says that an answer holds.

Forward only, in training mode without noise, on the micro-batches that memory made of the batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.train.loss_analysis.asking import LossOf
from scu_trainer.train.loss_analysis.no_trace import WithoutNoise, rng_state, untouched
from scu_trainer.train.memory import forget_traceback, is_out_of_memory
from scu_trainer.train.rows import Row
from scu_trainer.train.window import Piece, Window

SAMPLE_SHARE = 1 / 8
"""Of a window's tokens, what an audit takes where the first one, on a whole batch, has passed: eight audits in the
first 200 steps then cost less than a hundredth of these."""


@dataclass(frozen=True)
class Audited:
    """``whole``: the loss of ``rows`` rows together. ``parts``: what their micro-batches add up to."""

    rows: int
    whole: float
    parts: float

    @property
    def difference(self) -> float:
        """Relative to the larger one."""
        return abs(self.whole - self.parts) / max(abs(self.whole), abs(self.parts), 1e-12)


class Auditor:
    """``loss_of``: as in training. ``free_memory``: called after an out-of-memory, which makes the audit smaller.
    ``owner``: see ``untouched``."""

    def __init__(self, model: torch.nn.Module, loss_of: LossOf, free_memory: Callable[[], None], owner: Any) -> None:
        self.model, self.loss_of, self.free_memory, self.owner = model, loss_of, free_memory, owner
        self._draws = False

    def audit(
        self, window: Window, pieces: Sequence[Piece], num_items: Any, turn: int, full: bool
    ) -> Optional[Audited]:
        """``turn``: the number of this audit, by which batch and rows are drawn. ``full``: a whole batch as the loader
        gave it. None where its rows tell nothing: the loss is no number, nothing is learned, or no two rows fit."""
        number = turn % len(window.batches)
        groups = [[row for row in piece.rows if row[0] == number] for piece in pieces]
        groups = [group for group in groups if group]
        if not full:
            groups = _sampled(window, groups, _budget(window, pieces), turn)
        while True:
            rows = sum(map(len, groups))
            if rows < 2:
                return None
            try:
                return self._compared(window, _at_least_two(groups), num_items)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                forget_traceback(error)
            self.free_memory()
            groups = _sampled(window, groups, sum(_tokens(window, groups)) // 2, turn) if rows > 2 else []

    def _compared(self, window: Window, groups: list[list[Row]], num_items: Any) -> Optional[Audited]:
        rows = [row for group in groups for row in group]
        items = window.items_of(rows)
        if window.reduction.is_mean and not sum(items):
            return None
        batch = window.batches[rows[0][0]]
        inputs = batch.inputs if len(rows) == batch.rows else window.inputs_of(rows)
        with untouched(self.model, self.owner, training=True), torch.no_grad():
            whole = self._loss(inputs, num_items)
            parts = 0.0
            for group in groups:
                share = sum(window.items_of(group)) / sum(items) if window.reduction.is_mean else 1.0
                parts += share * self._loss(window.inputs_of(group), num_items) if share else 0.0
        return Audited(len(rows), whole, parts) if math.isfinite(whole) else None

    def _loss(self, inputs: Any, num_items: Any) -> float:
        before = None if self._draws else rng_state(self.model)
        with WithoutNoise() if self._draws else contextlib.nullcontext():
            loss = float(self.loss_of(type(inputs)(inputs), num_items))
        if before is None or all(map(torch.equal, before, rng_state(self.model))):
            return loss
        self._draws = True
        return self._loss(inputs, num_items)


def _at_least_two(groups: list[list[Row]]) -> list[list[Row]]:
    """A sample that memory would take in one go is cut, as memory may cut it later."""
    if len(groups) > 1:
        return groups
    (only,) = groups
    return [only[:1], only[1:]]


def _budget(window: Window, pieces: Sequence[Piece]) -> int:
    """Tokens of a sample: no more than memory takes at once."""
    return min(max(piece.tokens for piece in pieces), int(SAMPLE_SHARE * window.real_tokens))


def _tokens(window: Window, groups: Sequence[Sequence[Row]]) -> list[int]:
    return [window.batches[number].length(row) for group in groups for number, row in group]


def _sampled(window: Window, groups: list[list[Row]], tokens: int, seed: int) -> list[list[Row]]:
    """Rows drawn out of the groups up to ``tokens``, two at least."""
    rows = [row for group in groups for row in group]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, taken = set(), 0
    for row in (rows[i] for i in order):
        taken += window.batches[row[0]].length(row[1])
        if len(chosen) >= 2 and taken > tokens:
            break
        chosen.add(row)
    kept = [[row for row in group if row in chosen] for group in groups]
    return [group for group in kept if group]
