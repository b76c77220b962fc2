"""How the rows of an epoch are cut into micro-batches.

``uniform`` cuts the order that it is given. ``token_budget`` makes micro-batches of nearly equal padded tokens: rows of
like length together, so that little is padded, and as many of them as the budget holds, so that short rows do not weigh
more than long ones (which a fixed number of rows per length-grouped batch would do).
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
    """int32 or int64 (rows,), sample numbers."""
    ends: np.ndarray
    """int64 (batches,), strictly increasing; the last is the number of rows."""

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, batch: int) -> np.ndarray:
        """Sample numbers of micro-batch ``batch`` (0 or more)."""
        return self.order[self.ends[batch - 1] if batch else 0 : self.ends[batch]]

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each micro-batch, int64 (batches,)."""
        return np.diff(self.ends, prepend=0)


def uniform(ids_in_order: np.ndarray, rows_per_batch: int, fewest_rows: int = 1) -> Batches:
    """The order as given, ``rows_per_batch`` at a time; the last may be short, but the one before gives it rows where
    it would have less than ``fewest_rows``. Raises ValueError if there is no row."""
    order = _some_rows(ids_in_order)
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
    """Micro-batches of rows of like length whose padded tokens (rows × longest) are at most ``budget_tokens``.

    None: as few tokens as give no more micro-batches than ``rows_per_batch`` rows each would.

    Rows come in random order, shape (rows,); ``lengths`` are tokens by sample number. Pools of about ``pool_rows`` rows
    of that order are sorted and filled one by one, and all micro-batches are shuffled. A row longer than the budget
    stands alone. Raises ValueError if there is no row.
    """
    order = _some_rows(ids_in_order)
    pools = np.array_split(order, max(1, round(order.size / pool_rows)))
    filled = [_filled(pool, lengths, budget_tokens, rows_per_batch) for pool in pools]
    offsets = np.cumsum([0] + [batches.order.size for batches in filled[:-1]])
    ends = np.concatenate([batches.ends + offset for batches, offset in zip(filled, offsets, strict=True)])
    return _shuffled(Batches(np.concatenate([batches.order for batches in filled]), ends), rng)


def for_ranks(batches: Batches, multiple: int) -> tuple[Batches, np.ndarray]:
    """As many micro-batches as a multiple of ``multiple`` (the ranks), none empty; and the sample numbers repeated.

    The largest are cut in two until their number fits. Rows are repeated, each alone, only when every micro-batch is a
    single row and still some are missing. Raises ValueError if there is no row.
    """
    _some_rows(batches.order)
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


def _some_rows(ids: np.ndarray) -> np.ndarray:
    if not ids.size:
        raise ValueError("there is no row to make a micro-batch of; at least 1 is needed")
    return np.asarray(ids)


def _filled(pool: np.ndarray, lengths: np.ndarray, budget_tokens: Optional[int], rows_per_batch: int) -> Batches:
    """The rows of one pool, longest first, in as few micro-batches as the budget allows, filled evenly."""
    tokens = np.maximum(1, lengths[pool])
    longest_first = np.argsort(-tokens, kind="stable")
    in_order = tokens[longest_first].tolist()
    most = -(-pool.size // rows_per_batch) if budget_tokens is None else len(_ends(in_order, budget_tokens))
    ends = _even_ends(in_order, most)
    return Batches(pool[longest_first], np.array(ends, dtype=np.int64))


def _even_ends(tokens: Sequence[int], most_batches: int) -> list[int]:
    """Ends under the smallest budget that takes no more micro-batches, or the last one would be a crumb."""
    budgets = range(1, tokens[0] * len(tokens) + 1)
    smallest = bisect.bisect_left(budgets, True, key=lambda budget: len(_ends(tokens, budget)) <= most_batches)
    return _ends(tokens, budgets[smallest])


def _ends(tokens: Sequence[int], budget_tokens: int) -> list[int]:
    """Ends of micro-batches filled one after the other; ``tokens`` of the rows, longest first."""
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
    """Where to cut the largest micro-batch in two, the last one of them: ranks then share it in the same round.
    None: all are single rows."""
    sizes = np.diff(ends, prepend=0)
    largest = sizes.size - 1 - int(np.argmax(sizes[::-1]))
    return int(ends[largest] - sizes[largest] // 2) if sizes[largest] > 1 else None
