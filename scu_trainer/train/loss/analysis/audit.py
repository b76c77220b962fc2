"""Check during training that the loss of whole batches is the sum over their micro-batches.

In training mode without noise. All micro-batches are compared by value only; a sample of rows also by its gradient,
which shows terms that grow from zero long before the value does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch

from scu_trainer.train.loss.analysis.measuring import LossOf, gradient_error, measured_weights, with_gradient
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, has_drawn, restored_on_exit, rng_state
from scu_trainer.train.step.batches.rows import Row
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

MOST_DOUBLINGS = 15
"""A small loss is multiplied by at most 2 to this power before its gradient; float16 has no larger power of two."""

SAMPLE_SHARE = 1 / 16
"""Share of a window's tokens in all audits but the first, which uses all (benchmarks/loops/loss_analysis_cost.py)."""


@dataclass(frozen=True)
class Audited:
    """Result of an audit. ``whole``: the loss of ``rows`` rows together. ``parts``: the sum over their micro-batches.
    ``of_gradient``: relative difference of their gradients; 0 if they were not computed."""

    rows: int
    whole: float
    parts: float
    of_gradient: float = 0.0

    @property
    def of_value(self) -> float:
        """Relative difference of the losses; infinite if only a part is not finite (a mean over no targets)."""
        error = abs(self.whole - self.parts) / max(abs(self.whole), abs(self.parts), 1e-12)
        return error if math.isfinite(error) else math.inf

    @property
    def difference(self) -> float:
        return max(self.of_value, self.of_gradient)


class Auditor:
    """Run audits. ``loss_of``: as in training. ``owner``: see ``restored_on_exit``. An audit that runs out of
    memory is repeated with fewer rows."""

    def __init__(self, model: torch.nn.Module, loss_of: LossOf, owner: Any) -> None:
        self.model, self.loss_of, self.owner = model, loss_of, owner
        self._draws = False

    def audit(
        self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any, turn: int, own: bool
    ) -> Optional[Audited]:
        """Compare whole batches with their micro-batches; None if the loss is not finite, nothing is learned, or no two
        rows fit in memory.

        ``turn``: number of this audit, the seed for choosing rows. ``own``: whether user code takes part. Then the
        first audit compares all batches with all micro-batches, in case the loss needs many rows to show an effect, and
        later ones compare gradients.
        """
        if own and turn == 0:
            with CatchOutOfMemory():
                return self._compare_window(window, micro_batches, num_items)
            free_memory()
        number = turn % len(window.batches)
        groups = [[row for row in micro_batch.rows if row[0] == number] for micro_batch in micro_batches]
        groups, before = [group for group in groups if group], None
        most_tokens = max(micro_batch.tokens for micro_batch in micro_batches)
        while sum(map(len, groups)) > 1 and (sample := _sample_rows(window, groups, most_tokens, turn)) != before:
            with CatchOutOfMemory():
                return self._compare(window, _split_single_group(sample), num_items, own)
            free_memory()
            tokens = sum(window.batches[number].length(row) for group in sample for number, row in group)
            before, most_tokens = sample, tokens // 2
        return None

    def _compare_window(
        self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any
    ) -> Optional[Audited]:
        """Compare all split batches with their micro-batches; batches that run whole are the same on both sides."""
        cut = [micro_batch for micro_batch in micro_batches if micro_batch.rows and window.is_part(micro_batch)]
        numbers = sorted({number for micro_batch in cut for number, _ in micro_batch.rows})
        shares = [1.0 if micro_batch.weight is None else micro_batch.weight for micro_batch in cut]

        def losses() -> Audited:
            with torch.no_grad():
                whole = sum(float(self._loss(window.batches[number].inputs, num_items)) for number in numbers)
                parts = [float(self._loss(window.inputs(micro_batch), num_items)) for micro_batch in cut]
            rows = sum(window.batches[number].rows for number in numbers)
            return Audited(rows, whole, sum(share * part for share, part in zip(shares, parts, strict=True)))

        return self._without_noise(losses)

    def _compare(
        self, window: AccumulationWindow, groups: list[list[Row]], num_items: Any, own: bool
    ) -> Optional[Audited]:
        """Compare sampled rows of a batch as a whole with their groups; None if nothing in them is learned."""
        rows = [row for group in groups for row in group]
        items = window.items_of(rows)
        if window.reduction.is_mean and not sum(items):
            return None
        batch = window.batches[rows[0][0]]
        inputs = batch.inputs if len(rows) == batch.rows else window.inputs_of(rows)
        shares = [sum(window.items_of(group)) / sum(items) if window.reduction.is_mean else 1.0 for group in groups]

        def losses(gradient: bool) -> Audited:
            # Without weights to compare (if they are sharded), nothing is kept for a backward that never comes.
            with measured_weights(self.model) as weights, torch.set_grad_enabled(gradient and bool(weights)):

                def measured(given: Any) -> torch.Tensor:
                    return with_scaled_gradient(self._loss(given, num_items), weights)

                pairs = zip(shares, groups, strict=True)
                parts = [share * measured(window.inputs_of(group)) for share, group in pairs if share]
                whole = measured(inputs)
            value = sum(float(part[0]) for part in parts)
            return Audited(len(rows), float(whole[0]), value, gradient_error(whole, parts))

        try:
            return self._without_noise(partial(losses, own))
        except RuntimeError as error:  # reentrant checkpointing has no gradient with respect to some of the weights
            if not own or is_out_of_memory(error):
                raise
            forget_traceback(error)
        return self._without_noise(partial(losses, False))

    def _without_noise(self, losses: Callable[[], Audited]) -> Optional[Audited]:
        """Compute ``losses`` of a whole and its parts; again without noise if the first time draws random numbers."""
        with restored_on_exit(self.model, self.owner, training=True):
            if not self._draws:
                before = rng_state(self.model)
                found = losses()
                self._draws = has_drawn(self.model, before)
            if self._draws:
                with WithoutNoise():
                    found = losses()
        return found if math.isfinite(found.whole) else None

    def _loss(self, inputs: Any, num_items: Any) -> torch.Tensor:
        return self.loss_of(type(inputs)(inputs), num_items)


def with_scaled_gradient(loss: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Like ``with_gradient``, but scale a small loss by a power of two, because float16 has few digits there."""
    value = abs(float(loss.detach())) if loss.requires_grad and weights else 1.0
    if not 0 < value < 0.5:
        return with_gradient(loss, weights)
    scale = 2.0 ** min(-math.frexp(value)[1], MOST_DOUBLINGS)
    return with_gradient(loss * scale, weights) / scale


def _split_single_group(groups: list[list[Row]]) -> list[list[Row]]:
    """Split a sample that would fit in memory as a whole, because later it may be split."""
    if len(groups) > 1:
        return groups
    (only,) = groups
    return [only[:1], only[1:]]


def _sample_rows(window: AccumulationWindow, groups: list[list[Row]], most_tokens: int, seed: int) -> list[list[Row]]:
    """Choose rows of the groups, up to ``most_tokens`` and a share of the window, and return them in one or two groups.

    The second group joins all groups but the first. At least two rows are chosen, with as different counts as possible,
    because rows that count alike do not show which mean the loss is.
    """
    rows = [row for group in groups for row in group]
    lengths = {row: window.batches[row[0]].length(row[1]) for row in rows}
    first, second, *others = sorted(rows, key=lambda row: (lengths[row], *window.items_of([row])))
    last = next((row for row in reversed(others) if 2 * lengths[row] <= most_tokens), second)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {first, last}
    left = min(most_tokens, int(SAMPLE_SHARE * window.real_tokens)) - sum(lengths[row] for row in chosen)
    for row in (rows[i] for i in order):
        if row not in chosen and lengths[row] <= left:
            chosen.add(row)
            left -= lengths[row]
    kept = [[row for row in group if row in chosen] for group in groups]
    beginning, *rest = [group for group in kept if group]
    return [beginning, [row for group in rest for row in group]] if rest else [beginning]
