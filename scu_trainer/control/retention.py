"""From measured forgetting to the effort against it, so that forgetting stays within a budget. Pure arithmetic.

The excess is the loss on anchor text minus the base's own on the same text, in bits per token. It begins at exactly 0,
and with an effort u between 0 (none) and 1 (all there is) it is taken to move by

    d excess / d step = slope,    d slope / d u = -growth,

where ``growth``, what training would add to it in a step without any effort, is identified on the way: the positive
slope that is seen, over the share of it that the effort leaves. Level and slope are those of a Kalman filter (Kalman
1960) for a level that drifts, which weighs each measurement by its standard error and knows what the last change of
effort should have done.

The law asks for the slope that would use up what is left of the budget within ``horizon`` measurements, never for the
whole error at once: the level that counts is the one where the present slope leads, so it acts before the budget is
reached. It changes the effort by the difference of slopes over ``growth``. What is kept is the effort as it was
applied, after its bounds, so nothing winds up. The effort begins high, rises fast and falls slowly: what was forgotten
comes back slower than it went.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

UNKNOWN_SLOPE = 1.0
"""Standard deviation of the slope before anything is measured, bits per token and step: far beyond what is seen."""

RESTLESSNESS = 0.2
"""How much of itself the slope may change between two measurements, as the filter takes it."""

SLOW_FALL = 0.9
"""What of the growth that was seen once is still expected one measurement later, where less is seen."""

SLOW_START = 4
"""Measurement from which on the effort may fall: the first steps of a training forget least."""

LOST_AFTER = 3
"""Measurements in a row, beyond chance above the budget at full effort, after which it is said to be lost."""

PATIENCE = 4
"""A level that comes down to the budget within so many measurements is on its way back, not lost."""

COST = 0.016
"""Share of the training time that measuring is planned to take: 2 % are promised, and a few steps on a clock are a
guess."""

MEASUREMENTS = 16
"""Of a run, where the rows of each can be chosen."""

FEWEST_ROWS, MOST_ROWS = 8, 32
"""Of a measurement."""


@dataclass(frozen=True)
class RetentionConfig:
    """``budget_bits``: per token. ``certainty``: standard errors that the level keeps away from the budget, up to half
    of it. ``horizon``: measurements. ``first_effort``: until the first measurement. ``largest_rise`` and
    ``largest_fall``: of the effort, at one measurement."""

    budget_bits: float
    first_effort: float = 0.5
    largest_rise: float = 0.3
    largest_fall: float = 0.06
    horizon: float = 3.0
    certainty: float = 0.84


@dataclass(frozen=True)
class ExcessMeasurement:
    """After ``step`` optimizer steps, on a sample: the mean excess and its standard error, bits per token.
    ``next_steps``: optimizer steps until the next measurement."""

    step: int
    excess_bits: float
    error_bits: float
    next_steps: int


@dataclass(frozen=True)
class RetentionState:
    """Everything that a decision depends on; JSON-safe, kept in checkpoints. ``variance``: of level, of both, of slope.

    ``over``: measurements in a row in which full effort did not keep the budget. ``skipped``: that were not finite.
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
        """Full effort does not keep the budget: the two texts contradict each other, or the rate is too high."""
        return self.over >= LOST_AFTER

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetentionState:
        return cls(**{**values, "variance": tuple(values["variance"])})


def initial_state(config: RetentionConfig) -> RetentionState:
    return RetentionState(effort=config.first_effort)


def decide(config: RetentionConfig, state: RetentionState, seen: ExcessMeasurement) -> RetentionState:
    """The state after a measurement. One that is not finite changes nothing and is counted."""
    if not (math.isfinite(seen.excess_bits) and math.isfinite(seen.error_bits)) or seen.error_bits < 0:
        return replace(state, skipped=state.skipped + 1)
    if seen.step <= state.step:
        raise ValueError(f"a measurement at step {seen.step} follows one at step {state.step}; steps must grow")
    state = _filtered(config, state, seen)
    state = replace(state, growth_bits=_growth(state), measurements=state.measurements + 1)
    effort = min(1.0, max(0.0, state.effort + _change(config, state, seen)))
    state = replace(state, over=state.over + 1 if _is_over(config, state, seen) else 0)
    # The change acts on the slope from here on; what the filter expects next is without what it has just prevented.
    slope = state.slope_bits - state.growth_bits * (effort - state.effort)
    return replace(state, effort=effort, slope_bits=slope)


def _filtered(config: RetentionConfig, state: RetentionState, seen: ExcessMeasurement) -> RetentionState:
    """Level and slope with the measurement in them."""
    steps = seen.step - state.step
    p_level, p_both, p_slope = state.variance
    restless = (RESTLESSNESS * max(abs(state.slope_bits), config.budget_bits / (config.horizon * steps))) ** 2
    level = state.level_bits + state.slope_bits * steps
    p_level += 2 * steps * p_both + steps**2 * (p_slope + restless / 3)
    p_both += steps * (p_slope + restless / 2)
    p_slope += restless
    total = p_level + seen.error_bits**2
    to_level, to_slope = (p_level / total, p_both / total) if total > 0 else (1.0, 0.0)
    surprise = seen.excess_bits - level
    variance = ((1 - to_level) * p_level, (1 - to_level) * p_both, p_slope - to_slope * p_both)
    return replace(
        state,
        step=seen.step,
        level_bits=level + to_level * surprise,
        slope_bits=state.slope_bits + to_slope * surprise,
        variance=variance,
    )


def _growth(state: RetentionState) -> float:
    """Without effort: what is seen over what the effort leaves of it, of late."""
    return max(max(0.0, state.slope_bits) / max(1.0 - state.effort, 0.2), SLOW_FALL * state.growth_bits)


def _change(config: RetentionConfig, state: RetentionState, seen: ExcessMeasurement) -> float:
    """Of the effort, before its bounds."""
    margin = min(config.certainty * state.error_bits, config.budget_bits / 2)
    room = config.budget_bits - margin - state.level_bits
    wanted_slope = room / (config.horizon * seen.next_steps)
    # Never so little growth that a slope of noise would move the effort from one end to the other.
    growth = max(state.growth_bits, config.budget_bits / (config.horizon * seen.next_steps))
    change = (state.slope_bits - wanted_slope) / growth
    largest_fall = config.largest_fall if state.measurements >= SLOW_START else 0.0
    return min(config.largest_rise, max(-largest_fall, change))


def _is_over(config: RetentionConfig, state: RetentionState, seen: ExcessMeasurement) -> bool:
    """Full effort, beyond chance above the budget, and not on the way back."""
    surplus = state.level_bits - config.certainty * state.error_bits - config.budget_bits
    comes_back = state.slope_bits * PATIENCE * seen.next_steps < -surplus
    return state.effort >= 1.0 and surplus > 0 and not comes_back


def mean_excess(extra_bits: Sequence[float], tokens: Sequence[float]) -> tuple[float, float]:
    """Mean excess per token over documents, and its standard error. ``extra_bits``: of each document, over the base.

    A ratio of two sums, whose variance is that of what the documents leave unexplained; widened to the standard
    deviation of Student's t, since few documents say little about their own spread. One document has no spread: its
    error is its size.
    """
    count, total = len(tokens), sum(tokens)
    mean = sum(extra_bits) / total
    if count < 2:
        return mean, abs(mean)
    rest = sum((extra - mean * weight) ** 2 for extra, weight in zip(extra_bits, tokens, strict=True))
    widened = (count - 1) / (count - 3) if count > 3 else 3.0
    return mean, math.sqrt(widened * count / (count - 1) * rest) / total


def cadence(step_s: float, row_s: float, steps: int, max_steps: int, most_rows: int, spent_s: float) -> tuple[int, int]:
    """(optimizer steps between two measurements, rows of each), so that measuring takes COST of the time of a run.

    step_s: of an optimizer step; row_s: of measuring a row. After ``steps`` of ``max_steps``, with ``spent_s`` spent
    on it. As many rows as allow MEASUREMENTS, within FEWEST_ROWS and MOST_ROWS; then as often as they allow.
    """
    left_s = COST * step_s * max_steps - spent_s
    rows = math.floor(left_s / MEASUREMENTS / row_s) if row_s > 0 else MOST_ROWS
    rows = min(max(rows, FEWEST_ROWS), MOST_ROWS, most_rows)
    steps_left = max(1, max_steps - steps)
    measurements = max(1, math.floor(left_s / (rows * row_s))) if row_s > 0 else steps_left
    return max(1, math.ceil(steps_left / measurements)), rows
