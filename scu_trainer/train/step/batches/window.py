"""The rows of one optimizer step as micro-batches: whole accumulation batches, or rows of several of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from scu_trainer.control import splitting
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import Batch, Row, follows_time, has_time, signature, take
from scu_trainer.train.step.recovery.second_try import second_try


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward sees.

    rows: (batch, row) pairs; () for a batch that cannot be cut by rows.
    length: tokens per row after trimming, 1 for rows without a time axis.
    weight: the share of its loss in the mean of its batch; None if the loss needs no weight.
    has_run: it already succeeded in this window, so a replay does not cut it.
    unpadded_tokens: its tokens, if the model sees no padding.
    """

    batch: int
    rows: tuple[Row, ...]
    length: int
    weight: Optional[float] = None
    has_run: bool = False
    unpadded_tokens: Optional[int] = None

    @property
    def tokens(self) -> int:
        """The tokens that the model sees."""
        return max(1, len(self.rows)) * self.length if self.unpadded_tokens is None else self.unpadded_tokens

    @property
    def quadratic(self) -> int:
        return self.tokens * self.length


class AccumulationWindow:
    """All rows of one optimizer step on this rank.

    batches: the accumulation batches.
    reduction: None while it is unknown; then nothing may be cut.
    fewest_rows: 2 if BatchNorm would refuse a single row, which has no statistics.
    is_padding_free: the model sees the rows of a micro-batch end to end.
    """

    def __init__(self, batches: Sequence[Batch], reduction: Optional[Reduction], pad_token_id: int = 0) -> None:
        self.batches = list(batches)
        self.reduction = reduction
        self.pad_token_id = pad_token_id
        if reduction is not None and not reduction.trims:
            for batch in self.batches:
                batch.keep_padding()
        self.fewest_rows = 1
        self.is_padding_free = False
        self._items: dict[int, list[float]] = {}

    # -- figures -------------------------------------------------------------------------------------------------------

    def take_few_sizes(self, most_tokens: int, token_cap: Optional[int] = None) -> None:
        """Pad rows to few sizes as ``Batch.take_few_sizes`` does; sizes reach at least to the widest batch."""
        most_tokens = max(most_tokens, *(max(batch.width, batch.decoder_width) for batch in self.batches))
        for batch in self.batches:
            if batch.trimmable:
                batch.take_few_sizes(most_tokens, token_cap)
        vars(self).pop("longest_row", None)  # it may have changed

    @property
    def real_tokens(self) -> int:
        return sum(batch.real_tokens for batch in self.batches)

    @property
    def padded_tokens(self) -> int:
        """The tokens that the stock loop would process."""
        return sum(batch.padded_tokens for batch in self.batches)

    @functools.cached_property
    def longest_row(self) -> int:
        return max((batch.longest for batch in self.batches), default=1)

    @functools.cached_property
    def largest_batch_tokens(self) -> int:
        return max((batch.padded_tokens for batch in self.batches), default=1)

    @property
    def has_length(self) -> bool:
        """Whether rows have tokens; rows without tokens, such as images, count as one each."""
        return any(batch.width or batch.decoder_width for batch in self.batches)

    @property
    def is_uneven(self) -> bool:
        """Whether sorting rows by length would save padding."""
        widths = {(batch.width, batch.decoder_width) for batch in self.batches}
        return len(widths) > 1 or any(batch.is_padded for batch in self.batches)

    @property
    def most_rows(self) -> Optional[int]:
        """A bound on pooling: rows that carry more than tokens (an image each) must not exceed those of a batch."""
        carries = any(
            has_time(name, value) and not follows_time(name, value, batch)
            for batch in self.batches
            if batch.obstacle is None
            for name, value in batch.inputs.items()
        )
        return max(batch.rows for batch in self.batches) if carries else None

    @property
    def can_pool(self) -> bool:
        return self.reduction is not None and self.reduction.is_exact

    @property
    def uncuttable(self) -> Optional[str]:
        """Why no batch may be cut, however short memory is; None if batches may be cut."""
        if self.reduction is None:
            return "no step has shown how the loss adds up over its rows"
        return None if self.reduction.may_be_cut else self.reduction.mixes

    # -- cutting -------------------------------------------------------------------------------------------------------

    def whole_batches(self) -> list[MicroBatch]:
        """Return one micro-batch for each accumulation batch, as the stock loop runs them."""
        return [self._whole(number) for number in range(len(self.batches))]

    def _whole(self, number: int) -> MicroBatch:
        batch = self.batches[number]
        rows = tuple((number, row) for row in range(batch.rows))
        return self._micro_batch(rows) if rows else MicroBatch(number, rows, max(1, batch.width))

    def _length(self, rows: Sequence[Row]) -> int:
        """Return the tokens per row of a micro-batch of ``rows``: each time axis is padded to its own longest row."""
        own = max(self.batches[number].needed[row] for number, row in rows)
        targets = [self.batches[number].needed_decoder for number, _ in rows]
        other = max((target[row] for target, (_, row) in zip(targets, rows, strict=True) if target), default=0)
        return max(1, own + other)

    def pooled(self, token_cap: Optional[int], max_rows: Optional[int], min_rows: int) -> list[MicroBatch]:
        """Return micro-batches of rows from all batches that may share one, sorted by length and cut."""
        pools: dict[Any, list[Row]] = {}
        micro_batches = []
        for number, batch in enumerate(self.batches):
            if batch.obstacle is not None:
                micro_batches.append(self._whole(number))
                continue
            # A mean gives every batch the same weight, so rows of batches with different counts weigh differently.
            key = signature(batch), sum(self._items_of(number))
            pools.setdefault(key, []).extend((number, row) for row in range(batch.rows))
        for rows in pools.values():
            micro_batches += self._cut(rows, token_cap, max_rows, min_rows)
        return micro_batches

    def in_parts(self, count: int) -> list[MicroBatch]:
        """Return every batch in ``count`` parts of nearly equal rows, in order, for ranks that must run in lockstep."""
        micro_batches = []
        for number, batch in enumerate(self.batches):
            if batch.obstacle is not None or self.reduction is None or count < 2:
                micro_batches.append(self._whole(number))
                continue
            bounds = [batch.rows * i // count for i in range(count + 1)]
            for a, b in itertools.pairwise(bounds):
                rows = tuple((number, row) for row in range(a, b))
                micro_batches.append(self._micro_batch(rows))
        return micro_batches

    def split(
        self, micro_batch: MicroBatch, token_cap: int, max_rows: Optional[int], min_rows: int
    ) -> list[MicroBatch]:
        """Return ``micro_batch`` cut under a smaller cap; [micro_batch] if it cannot be cut any further."""
        min_rows = max(min_rows, self.fewest_rows)
        is_movable = self.batches[micro_batch.batch].obstacle is None and self.uncuttable is None
        if len(micro_batch.rows) < 2 * min_rows or not is_movable:
            return [micro_batch]
        return self._cut(list(micro_batch.rows), token_cap, max_rows, min_rows)

    def _cut(
        self, rows: list[Row], token_cap: Optional[int], max_rows: Optional[int], min_rows: int
    ) -> list[MicroBatch]:
        lengths = [self.batches[number].length(row) for number, row in rows]
        cut = splitting.cut_unpadded if self.is_padding_free else splitting.cut
        parts = [tuple(rows[i] for i in plan.rows) for plan in cut(lengths, token_cap, max_rows, min_rows)]
        if not self.is_padding_free:
            parts = [part for plan in parts for part in self._halved_to_cap(plan, token_cap, min_rows)]
        # Leave out micro-batches of weight 0: nothing is learned from them, and a mean over nothing is not finite.
        return [micro_batch for micro_batch in map(self._micro_batch, parts) if micro_batch.weight != 0]

    def _halved_to_cap(self, rows: tuple[Row, ...], token_cap: Optional[int], min_rows: int) -> list[tuple[Row, ...]]:
        """Return ``rows`` in parts within the cap: each time axis is padded to its own longest row, which can exceed
        the cap even if every row fits."""
        if token_cap is None or len(rows) < 2 * min_rows or len(rows) * self._length(rows) <= token_cap:
            return [rows]
        middle = len(rows) // 2
        return [
            part for half in (rows[:middle], rows[middle:]) for part in self._halved_to_cap(half, token_cap, min_rows)
        ]

    def _micro_batch(self, rows: tuple[Row, ...]) -> MicroBatch:
        tokens = sum(self.batches[number].length(row) for number, row in rows) if self.is_padding_free else None
        micro_batch = MicroBatch(rows[0][0], rows, self._length(rows), unpadded_tokens=tokens)
        if not self.is_part(micro_batch) or not self.reduction.is_mean:
            return micro_batch  # the mean over a whole batch needs no weight
        items, total = sum(self.items_of(rows)), sum(self._items_of(micro_batch.batch))
        # A batch without learned entries has no mean, so leave its loss as it is.
        return replace(micro_batch, weight=items / total if total else 1.0)

    def is_part(self, micro_batch: MicroBatch) -> bool:
        """Return whether the micro-batch is anything but exactly the rows of one batch."""
        own, rows = micro_batch.batch, micro_batch.rows
        return len(rows) != self.batches[own].rows or any(number != own for number, _ in rows)

    def items_of(self, rows: Sequence[Row]) -> list[float]:
        """Return how much each of ``rows`` counts in the mean over its batch."""
        return [self._items_of(number)[row] for number, row in rows]

    def _items_of(self, number: int) -> list[float]:
        """Return how much each row counts in the mean of the batch; equal values if the loss is not a mean."""
        if number not in self._items:
            batch = self.batches[number]
            count = functools.partial(self.reduction.row_items, batch.inputs, batch.rows)
            self._items[number] = second_try(count, "counting the labels of a batch")
        return self._items[number]

    # -- batches for the model -----------------------------------------------------------------------------------------

    def inputs(self, micro_batch: MicroBatch) -> Any:
        batch = self.batches[micro_batch.batch]
        if batch.obstacle is not None or self.reduction is None:
            return batch.inputs
        return self.inputs_of(micro_batch.rows)

    def inputs_of(self, rows: Sequence[Row]) -> Any:
        """Return a batch of ``rows``, trimmed to the longest of them."""
        return take(self.batches, rows, self.pad_token_id)

    def name_of(self, row: Row) -> str:
        """Return the name of a row for messages: its sample_index if the data have one."""
        number, index = row
        samples = self.batches[number].inputs.get("sample_index")
        place = f"row {index} of accumulation batch {number}"
        if samples is None:
            return place
        sample = samples[index]
        return f"sample {sample.item() if torch.is_tensor(sample) else sample} ({place})"
