"""Which learning rates a search tries in short trainings, and what it advises. Pure arithmetic.

Rates are the one that was asked for times powers of two, so a rate is its exponent. A held-out loss over the exponent
is taken to have one valley. The first rung walks it in strides of four, from the rate that was asked for, until the
best rate has both neighbours, then looks halfway to either side. The best rate falls as trainings get longer, so the
second rung takes longer ones, at the best of the first and its neighbours, and walks on where the best is at an end:
successive halving (Jamieson and Talwalkar, 2016, https://arxiv.org/abs/1502.07943) over a valley.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

FACTOR = 2.0
"""Between neighbouring rates."""

MOST_TRIALS = 9
"""Of a rung."""


@dataclass(frozen=True)
class Rung:
    """``share``: the whole training is so many times as long as one of these. ``strides``: exponents between rates that
    are tried, one after the other."""

    share: int
    strides: tuple[int, ...]


RUNGS = (Rung(4, (2, 1)), Rung(2, (1,)))


def rate_of(asked: float, exponent: int) -> float:
    return asked * FACTOR**exponent


def next_exponent(rung: Rung, losses: Mapping[int, float], start: int = 0) -> Optional[int]:
    """The rate to try next; None where the rung is over. ``losses``: held out, by exponent; infinite where a training
    ended without a finite one."""
    if not losses:
        return start
    if len(losses) >= MOST_TRIALS:
        return None
    best = best_exponent(losses)
    for stride in rung.strides:
        for neighbour in (best + stride, best - stride):
            if neighbour not in losses:
                return neighbour
    return None


def best_exponent(losses: Mapping[int, float]) -> int:
    """The lower one of equals."""
    return min(losses, key=lambda exponent: (losses[exponent], exponent))


@dataclass(frozen=True)
class RateAdvice:
    """Exponents. ``chosen``: the best of the short trainings. ``lowest`` and ``highest``: of the rates around it that
    are not told apart from it. ``is_open``: the search ended before the best had a worse neighbour on both sides."""

    chosen: int
    lowest: int
    highest: int
    is_open: bool


def advice(losses: Mapping[int, float], least_differences: Mapping[int, float]) -> Optional[RateAdvice]:
    """None where no training ended with a finite loss. ``least_differences``: by exponent, the lower bound of the
    loss minus that of the best, paired over the held-out documents; not above 0 where the two are not told apart."""
    best = best_exponent(losses)
    if not math.isfinite(losses[best]):
        return None
    tried = sorted(losses)
    place = tried.index(best)
    lowest = highest = best
    for exponent in reversed(tried[:place]):
        if least_differences[exponent] > 0:
            break
        lowest = exponent
    for exponent in tried[place + 1 :]:
        if least_differences[exponent] > 0:
            break
        highest = exponent
    return RateAdvice(best, lowest, highest, is_open=place in (0, len(tried) - 1))
