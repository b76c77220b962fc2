"""Choose how many rows of each source give the requested shares, which rows these are, and their order.

Shares are exact fractions, because a rounding error could leave out the last row of a source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy

from scu_trainer.errors import DataError

Row = TypeVar("Row")

MOST_ROWS = 2**28
"""Most rows of an epoch. The numbers of more rows would take gigabytes of memory."""


def rows_per_epoch(rows: Sequence[int], shares: Sequence[Fraction], stopping_strategy: str) -> list[int]:
    """Return how many rows of each source an epoch has, so that each share is exact to within one row. rows: of each
    source, all positive. first_exhausted: the longest epoch that repeats no row. all_exhausted: the shortest epoch that
    has every row. Raises DataError if an epoch would have more than MOST_ROWS."""
    lengths = [Fraction(count) / share for count, share in zip(rows, shares, strict=True)]
    total = math.floor(min(lengths)) if stopping_strategy == "first_exhausted" else math.ceil(max(lengths))
    if total > MOST_ROWS:
        raise DataError(
            f"an epoch with every row and these weights would have {total:,} rows, but at most {MOST_ROWS:,} are "
            "possible; give weights closer to the sizes of the sources, or stopping_strategy: first_exhausted"
        )
    return apportioned(total, shares)


def apportioned(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Split ``total`` into whole parts by largest remainder (Hamilton's method); the first of equal ones wins."""
    exact = [total * share for share in shares]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def chosen_rows(wanted: int, rows: int, generator: numpy.random.Generator) -> numpy.ndarray:
    """Return the numbers of ``wanted`` rows out of ``rows``, int64: whole passes, then the start of a permutation."""
    passes, rest = divmod(wanted, rows)
    return numpy.concatenate([numpy.tile(numpy.arange(rows), passes), generator.permutation(rows)[:rest]])


def interleaved(counts: Sequence[int]) -> numpy.ndarray:
    """Return the source of every row of an epoch. Source i occurs ``counts[i]`` times, spread evenly: its row k of n is
    at (k + 1/2) / n of the epoch, so that the start of an epoch has the same shares even without shuffling."""
    places = numpy.concatenate([(numpy.arange(count) + 0.5) / count for count in counts])
    sources = numpy.repeat(numpy.arange(len(counts)), counts)
    return sources[numpy.argsort(places, kind="stable")]


def evenly_chosen(shares: Sequence[Fraction]) -> Iterator[int]:
    """Yield the source of each row so that among the first k rows every share is exact to within one row, for every k
    and any number of sources (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980)."""
    taken, slack = [0] * len(shares), Fraction(1, max(2, 2 * len(shares) - 2))
    for row in itertools.count(1):
        deficits = [share * row - count for share, count in zip(shares, taken, strict=True)]
        ready = [index for index, deficit in enumerate(deficits) if deficit >= slack]
        # The source whose deficit would exceed the bound first; among equal ones, the first.
        chosen = min(ready, key=lambda index: (1 - slack - deficits[index]) / shares[index])
        taken[chosen] += 1
        yield chosen


def mix_by_shares(
    shares: Sequence[Fraction], start: Callable[[int], Iterator[Row]], stopping_strategy: str
) -> Iterator[tuple[int, Row]]:
    """Yield (source, row) so that every prefix has the requested shares. ``start(source)``: iterates over its rows.

    first_exhausted: stop when the next row must come from a source that has no more rows. all_exhausted: such a source
    starts over, until every source has reached its end.
    """
    running = [start(index) for index in range(len(shares))]
    ended: set[int] = set()
    for source in evenly_chosen(shares):
        row = next(running[source], None)
        if row is None:
            ended.add(source)
            if stopping_strategy == "first_exhausted" or len(ended) == len(shares):
                return
            running[source] = start(source)
            row = next(running[source], None)
            if row is None:  # the source has no rows at all
                return
        yield source, row
