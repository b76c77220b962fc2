"""Division of rows of different lengths into micro-batches of bounded size; each runs in one forward and backward.

Rows are sorted by length, so that rows of similar length share a micro-batch and little of it is padding. Micro-batches
of short rows run first, so that their memory use is known before the longest one runs. The division minimizes

    sum over micro-batches of (rows * longest row + micro-batch cost),

by dynamic programming over the sorted rows, where the micro-batch cost is the constant overhead of a micro-batch.
(A greedy division, which fills each micro-batch up to the cap, processes up to 10 % more tokens if the lengths have a
heavy tail.)

Sizes are in padded tokens, rows times length; rows without a length, such as images, count as length 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

MICRO_BATCH_COST_SHARE = 1 / 16
"""Constant cost of a micro-batch as a share of the token cap. On lognormal lengths, this value gives 5 % padding
instead of 9-19 %, with 11-30 % more micro-batches than the smallest possible number."""

SIZES_PER_DOUBLING = 16
"""Number of sizes per doubling in ``rounded_up_size``, for devices that compile kernels for each new number of tokens.
Rounding up adds 1/32 of the tokens on average and 1/16 at most, which costs less than compiling."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """``rows``: positions in the pool, by ascending length. ``length``: tokens to which all are padded."""

    rows: tuple[int, ...]
    length: int

    @property
    def tokens(self) -> int:
        """Padded tokens, rows * length."""
        return len(self.rows) * self.length

    @property
    def quadratic(self) -> int:
        """rows * length^2, to which the memory of stored attention scores is proportional."""
        return len(self.rows) * self.length**2


def cut(
    lengths: Sequence[int], token_cap: Optional[int], max_rows: Optional[int] = None, min_rows: int = 1
) -> list[MicroBatchPlan]:
    """Divide rows into micro-batches of at most ``token_cap`` padded tokens and ``max_rows`` rows, ascending by length.

    ``lengths``: tokens per row, shape (rows,). ``token_cap`` None: no bound by tokens, and the fewest micro-batches
    that ``max_rows`` allows. A row longer than the cap is a micro-batch by itself. Every micro-batch has at least
    ``min_rows`` rows, even if that exceeds the cap, or ``max_rows`` if no other division exists; a pool with fewer rows
    is one micro-batch. Raises ValueError for bounds below 1 or ``max_rows`` below ``min_rows``.
    """
    _check_bounds(token_cap, max_rows, min_rows)
    order = _order_by_length(lengths)
    ascending = [max(1, lengths[row]) for row in order]

    def most_rows(length: int) -> int:
        by_tokens = math.inf if token_cap is None else token_cap // length
        return int(max(min_rows, min(by_tokens, max_rows or math.inf, len(order))))

    limits = [most_rows(length) for length in ascending]
    ends = _cheapest_ends(ascending, limits, min_rows, _micro_batch_cost(ascending, token_cap))
    return _micro_batch_plans(order, ends, lengths)


def cut_unpadded(
    lengths: Sequence[int], token_cap: Optional[int], max_rows: Optional[int] = None, min_rows: int = 1
) -> list[MicroBatchPlan]:
    """Do the same as ``cut`` for a model without padding: few micro-batches, each filled up to ``token_cap`` tokens."""
    _check_bounds(token_cap, max_rows, min_rows)
    order = _order_by_length(lengths)
    sizes: list[int] = []
    tokens, most_tokens, most_rows = 0, token_cap or math.inf, max_rows or math.inf
    for row in order:
        tokens += max(1, lengths[row])
        is_full = not sizes or (sizes[-1] >= min_rows and (tokens > most_tokens or sizes[-1] >= most_rows))
        if is_full:
            sizes.append(0)
            tokens = max(1, lengths[row])
        sizes[-1] += 1
    return _micro_batch_plans(order, itertools.accumulate(_filled_up_to_minimum(sizes, min_rows)), lengths)


def _filled_up_to_minimum(sizes: Sequence[int], min_rows: int) -> list[int]:
    """Return ``sizes`` with the last micro-batch filled up to ``min_rows`` rows from those before it; if they have too
    few rows, the last two are joined."""
    filled = list(sizes)
    for last in range(len(filled) - 1, 0, -1):
        wanting = max(0, min_rows - filled[last])
        filled[last] += wanting
        filled[last - 1] -= wanting
    if filled and filled[0] < min_rows and len(sizes) > 1:
        return [*sizes[:-2], sizes[-2] + sizes[-1]]
    return filled


def auto_cap(longest_row: int, busy_tokens: int, largest_batch_tokens: int) -> int:
    """Return the cap in padded tokens for ``token_cap: auto``: enough to keep the device busy, at most one batch.

    ``longest_row``: in tokens; the cap is never smaller. ``busy_tokens``: with fewer tokens the device is idle at
    times. ``largest_batch_tokens``: padded tokens of one batch of the configured number of rows.
    """
    return max(longest_row, min(busy_tokens, largest_batch_tokens))


def rounded_up_size(tokens: int, most: Optional[int] = None) -> int:
    """Return ``tokens`` rounded up to one of SIZES_PER_DOUBLING sizes per doubling, all multiples of 8, but not above
    ``most`` unless ``tokens`` already exceeds it."""
    step = max(8, 2 ** (tokens.bit_length() - 1) // SIZES_PER_DOUBLING)
    size = -(-tokens // step) * step
    return size if most is None or tokens > most else min(size, most)


def _check_bounds(token_cap: Optional[int], max_rows: Optional[int], min_rows: int) -> None:
    for name, bound in (("token_cap", token_cap), ("max_rows", max_rows), ("min_rows", min_rows)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name} is {bound}; it must be 1 or more")
    if max_rows is not None and max_rows < min_rows:
        raise ValueError(f"max_rows {max_rows} is below min_rows {min_rows}")


def _order_by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (lengths[row], row))


def _micro_batch_plans(order: Sequence[int], ends: Iterable[int], lengths: Sequence[int]) -> list[MicroBatchPlan]:
    parts = (tuple(order[a:b]) for a, b in itertools.pairwise([0, *ends]))
    return [MicroBatchPlan(rows, max(1, *(lengths[row] for row in rows))) for rows in parts]


def _micro_batch_cost(ascending: Sequence[int], token_cap: Optional[int]) -> int:
    """Return the cost in padded tokens. Without a cap it exceeds all padding, for as few micro-batches as possible."""
    if token_cap is None:
        return sum(ascending[-1:]) * len(ascending) + 1
    return max(1, int(token_cap * MICRO_BATCH_COST_SHARE))


def _cheapest_ends(lengths: Sequence[int], limits: Sequence[int], min_rows: int, micro_batch_cost: int) -> list[int]:
    """Return the ends of the micro-batches of the cheapest division of the ascending ``lengths``. ``limits``: for each
    position, the most rows of a micro-batch whose longest row is there."""
    count = len(lengths)
    runs = _run_ends(lengths)
    # More than any division costs, so a last micro-batch exceeds its bound only if there is no alternative.
    forbidding = count * (sum(lengths[-1:]) + micro_batch_cost) + 1
    cheapest: list[float] = [0.0] + [math.inf] * count
    came_from = [0] * (count + 1)
    for start in range(count):
        if cheapest[start] == math.inf:
            continue
        for end in _possible_ends(start, runs, limits, min_rows):
            rows = end - start
            price = cheapest[start] + rows * lengths[end - 1] + micro_batch_cost
            if rows > limits[end - 1]:
                price += forbidding
            if price < cheapest[end]:
                cheapest[end], came_from[end] = price, start
    ends = [count] if count else []
    while ends and came_from[ends[-1]]:
        ends.append(came_from[ends[-1]])
    return ends[::-1]


def _possible_ends(start: int, runs: Sequence[int], limits: Sequence[int], min_rows: int) -> Iterator[int]:
    """Yield the ends worth trying for a micro-batch that begins at ``start``.

    A micro-batch that ends between rows of the same length could take more of them without padding, so only two ends
    are useful: the last row of a length, and the position where the micro-batch is full. With ``min_rows`` above 1, the
    smallest micro-batch is tried as well, because smallest ones, full ones and one in between make up every division
    within the bounds on rows.
    """
    count = len(runs)
    if count - start < 2 * min_rows:
        yield count
        return
    last_row = start + min_rows - 1
    while last_row < count:
        full = start + limits[last_row]
        end = min(runs[last_row], full)
        if end <= last_row:
            break
        if end == count or end <= count - min_rows:
            yield end
        if end == full:
            break
        last_row = end
    if min_rows > 1:
        yield start + min_rows


def _run_ends(lengths: Sequence[int]) -> list[int]:
    """Return, for each position of the ascending ``lengths``, the first later position with another length."""
    ends = [len(lengths)] * len(lengths)
    for i in range(len(lengths) - 2, -1, -1):
        ends[i] = ends[i + 1] if lengths[i] == lengths[i + 1] else i + 1
    return ends
