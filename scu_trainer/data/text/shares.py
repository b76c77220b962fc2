"""How many rows of each source make the asked shares, which ones, and in what order they come.

Shares are exact fractions: a rounding error could leave out the last row of a source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy

from scu_trainer.errors import DataError

Row = TypeVar("Row")

MOST_ROWS = 2**28
"""Rows of an epoch: their numbers would fill gigabytes of memory."""


def rows_per_epoch(rows: Sequence[int], shares: Sequence[Fraction], stopping_strategy: str) -> list[int]:
    """Rows of each source in an epoch with the given shares, none of which is more than one row off.

    rows: of each source, all above 0. first_exhausted: the longest epoch without a row twice. all_exhausted: the
    shortest one with every row. Raises DataError where an epoch would hold more than MOST_ROWS.
    """
    lengths = [Fraction(count) / share for count, share in zip(rows, shares, strict=True)]
    total = math.floor(min(lengths)) if stopping_strategy == "first_exhausted" else math.ceil(max(lengths))
    if total > MOST_ROWS:
        raise DataError(
            f"an epoch with every row and these weights would have {total:,} rows, at most {MOST_ROWS:,} are possible; "
            "give weights closer to the sizes of the sources, or stopping_strategy: first_exhausted"
        )
    return apportioned(total, shares)


def apportioned(total: int, shares: Sequence[Fraction]) -> list[int]:
    """``total`` in whole parts by the largest remainder (Hamilton's method); the first of equal remainders wins."""
    exact = [total * share for share in shares]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def chosen_rows(wanted: int, rows: int, generator: numpy.random.Generator) -> numpy.ndarray:
    """Numbers of ``wanted`` rows out of ``rows``, int64: whole passes, then the beginning of a permutation."""
    passes, rest = divmod(wanted, rows)
    return numpy.concatenate([numpy.tile(numpy.arange(rows), passes), generator.permutation(rows)[:rest]])


def interleaved(counts: Sequence[int]) -> numpy.ndarray:
    """The source of every row of an epoch, each as often as ``counts`` says and evenly spread over it.

    Row k of n stands at (k + 1/2) / n, so the beginning of an epoch that is not shuffled has the shares too.
    """
    places = numpy.concatenate([(numpy.arange(count) + 0.5) / count for count in counts])
    sources = numpy.repeat(numpy.arange(len(counts)), counts)
    return sources[numpy.argsort(places, kind="stable")]


class EvenChoice:
    """The source of one row after the other: among the first k rows the share of each is kept within one row, for every
    k and any number of sources (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980)."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._shares = list(shares)
        self._taken = [0] * len(self._shares)
        self._slack = Fraction(1, max(2, 2 * len(self._shares) - 2))

    def next(self) -> int:
        row = sum(self._taken) + 1
        deficits = [share * row - taken for share, taken in zip(self._shares, self._taken, strict=True)]
        ready = [index for index, deficit in enumerate(deficits) if deficit >= self._slack]
        # The one whose deficit would grow past the bound first; the first one where several would together.
        chosen = min(ready, key=lambda index: (1 - self._slack - deficits[index]) / self._shares[index])
        self._taken[chosen] += 1
        return chosen


def in_shares(
    shares: Sequence[Fraction], start: Callable[[int], Iterator[Row]], stopping_strategy: str
) -> Iterator[tuple[int, Row]]:
    """(source, row) with the asked shares in every prefix. ``start(source)``: its rows from the first one.

    first_exhausted: ends where the source whose turn it is has no more rows. all_exhausted: such a source starts over,
    until each has come to its end.
    """
    choice, running = EvenChoice(shares), [start(index) for index in range(len(shares))]
    ended: set[int] = set()
    while True:
        source = choice.next()
        row = next(running[source], None)
        if row is None:
            ended.add(source)
            if stopping_strategy == "first_exhausted" or len(ended) == len(shares):
                return
            running[source] = start(source)
            row = next(running[source], None)
            if row is None:  # a source without a single row
                return
        yield source, row
