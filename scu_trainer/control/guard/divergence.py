"""Detection of a lasting divergence of the training loss, by comparing its running mean with the best mean so far.

    ceiling of a mean = mean + max((factor - 1) x level, NOISE x standard error of the mean)
    level             = |mean|, but at least FLOOR times the first mean
    the run diverges  : its mean and each single loss have been above the lowest ceiling so far for SUSTAINED_STEPS

A positive loss therefore diverges at ``factor`` times its best mean. The standard error keeps noisy losses (small
batches, rare hard rows) from crossing the ceiling by chance, because the best of many noisy means is too low. The floor
keeps a loss that is almost zero from diverging by tiny differences. Before FEW observations, the spread is not known
and is assumed to be at least as large as the mean. A spike, a warm-up and a restart of the learning rate do not count
as divergence, because the excess must last. A run that diverged before its first logged loss cannot be distinguished
from one with a high initial loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

SPAN_STEPS = 20
"""Time constant of the running mean, in steps."""

SUSTAINED_STEPS = 20
"""Number of steps that an excess must last."""

NOISE = 10.0
"""Distance of the ceiling in standard errors of the running mean. The best of thousands of means is about 4 standard
errors below the true mean, so a margin of 6 remains."""

FLOOR = 0.1
"""Lower bound on the level, as a share of the first mean."""

FEW = 5
"""Number of observations from which their own variance is used."""


@dataclass(frozen=True)
class DivergenceState:
    """State of the detector; JSON-safe. Losses are in nats or in whatever unit the run logs.

    ``mean``, ``variance``: running mean and variance of the loss of one step. ``first``: the first mean. ``best``,
    ``best_step``, ``ceiling``: the mean with the lowest ceiling, its step, and that ceiling. ``above_since``: first
    step of the present excess.
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
    """Return the state after a logged loss; one that is not finite is ignored. ``factor``: above 1; this many times the
    best running mean counts as divergence. ``loss``: mean over the ``steps`` steps that end with ``step``."""
    if not (math.isfinite(loss) and steps > 0):
        return state
    state = _averaged(state, step, steps, loss)
    assert state.mean is not None
    above = min(state.mean, loss) > state.ceiling  # the mean alone stays high for a while after a spike
    state = replace(state, above_since=(state.above_since or max(1, step - steps + 1)) if above else None)
    ceiling = _ceiling(factor, state)
    if ceiling < state.ceiling:
        state = replace(state, best=state.mean, best_step=step, ceiling=ceiling)
    return state


def _averaged(state: DivergenceState, step: int, steps: int, loss: float) -> DivergenceState:
    total = state.steps + steps
    kept = 1.0 - 1.0 / SPAN_STEPS
    # Exponential mean with bias correction, so that it starts at the first loss (Kingma and Ba, 2015, section 3).
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
    assert state.mean is not None and state.first is not None  # set by the first loss
    level = max(abs(state.mean), FLOOR * abs(state.first))
    variance = max(state.variance, state.mean**2) if state.observations < FEW else state.variance
    error = math.sqrt(variance / min(state.steps, 2 * SPAN_STEPS - 1))
    return state.mean + max((factor - 1.0) * level, NOISE * error)


def diverges(state: DivergenceState) -> bool:
    return state.above_since is not None and state.step - state.above_since >= SUSTAINED_STEPS
