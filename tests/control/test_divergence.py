"""The divergence watch by numbers: what is reported, and what is not."""

from __future__ import annotations

import json
import math
import random

import pytest

from scu_trainer.control.guard.divergence import SUSTAINED_STEPS, DivergenceState, diverges, observe

FACTOR = 2.0


def told_at(losses, every: int = 1) -> int | None:
    """Step at which a run of these step losses, logged as means of ``every``, is said to diverge."""
    state = DivergenceState()
    for end in range(every, len(losses) + 1, every):
        mean = sum(losses[end - every : end]) / every
        state = observe(FACTOR, state, step=end, steps=every, loss=mean)
        if diverges(state):
            return end
    return None


def falling(steps: int, start: float = 3.0, end: float = 1.0, speed: float = 0.02) -> list[float]:
    return [end + (start - end) * math.exp(-speed * step) for step in range(steps)]


def noisy(losses, spread: float, seed: int) -> list[float]:
    """Log-normal: the mean is the loss, the standard deviation ``spread`` times as large."""
    sigma = math.sqrt(math.log(1 + spread**2))
    draw = random.Random(seed)
    return [loss * draw.lognormvariate(-(sigma**2) / 2, sigma) for loss in losses]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_mean_is_an_exponential_one_that_starts_from_its_first_value():
    state = observe(FACTOR, DivergenceState(), step=1, steps=1, loss=4.0)
    assert (state.mean, state.first, state.variance) == (4.0, 4.0, 0.0)
    state = observe(FACTOR, state, step=2, steps=1, loss=2.0)
    share = 0.05 / (1 - 0.95**2)
    assert state.mean == pytest.approx(4.0 - 2.0 * share)
    assert state.variance == pytest.approx(4.0 * share)


def test_a_mean_over_many_steps_counts_as_that_many():
    one_by_one, together = DivergenceState(), observe(FACTOR, DivergenceState(), step=10, steps=10, loss=2.0)
    for step in range(1, 11):
        one_by_one = observe(FACTOR, one_by_one, step=step, steps=1, loss=2.0)
    after = [observe(FACTOR, state, step=20, steps=10, loss=5.0).mean for state in (one_by_one, together)]
    assert after[0] == pytest.approx(after[1])


def test_the_ceiling_is_the_factor_times_the_best_mean_once_the_spread_is_known():
    state = DivergenceState()
    for step in range(1, 200):
        state = observe(1.5, state, step=step, steps=1, loss=2.0)
    assert (state.best, state.ceiling) == (pytest.approx(2.0), pytest.approx(3.0))


def test_before_the_spread_is_known_it_is_taken_as_large_as_the_mean():
    state = observe(FACTOR, DivergenceState(), step=4, steps=4, loss=2.0)
    assert state.ceiling == pytest.approx(2.0 + 10 * 2.0 / 2)


def test_what_is_not_finite_is_not_taken_in():
    state = observe(FACTOR, DivergenceState(), step=1, steps=1, loss=4.0)
    assert observe(FACTOR, state, step=2, steps=1, loss=math.nan) == state
    assert observe(FACTOR, state, step=2, steps=1, loss=math.inf) == state
    assert observe(FACTOR, state, step=2, steps=0, loss=1.0) == state


@pytest.mark.parametrize("observations", [0, 1, 30])
def test_a_state_survives_json(observations):
    state = DivergenceState()
    for step in range(observations):
        state = observe(FACTOR, state, step=step + 1, steps=1, loss=2.0)
    assert DivergenceState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False))) == state


# -- real divergences --------------------------------------------------------------------------------------------------

BREAK = 100
DIVERGENT = {
    "jump": falling(BREAK) + [9.0] * 80,
    "growth": falling(BREAK) + [1.3 * 1.05**step for step in range(80)],
    "noisy growth": noisy(falling(BREAK) + [1.3 * 1.05**step for step in range(80)], 0.4, seed=1),
    "negative": [-2.0 - 0.01 * step for step in range(BREAK)] + [4.0] * 80,
    "from nearly nothing": falling(300, end=0.001, speed=0.05) + [2.0] * 80,
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", DIVERGENT)
def test_a_divergence_is_told(name, every):
    assert told_at(DIVERGENT[name], every) is not None


def test_one_from_the_first_steps_is_told_where_they_are_logged():
    assert told_at([3.0, 9.0, 40.0, *[90.0] * 60]) is not None


def test_it_is_told_once_the_excess_has_lasted_and_not_before():
    told = told_at(DIVERGENT["jump"])
    assert BREAK + SUSTAINED_STEPS < told <= BREAK + SUSTAINED_STEPS + 10


# -- false alarms ------------------------------------------------------------------------------------------------------

HEALTHY = {
    "falling": falling(2000),
    "flat": [2.0] * 2000,
    "one spike": [*falling(300), *[50.0] * 3, *falling(300, start=1.3)],
    "a warm-up that overshoots": [*[3.0] * 20, *[4.5] * 60, *falling(400, start=4.5)],
    "harder samples": falling(400) + [1.8] * 400,
    "down to nothing, and trifles there": falling(400, end=0.001, speed=0.05) + [0.05] * 300,
    "negative": [-0.01 * step for step in range(600)],
    "around zero": [random.Random(step).gauss(0, 1) for step in range(900)],
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name, every):
    assert told_at(HEALTHY[name], every) is None


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 2.0])
def test_noise_is_no_divergence(spread):
    alarms = [seed for seed in range(8) if told_at(noisy(falling(1500), spread, seed)) is not None]
    assert not alarms
