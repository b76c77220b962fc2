"""``batch_mode: logical``: the number of rows per optimizer step adapts to memory.

The loader still delivers batches of ``per_device_train_batch_size``; a window takes as many rows of them as memory
allows and keeps the rest for the next one. An epoch keeps its planned number of optimizer steps, so with smaller
batches part of the data is not reached in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from scu_trainer.train.step.batches.rows import Batch, take
from scu_trainer.train.step.recovery.second_try import second_try

EXPONENTS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


class LogicalBatches:
    """Windows with a variable number of rows.

    nominal_rows: rows of an accumulation batch while memory allows; never more.
    rows: rows of an accumulation batch now.
    rule: how the learning rate follows. Square root: Malladi et al., 2022 (arXiv 2205.10287), for adaptive optimizers;
    linear: Goyal et al., 2017 (arXiv 1706.02677), for SGD.
    """

    def __init__(self, nominal_rows: int, rule: str, read: Callable[[Any], Batch]) -> None:
        self.nominal_rows = self.rows = nominal_rows
        self.factor = 1.0
        self._exponent = EXPONENTS[rule]
        self._read = read
        self._kept: list[Any] = []

    def window(self, loader: Iterator[Any], count: int) -> list[Any]:
        """Return ``count`` batches of ``rows`` rows; the last ones are smaller or missing when the loader ends."""
        batches = [batch for batch in (self._next(loader) for _ in range(count)) if batch is not None]
        row_count = sum(second_try(functools.partial(self._read, batch), "reading a batch").rows for batch in batches)
        if batches:
            self.factor = (row_count / (count * self.nominal_rows)) ** self._exponent
        return batches

    def _next(self, loader: Iterator[Any]) -> Any:
        inputs = self._kept.pop(0) if self._kept else next(loader, None)
        if inputs is None:
            return None
        first, *rest = second_try(functools.partial(self._parts, inputs), "cutting a batch to the size that fits")
        self._kept = [*rest, *self._kept]
        return first

    def _parts(self, inputs: Any) -> list[Any]:
        batch = self._read(inputs)
        if batch.obstacle is not None or batch.rows <= self.rows:
            return [inputs]
        cut = range(0, batch.rows, self.rows)
        parts = [[(0, row) for row in range(start, min(batch.rows, start + self.rows))] for start in cut]
        return [take([batch], part, trim=False) for part in parts]

    @property
    def kept_rows(self) -> int:
        """Rows that the loader has delivered and that were not trained on yet."""
        return sum(self._read(inputs).rows for inputs in self._kept)
