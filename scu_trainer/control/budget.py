"""A search for the largest share of a trained update whose cost stays within a budget.

cost(share) is 0 at share 0 and need not be monotonic: from a base model to its tuned version, the loss on other text
usually rises, but it may fall first. The search therefore tries the whole update first. Only if that exceeds the
budget, it bisects between a share that keeps the budget and one that does not.
"""

from __future__ import annotations

from collections.abc import Callable

HALVINGS = 7
"""Number of bisections; 7 find the share to within 1/128 of the update."""

SOLVED_AT = 0.93
"""Confidence of the two-sided interval whose upper end must stay within the budget.

The share is chosen on some documents and the verdict is given on as many others, so their difference has sqrt(2) times
the standard error of each. With a margin of 1.28 x sqrt(2) = 1.81 standard errors, nine of ten verdicts keep it.
"""


def largest_share(cost: Callable[[float], float], budget: float) -> float:
    """Return the largest tried share in [0, 1] with ``cost(share) <= budget``; 0 if no tried share keeps the budget.
    Raises ValueError for a budget below 0, which even share 0 exceeds."""
    if not budget >= 0:
        raise ValueError(f"the budget is {budget}; it must be 0 or more")
    if cost(1.0) <= budget:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low
