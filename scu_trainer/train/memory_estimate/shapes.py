"""The largest micro-batch that the memory loop will make, computed from settings and row lengths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy
import torch

from scu_trainer.control import splitting
from scu_trainer.data import numbered
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loss.rows.products import compiles_shapes
from scu_trainer.train.step.micro_batch_sizer import busy_tokens, has_own_memory

MOST_WINDOWS_DRAWN = 64
"""Most accumulation windows of random rows that are drawn to count the sizes of their micro-batches."""

SIZES_BESIDE_STEPS = 4
"""Scores before training, samples and loss tests have a dozen sizes, but most are forward only: they count as 4."""


@dataclass(frozen=True)
class RowShapes:
    """Lengths of the rows of a job. ``longest``, ``mean``: tokens per row, 1 for rows without a time axis.
    ``is_uneven``: whether the rows of one step usually differ in length. ``lengths``: lengths of all rows, if known.
    ``all_rows``: number of training rows, if known; a step never takes more."""

    longest: int
    mean: float
    is_uneven: bool
    lengths: Optional[numpy.ndarray] = field(default=None, compare=False, repr=False)
    all_rows: Optional[int] = field(default=None, compare=False)

    @classmethod
    def of(cls, data: Any) -> RowShapes:
        """Return the shapes of prepared training rows; the lengths of a stream are not known in advance."""
        found = lengths_of(data)
        lengths = numpy.ones(1, dtype=numpy.int32) if found is None or not len(found) else numpy.maximum(1, found)
        longest = int(lengths.max())
        short = int(numpy.count_nonzero(lengths < longest))
        all_rows = len(data) if hasattr(data, "__len__") else None
        return cls(longest, int(lengths.sum()) / len(lengths), short > len(lengths) / 8, lengths, all_rows)


@dataclass(frozen=True)
class Step:
    """One optimizer step of a device.

    ``rows`` x ``length``: its largest micro-batch. For rows without padding, ``length`` is their mean length, and
    ``longest`` the longest. ``micro_batches``: smallest number of micro-batches. ``sizes``: how many numbers of tokens
    kernels are compiled for during training; 1 if batches are not divided, whatever their number of sizes. ``asked``:
    the step of the requested batch, if this step is what it may grow to on a GPU.
    """

    rows: int
    length: int
    micro_batches: int
    sizes: int = 1
    longest: int = field(default=0, compare=False)
    asked: Optional[Step] = field(default=None, compare=False)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def with_rows(self, rows: int) -> Step:
        """Return the same step in smaller micro-batches of ``rows``, all of which may have the longest length."""
        needed = -(-self.rows * self.micro_batches // rows)
        length = max(self.length, self.longest)
        return replace(self, rows=rows, length=length, micro_batches=max(self.micro_batches, needed))


def planned_step(
    rows: RowShapes,
    memory: MemorySettings,
    curriculum: Optional[CurriculumSettings],
    *,
    batch_rows: int,
    accumulation: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    is_padded: bool = False,
    is_sharded: bool = False,
    steps: int = MOST_WINDOWS_DRAWN,
) -> Step:
    """Return the largest step as the memory loop plans it while memory is not short; otherwise micro-batches shrink.

    ``batch_rows``: rows per device and accumulation batch. ``device``: torch's device type. ``dtype``: type in which it
    multiplies. ``is_padded``: whether the layers see padding. ``is_sharded``: batches are divided, but never merged.
    ``steps``: optimizer steps of the training.
    """
    batch_tokens = _batch_tokens(rows, curriculum, batch_rows)
    whole = Step(max(1, batch_tokens // rows.longest), rows.longest, accumulation)
    cap, is_compiled = memory.resolved_token_cap, compiles_shapes(device, dtype)
    if memory.batch_mode == "logical" or cap is None or (cap == "auto" and not rows.is_uneven):
        return whole
    total_rows = max(1, round(batch_tokens * accumulation / rows.longest))

    def bounded(cap: int) -> Step:
        most = min(total_rows, memory.max_batch_size or total_rows)
        fitting, length = min(max(cap // rows.longest, memory.min_batch_size, 1), most), rows.longest
        if rows.is_uneven and not is_padded and fitting < most and fitting * length < cap:  # a shorter row still fits
            fitting, length = fitting + 1, -(-cap // (fitting + 1))
        sizes = _count_sizes(rows, total_rows, cap, memory, is_padded, steps) if is_compiled and rows.is_uneven else 1
        return Step(fitting, length, -(-total_rows // fitting), sizes, rows.longest)

    if cap != "auto":
        return bounded(cap)
    busy = busy_tokens(device, is_compiled)
    asked = bounded(splitting.auto_cap(rows.longest, busy, batch_tokens))
    if is_sharded or not memory.memory_control or not has_own_memory(device):
        return asked
    grown = bounded(splitting.auto_cap(rows.longest, busy, batch_tokens * accumulation))
    return asked if grown == asked else replace(grown, asked=asked)


def _count_sizes(
    rows: RowShapes, rows_per_window: int, cap: int, memory: MemorySettings, is_padded: bool, steps: int
) -> int:
    """Return how many different numbers of tokens the model processes during training. If lengths are not known, the
    micro-batches count as the sizes of one doubling."""
    if rows.lengths is None:
        return splitting.SIZES_PER_DOUBLING + SIZES_BESIDE_STEPS
    generator, found, all_rows = numpy.random.default_rng(0), set(), len(rows.lengths)
    cut, windows = (splitting.cut if is_padded else splitting.cut_unpadded), min(steps, MOST_WINDOWS_DRAWN)
    for count in {min(rows_per_window, all_rows), all_rows % rows_per_window} - {0}:  # an epoch's last window
        for _ in range(windows if count < all_rows else 1):
            window = generator.choice(rows.lengths, count, replace=False).tolist()
            lengths = [splitting.rounded_up_size(length) for length in window] if is_padded else window
            for plan in cut(lengths, cap, memory.max_batch_size, memory.min_batch_size):
                unpadded = sum(window[row] for row in plan.rows)
                found.add(plan.tokens if is_padded else splitting.rounded_up_size(unpadded))
    return len(found) + SIZES_BESIDE_STEPS


def _batch_tokens(rows: RowShapes, curriculum: Optional[CurriculumSettings], batch_rows: int) -> int:
    if curriculum is None or "token_budget" not in curriculum.methods:
        return batch_rows * rows.longest
    return max(rows.longest, curriculum.token_budget or round(batch_rows * rows.mean))


def lengths_of(data: Any) -> Optional[numpy.ndarray]:
    """Return the tokens of each row, int32; None if rows have no length column."""
    has_lengths = "length" in (getattr(data, "column_names", None) or ())
    return numbered.lengths_of(data) if has_lengths else None
