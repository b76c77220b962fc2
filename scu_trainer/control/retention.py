"""The controller that keeps forgetting within a budget: it sets the effort against it from measurements.

The excess is the loss on anchor text minus the base model's loss on the same text, in bits per token. It starts at
exactly 0. With an effort u between 0 (none) and 1 (maximum), it is modeled as

    d excess / d step = slope,    d slope / d u = -growth,

where ``growth`` is the excess that one training step would add without any effort. It is estimated during training as
the observed positive slope divided by the share that the effort leaves. Level and slope come from a Kalman filter
(Kalman 1960) for a drifting level, which weighs each measurement by its standard error and knows the expected effect
of the last change of effort.

The controller aims at the slope that would use up the rest of the budget within ``horizon`` measurements instead of
correcting the whole error at once. It thereby looks ahead and acts before the budget is reached. It changes the effort
by the difference of the slopes divided by ``growth``. The state keeps the effort that was applied, after its bounds, so
nothing winds up. The effort starts high, rises fast and falls slowly, because a model regains what it forgot more
slowly than it forgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

UNKNOWN_SLOPE = 1.0
"""Standard deviation of the slope before the first measurement, bits per token and step: far above realistic ones."""

RESTLESSNESS = 0.2
"""Relative change of the slope between two measurements that the filter assumes (its process noise)."""

SLOW_FALL = 0.9
"""An estimate of growth falls to no less than this share of itself from one measurement to the next."""

SLOW_START = 4
"""The effort may fall only from this measurement on, because a run forgets least in its first steps."""

LOST_AFTER = 3
"""The budget counts as lost after this many measurements in a row that exceed it beyond chance at full effort."""

PATIENCE = 4
"""A level whose slope leads back to the budget within this many measurements does not count as exceeding it."""

COST = 0.016
"""Planned share of the training time for measuring: below the documented 2 %, because few steps are timed."""

MEASUREMENTS = 16
"""Number of measurements of a run, if the rows of each measurement can be chosen."""

FEWEST_ROWS, MOST_ROWS = 8, 32
"""Bounds on the number of rows of a measurement."""


@dataclass(frozen=True)
class RetentionConfig:
    """Parameters of the controller.

    ``budget_bits``: largest allowed excess, in bits per token. ``certainty``: distance that the level keeps from the
    budget, in standard errors, but at most half of the budget. ``horizon``: in measurements. ``first_effort``: effort
    until the first measurement. ``largest_rise``, ``largest_fall``: bounds on its change at one measurement.
    """

    budget_bits: float
    first_effort: float = 0.5
    largest_rise: float = 0.3
    largest_fall: float = 0.06
    horizon: float = 3.0
    certainty: float = 0.84


@dataclass(frozen=True)
class ExcessMeasurement:
    """A measurement on a sample after ``step`` optimizer steps: the mean excess and its standard error, in bits per
    token. ``next_steps``: optimizer steps until the next measurement."""

    step: int
    excess_bits: float
    error_bits: float
    next_steps: int


@dataclass(frozen=True)
class RetentionState:
    """State of the controller; JSON-safe, saved in checkpoints.

    ``variance``: variance of the level, covariance of level and slope, variance of the slope. ``over``: measurements in
    a row in which full effort did not keep the budget. ``skipped``: number of measurements that were not finite.
    """

    effort: float
    level_bits: float = 0.0
    slope_bits: float = 0.0
    variance: tuple[float, float, float] = (0.0, 0.0, UNKNOWN_SLOPE**2)
    growth_bits: float = 0.0
    step: int = 0
    measurements: int = 0
    over: int = 0
    skipped: int = 0

    @property
    def error_bits(self) -> float:
        """Standard error of the level."""
        return math.sqrt(max(0.0, self.variance[0]))

    @property
    def is_lost(self) -> bool:
        """Whether full effort fails: the training text contradicts the anchor text, or the learning rate is high."""
        return self.over >= LOST_AFTER

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetentionState:
        return cls(**{**values, "variance": tuple(values["variance"])})


def initial_state(config: RetentionConfig) -> RetentionState:
    return RetentionState(effort=config.first_effort)


def decide(config: RetentionConfig, state: RetentionState, measurement: ExcessMeasurement) -> RetentionState:
    """Return the state after a measurement. A measurement that is not finite is counted and otherwise ignored."""
    if (
        not (math.isfinite(measurement.excess_bits) and math.isfinite(measurement.error_bits))
        or measurement.error_bits < 0
    ):
        return replace(state, skipped=state.skipped + 1)
    if measurement.step <= state.step:
        raise ValueError(f"a measurement at step {measurement.step} follows one at step {state.step}; steps must grow")
    state = _kalman_update(config, state, measurement)
    state = replace(state, growth_bits=_estimated_growth(state), measurements=state.measurements + 1)
    effort = min(1.0, max(0.0, state.effort + _effort_change(config, state, measurement)))
    state = replace(state, over=state.over + 1 if _exceeds_budget(config, state, measurement) else 0)
    # The change of effort lowers the slope from here on, so the filter must expect the lower slope.
    slope = state.slope_bits - state.growth_bits * (effort - state.effort)
    return replace(state, effort=effort, slope_bits=slope)


def _kalman_update(config: RetentionConfig, state: RetentionState, measurement: ExcessMeasurement) -> RetentionState:
    """Return the state with level and slope updated by the measurement."""
    steps = measurement.step - state.step
    p_level, p_both, p_slope = state.variance
    restless = (RESTLESSNESS * max(abs(state.slope_bits), config.budget_bits / (config.horizon * steps))) ** 2
    level = state.level_bits + state.slope_bits * steps
    p_level += 2 * steps * p_both + steps**2 * (p_slope + restless / 3)
    p_both += steps * (p_slope + restless / 2)
    p_slope += restless
    total = p_level + measurement.error_bits**2
    to_level, to_slope = (p_level / total, p_both / total) if total > 0 else (1.0, 0.0)
    surprise = measurement.excess_bits - level
    variance = ((1 - to_level) * p_level, (1 - to_level) * p_both, p_slope - to_slope * p_both)
    return replace(
        state,
        step=measurement.step,
        level_bits=level + to_level * surprise,
        slope_bits=state.slope_bits + to_slope * surprise,
        variance=variance,
    )


def _estimated_growth(state: RetentionState) -> float:
    """Return the growth without effort: slope over the share left by the effort, at least SLOW_FALL of the last one."""
    return max(max(0.0, state.slope_bits) / max(1.0 - state.effort, 0.2), SLOW_FALL * state.growth_bits)


def _effort_change(config: RetentionConfig, state: RetentionState, measurement: ExcessMeasurement) -> float:
    """Return the change of the effort, before the effort is limited to [0, 1]."""
    margin = min(config.certainty * state.error_bits, config.budget_bits / 2)
    room = config.budget_bits - margin - state.level_bits
    wanted_slope = room / (config.horizon * measurement.next_steps)
    # A lower bound on growth, so that a slope of pure noise cannot move the effort from 0 to 1.
    growth = max(state.growth_bits, config.budget_bits / (config.horizon * measurement.next_steps))
    change = (state.slope_bits - wanted_slope) / growth
    largest_fall = config.largest_fall if state.measurements >= SLOW_START else 0.0
    return min(config.largest_rise, max(-largest_fall, change))


def _exceeds_budget(config: RetentionConfig, state: RetentionState, measurement: ExcessMeasurement) -> bool:
    """Whether the level is above the budget beyond chance at full effort, and not about to return to it."""
    surplus = state.level_bits - config.certainty * state.error_bits - config.budget_bits
    comes_back = state.slope_bits * PATIENCE * measurement.next_steps < -surplus
    return state.effort >= 1.0 and surplus > 0 and not comes_back


def mean_excess(extra_bits: Sequence[float], tokens: Sequence[float]) -> tuple[float, float]:
    """Return the mean excess per token over documents, and its standard error.

    ``extra_bits``: bits of each document above those of the base model. The mean is a ratio of two sums, and its
    variance that of the residuals of the documents. The error is widened to the standard deviation of Student's t,
    because few documents tell little about their own spread. With a single document the error is the absolute mean.
    """
    count, total = len(tokens), sum(tokens)
    mean = sum(extra_bits) / total
    if count < 2:
        return mean, abs(mean)
    rest = sum((extra - mean * weight) ** 2 for extra, weight in zip(extra_bits, tokens, strict=True))
    widened = (count - 1) / (count - 3) if count > 3 else 3.0
    return mean, math.sqrt(widened * count / (count - 1) * rest) / total


def measurement_schedule(
    step_s: float, row_s: float, steps: int, max_steps: int, most_rows: int, spent_s: float
) -> tuple[int, int]:
    """Return (optimizer steps between two measurements, rows per measurement) for a measuring cost of COST of a run.

    ``step_s``, ``row_s``: seconds of an optimizer step and of measuring one row. ``steps`` of ``max_steps`` are done,
    and ``spent_s`` seconds went into measuring. The rows are as many as leave time for MEASUREMENTS measurements,
    between FEWEST_ROWS and MOST_ROWS, at most ``most_rows``; the frequency follows from the remaining time.
    """
    left_s = COST * step_s * max_steps - spent_s
    rows = math.floor(left_s / MEASUREMENTS / row_s) if row_s > 0 else MOST_ROWS
    rows = min(max(rows, FEWEST_ROWS), MOST_ROWS, most_rows)
    steps_left = max(1, max_steps - steps)
    measurements = max(1, math.floor(left_s / (rows * row_s))) if row_s > 0 else steps_left
    return max(1, math.ceil(steps_left / measurements)), rows


# -- how much of an update keeps the budget ----------------------------------------------------------------------------

HALVINGS = 7
"""Number of bisections; 7 find the share to within 1/128 of the update."""

SOLVED_AT = 0.93
"""Confidence of the two-sided interval whose upper end must stay within the budget.

The share is chosen on some documents and the verdict is given on as many others, so their difference has sqrt(2) times
the standard error of each. With a margin of 1.28 x sqrt(2) = 1.81 standard errors, nine of ten verdicts keep it.
"""


def largest_share(cost: Callable[[float], float], budget: float) -> float:
    """Return the largest tried share in [0, 1] of a trained update with ``cost(share) <= budget``; 0 if no tried share
    keeps the budget. Raises ValueError for a budget below 0, which even share 0 exceeds.

    ``cost`` is 0 at share 0 and need not be monotonic: from a base model to its tuned version, the loss on other text
    usually rises, but it may fall first. So the whole update is tried first, and only if it exceeds the budget, the
    interval between a share that keeps the budget and one that does not is bisected.
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
