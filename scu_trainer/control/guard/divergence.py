"""Has a training loss left its own course for good? A running mean of the loss against the best that it has been.

    ceiling of a mean = mean + max((factor - 1) x level, NOISE x standard error of the mean)
    level             = |mean|, but at least FLOOR of where the run began
    the run diverges  : its mean, and each loss by itself, have been above the lowest ceiling so far for SUSTAINED_STEPS

So a loss above zero diverges at ``factor`` times its best mean. The standard error keeps noisy losses (small batches,
rare hard rows) from crossing by luck: the best of many noisy means flatters. The floor keeps a loss that has come down
to nearly nothing from diverging among trifles. No value counts before its spread is known: up to FEW observations
it is taken to be as large as the mean. A spike, a warm-up and a restart of the learning rate pass, because the excess
must last. A run that has left its course before its first logged loss cannot be distinguished from one that begins so
high.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

SPAN_STEPS = 20
"""Steps over which the running mean forgets."""

SUSTAINED_STEPS = 20
"""Steps that an excess must last."""

NOISE = 10.0
"""Standard errors of the running mean: the best of thousands lies about 4 below the truth, and 6 are left."""

FLOOR = 0.1
"""Share of the first mean below which differences are trifles."""

FEW = 5
"""Observations from which on their own spread is believed."""


@dataclass(frozen=True)
class DivergenceState:
    """JSON-safe. Losses in nats or whatever unit the run logs.

    ``mean``, ``variance``: of the loss of one step, running. ``first``: the first mean. ``best``, ``best_step``,
    ``ceiling``: the mean with the lowest ceiling. ``above_since``: first step of the present excess.
    """

    observations: int = 0
    steps: int = 0
    mean: Optional[float] = None
    variance: float = 0.0
    first: Optional[float] = None
    best: Optional[float] = None
    best_step: int = 0
    ceiling: float = math.inf
    step: int = 0
    above_since: Optional[int] = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ceiling": None if math.isinf(self.ceiling) else self.ceiling}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> DivergenceState:
        return cls(**{**saved, "ceiling": math.inf if saved["ceiling"] is None else saved["ceiling"]})


def observe(factor: float, state: DivergenceState, *, step: int, steps: int, loss: float) -> DivergenceState:
    """``factor``: times the best running mean at which a run is said to diverge, above 1. ``loss``: finite, the mean
    over the ``steps`` steps that end with number ``step``."""
    if not (math.isfinite(loss) and steps > 0):
        return state
    state = _averaged(state, step, steps, loss)
    assert state.mean is not None
    above = min(state.mean, loss) > state.ceiling  # the mean still remembers a spike that is over
    state = replace(state, above_since=(state.above_since or max(1, step - steps + 1)) if above else None)
    ceiling = _ceiling(factor, state)
    if ceiling < state.ceiling:
        state = replace(state, best=state.mean, best_step=step, ceiling=ceiling)
    return state


def _averaged(state: DivergenceState, step: int, steps: int, loss: float) -> DivergenceState:
    total = state.steps + steps
    kept = 1.0 - 1.0 / SPAN_STEPS
    # An exponential mean that starts from its first value instead of zero (Kingma and Ba, 2015, section 3).
    share = (1.0 - kept**steps) / (1.0 - kept**total)
    before = loss if state.mean is None else state.mean
    mean = before + share * (loss - before)
    squared = (loss - before) ** 2 * steps
    return replace(
        state,
        observations=state.observations + 1,
        steps=total,
        step=step,
        mean=mean,
        variance=state.variance + share * (squared - state.variance),
        first=mean if state.first is None else state.first,
    )


def _ceiling(factor: float, state: DivergenceState) -> float:
    assert state.mean is not None and state.first is not None  # there from the first loss on
    level = max(abs(state.mean), FLOOR * abs(state.first))
    variance = max(state.variance, state.mean**2) if state.observations < FEW else state.variance
    error = math.sqrt(variance / min(state.steps, 2 * SPAN_STEPS - 1))
    return state.mean + max((factor - 1.0) * level, NOISE * error)


def diverges(state: DivergenceState) -> bool:
    return state.above_since is not None and state.step - state.above_since >= SUSTAINED_STEPS
