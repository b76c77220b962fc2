"""Batches of the running training as a whole against the sum over its micro-batches: what says that a reduction holds.

Forward only, in training mode without noise, on the micro-batches that memory made of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.train.loss.analysis.measuring import LossOf
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, has_drawn, rng_state, untouched
from scu_trainer.train.step.batches.rows import Row
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch
from scu_trainer.train.step.recovery.memory import forget_traceback, is_out_of_memory

SAMPLE_SHARE = 1 / 16
"""Of a window's tokens, what an audit takes where the first one, on all of them, has passed
(benchmarks/loops/loss_analysis_cost.py)."""


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
        self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any, turn: int, full: bool
    ) -> Optional[Audited]:
        """``turn``: the number of this audit, by which a batch and rows of it are drawn. ``full``: all batches as the
        loader gave them against all micro-batches, for a loss that acts on many rows only. None where the rows tell
        nothing: the loss is not finite, nothing is learned, or no two rows fit."""
        if full:
            found, fits = self._fitting(lambda: self._of_window(window, micro_batches, num_items))
            if fits:
                return found
        number = turn % len(window.batches)
        groups = [[row for row in micro_batch.rows if row[0] == number] for micro_batch in micro_batches]
        groups = _sampled(window, [group for group in groups if group], _budget(window, micro_batches), turn)
        while (rows := sum(map(len, groups))) > 1:
            parts = _at_least_two(groups)
            found, fits = self._fitting(lambda: self._compared(window, parts, num_items))  # noqa: B023
            if fits:
                return found
            groups = _sampled(window, groups, sum(_tokens(window, groups)) // 2, turn) if rows > 2 else []
        return None

    def _fitting(self, compare: Callable[[], Optional[Audited]]) -> tuple[Optional[Audited], bool]:
        """(what ``compare`` finds, whether it fits in memory)."""
        try:
            return compare(), True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forget_traceback(error)
        self.free_memory()
        return None, False

    def _of_window(
        self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any
    ) -> Optional[Audited]:
        """Batches that run whole are the same on both sides."""
        cut = [micro_batch for micro_batch in micro_batches if micro_batch.rows and is_part(window, micro_batch)]
        numbers = sorted({number for micro_batch in cut for number, _ in micro_batch.rows})
        shares = [1.0 if micro_batch.weight is None else micro_batch.weight for micro_batch in cut]

        def losses() -> tuple[float, float]:
            whole = sum(self._loss(window.batches[number].inputs, num_items) for number in numbers)
            parts = [self._loss(window.inputs(micro_batch), num_items) for micro_batch in cut]
            return whole, sum(share * part for share, part in zip(shares, parts, strict=True))

        return self._without_noise(sum(window.batches[number].rows for number in numbers), losses)

    def _compared(self, window: AccumulationWindow, groups: list[list[Row]], num_items: Any) -> Optional[Audited]:
        rows = [row for group in groups for row in group]
        items = window.items_of(rows)
        if window.reduction.is_mean and not sum(items):
            return None
        batch = window.batches[rows[0][0]]
        inputs = batch.inputs if len(rows) == batch.rows else window.inputs_of(rows)
        shares = [sum(window.items_of(group)) / sum(items) if window.reduction.is_mean else 1.0 for group in groups]

        def losses() -> tuple[float, float]:
            parts = [
                share * self._loss(window.inputs_of(group), num_items)
                for share, group in zip(shares, groups, strict=True)
                if share
            ]
            return self._loss(inputs, num_items), sum(parts)

        return self._without_noise(len(rows), losses)

    def _without_noise(self, rows: int, losses: Callable[[], tuple[float, float]]) -> Optional[Audited]:
        """``losses``: of the whole and of its parts; a second time where the first shows that numbers are drawn."""
        with untouched(self.model, self.owner, training=True), torch.no_grad():
            if not self._draws:
                before = rng_state(self.model)
                whole, parts = losses()
                self._draws = has_drawn(self.model, before)
            if self._draws:
                with WithoutNoise():
                    whole, parts = losses()
        return Audited(rows, whole, parts) if math.isfinite(whole) else None

    def _loss(self, inputs: Any, num_items: Any) -> float:
        return float(self.loss_of(type(inputs)(inputs), num_items))


def _at_least_two(groups: list[list[Row]]) -> list[list[Row]]:
    """A sample that memory would take in one go is cut, as memory may cut it later."""
    if len(groups) > 1:
        return groups
    (only,) = groups
    return [only[:1], only[1:]]


def _budget(window: AccumulationWindow, micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens of a sample: no more than memory takes at once."""
    return min(max(micro_batch.tokens for micro_batch in micro_batches), int(SAMPLE_SHARE * window.real_tokens))


def _tokens(window: AccumulationWindow, groups: Sequence[Sequence[Row]]) -> list[int]:
    return [window.batches[number].length(row) for group in groups for number, row in group]


def _sampled(window: AccumulationWindow, groups: list[list[Row]], tokens: int, seed: int) -> list[list[Row]]:
    """Rows drawn out of the groups up to ``tokens``, the two shortest at least: those of the first group, and all
    others."""
    rows = [row for group in groups for row in group]
    lengths = {row: window.batches[row[0]].length(row[1]) for row in rows}
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(sorted(rows, key=lengths.get)[:2])
    left = tokens - sum(lengths[row] for row in chosen)
    for row in (rows[i] for i in order):
        if row not in chosen and lengths[row] <= left:
            chosen.add(row)
            left -= lengths[row]
    kept = [[row for row in group if row in chosen] for group in groups]
    first, *others = [group for group in kept if group]
    return [first, [row for group in others for row in group]] if others else [first]


def is_part(window: AccumulationWindow, micro_batch: MicroBatch) -> bool:
    """Whether a micro-batch is less than a batch, or holds rows of several."""
    return len(micro_batch.rows) != window.batches[micro_batch.batch].rows or any(
        number != micro_batch.batch for number, _ in micro_batch.rows
    )
