"""Division of the rows of an epoch into micro-batches.

``uniform`` divides the given order. ``token_budget`` makes micro-batches of nearly equal padded tokens: rows of similar
length share a micro-batch, so that little is padded, and each has as many rows as the budget allows. With a fixed
number of rows per length-grouped batch instead, the tokens of short rows would weigh more than those of long rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np


@dataclass(frozen=True, eq=False)
class Batches:
    """Micro-batch b holds the rows ``order[ends[b - 1]:ends[b]]``, the first one ``order[:ends[0]]``."""

    order: np.ndarray
    """Sample numbers, int32 or int64 (rows,)."""
    ends: np.ndarray
    """End of each micro-batch in ``order``, int64 (batches,), strictly increasing; the last is the number of rows."""

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, batch: int) -> np.ndarray:
        """Return the sample numbers of micro-batch ``batch`` (0 or more)."""
        return self.order[self.ends[batch - 1] if batch else 0 : self.ends[batch]]

    @property
    def sizes(self) -> np.ndarray:
        """Number of rows of each micro-batch, int64 (batches,)."""
        return np.diff(self.ends, prepend=0)


def uniform(ids_in_order: np.ndarray, rows_per_batch: int, fewest_rows: int = 1) -> Batches:
    """Return micro-batches of ``rows_per_batch`` rows in the given order; the last one may have fewer rows, but gets
    some from the one before to have ``fewest_rows``. Raises ValueError if there are no rows."""
    order = _require_rows(ids_in_order)
    ends = np.arange(rows_per_batch, order.size + rows_per_batch, rows_per_batch, dtype=np.int64)
    ends = np.minimum(ends, order.size)
    if ends.size > 1 and rows_per_batch > fewest_rows:
        ends[-2] = min(ends[-2], order.size - fewest_rows)
    return Batches(order, ends)


def token_budget(
    ids_in_order: np.ndarray,
    lengths: np.ndarray,
    budget_tokens: Optional[int],
    rows_per_batch: int,
    pool_rows: int,
    rng: np.random.Generator,
) -> Batches:
    """Return micro-batches of rows of similar length, of at most ``budget_tokens`` padded tokens (rows × longest).

    With ``budget_tokens`` None, the budget is the smallest that gives no more micro-batches than ``rows_per_batch``
    rows each would.

    ``ids_in_order``: sample numbers in random order, shape (rows,). ``lengths``: tokens by sample number. Pools of
    about ``pool_rows`` rows of that order are sorted and divided one after another; then all micro-batches are
    shuffled. A row longer than the budget is a micro-batch by itself. Raises ValueError if there are no rows.
    """
    order = _require_rows(ids_in_order)
    pools = np.array_split(order, max(1, round(order.size / pool_rows)))
    filled = [_filled_pool(pool, lengths, budget_tokens, rows_per_batch) for pool in pools]
    offsets = np.cumsum([0] + [batches.order.size for batches in filled[:-1]])
    ends = np.concatenate([batches.ends + offset for batches, offset in zip(filled, offsets, strict=True)])
    return _shuffled(Batches(np.concatenate([batches.order for batches in filled]), ends), rng)


def for_ranks(batches: Batches, multiple: int) -> tuple[Batches, np.ndarray]:
    """Return (micro-batches, repeated sample numbers), with the number of micro-batches a multiple of ``multiple``.

    ``multiple`` is the number of ranks. The largest micro-batches are divided in two until their number fits. Only if
    every micro-batch has become a single row and some are still missing, rows are repeated, each as a micro-batch by
    itself. Raises ValueError if there are no rows.
    """
    _require_rows(batches.order)
    ends = batches.ends
    missing = -len(batches) % multiple
    while missing and (cut := _largest_cut(ends)) is not None:
        ends = np.sort(np.append(ends, cut))
        missing -= 1
    if not missing:
        return Batches(batches.order, ends), batches.order[:0]
    repeated = np.resize(batches.order, missing)
    ends = np.append(ends, batches.order.size + 1 + np.arange(missing, dtype=np.int64))
    return Batches(np.append(batches.order, repeated), ends), repeated


def _require_rows(ids: np.ndarray) -> np.ndarray:
    if not ids.size:
        raise ValueError("there are no rows to make a micro-batch from; at least 1 is needed")
    return np.asarray(ids)


def _filled_pool(pool: np.ndarray, lengths: np.ndarray, budget_tokens: Optional[int], rows_per_batch: int) -> Batches:
    """Return the rows of one pool, longest first, in as few micro-batches as the budget allows, evenly filled."""
    tokens = np.maximum(1, lengths[pool])
    longest_first = np.argsort(-tokens, kind="stable")
    sorted_tokens = tokens[longest_first].tolist()
    most = -(-pool.size // rows_per_batch) if budget_tokens is None else len(_ends(sorted_tokens, budget_tokens))
    ends = _even_ends(sorted_tokens, most)
    return Batches(pool[longest_first], np.array(ends, dtype=np.int64))


def _even_ends(tokens: Sequence[int], most_batches: int) -> list[int]:
    """Return the ends for the smallest budget with at most ``most_batches`` batches: else the last could be tiny."""
    budgets = range(1, tokens[0] * len(tokens) + 1)
    smallest = bisect.bisect_left(budgets, True, key=lambda budget: len(_ends(tokens, budget)) <= most_batches)
    return _ends(tokens, budgets[smallest])


def _ends(tokens: Sequence[int], budget_tokens: int) -> list[int]:
    """Return the ends of micro-batches that are filled one after another. ``tokens``: of the rows, longest first."""
    ends, start, rows = [], 0, len(tokens)
    while start < rows:
        start += budget_tokens // tokens[start] or 1
        ends.append(start)
    ends[-1] = rows
    return ends


def _shuffled(batches: Batches, rng: np.random.Generator) -> Batches:
    sizes = batches.sizes
    new_order = rng.permutation(len(batches))
    ends = np.cumsum(sizes[new_order])
    starts = (batches.ends - sizes)[new_order]
    shift = np.repeat(starts - (ends - sizes[new_order]), sizes[new_order])
    return Batches(batches.order[np.arange(batches.order.size) + shift], ends)


def _largest_cut(ends: np.ndarray) -> int | None:
    """Return where to divide the largest micro-batch in two; None if all have a single row. Of several largest ones it
    is the last, so that the ranks process its two halves in the same round."""
    sizes = np.diff(ends, prepend=0)
    largest = sizes.size - 1 - int(np.argmax(sizes[::-1]))
    return int(ends[largest] - sizes[largest] // 2) if sizes[largest] > 1 else None
