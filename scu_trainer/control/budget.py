"""The largest share of a trained update whose cost stays within a budget. Pure arithmetic.

cost(share) is 0 at share 0 and need not grow evenly: on the way from a base to what was tuned from it the loss on other
text usually rises, but may dip first. So the whole update is tried, and else the interval is halved, always between a
share that keeps the budget and one that does not.
"""

from __future__ import annotations

from collections.abc import Callable

HALVINGS = 7
"""To within 1/128 of the update."""

SOLVED_AT = 0.93
"""Confidence of the two-sided interval whose upper end is to stay within the budget. Documents that decide scatter, and
as many that judge scatter as much again: the difference has sqrt(2) times the standard error, and nine of ten verdicts
keep the budget where the margin is 1.28 x sqrt(2) = 1.81 standard errors."""


def largest_share(cost: Callable[[float], float], budget: float) -> float:
    """The largest of the shares in [0, 1] that were tried with ``cost(share) <= budget``; 0 where none was.

    Raises ValueError for a budget below 0: share 0 costs nothing.
    """
    if not budget >= 0:
        raise ValueError(f"the budget is {budget}; it must be 0 or more")
    if cost(1.0) <= budget:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low
