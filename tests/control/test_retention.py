"""The law of retention: on plants that forget and recover, with noise, and by hand."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import pytest

from scu_trainer.control.retention import (
    ExcessMeasurement,
    RetentionConfig,
    RetentionState,
    decide,
    initial_state,
    mean_excess,
    measurement_schedule,
)

BUDGETS = (0.01, 0.02, 0.05, 0.1)
FIRST = (1, 2, 5)
"""Steps of the first measurements, before they come every ``every`` steps."""


@dataclass
class Forgetting:
    """A model that forgets by ``growth`` bits per step of what is new, and by replay comes back at the rate ``pull``.
    The learning rate falls to 0; a step has at most ``most`` of anchor rows."""

    growth: float
    pull: float
    steps: int = 400
    most: float = 0.5
    excess: float = 0.0

    def step(self, number: int, effort: float) -> None:
        share, rate = self.most * effort, 1 - (number - 1) / self.steps
        self.excess += rate * (self.growth * (1 - share) - self.pull * share * self.excess)


def steered(plant: Forgetting, budget: float, noise: float = 0.0, every: int = 10, seed: int = 0, **config):
    """The excess after each step, and the state after each measurement."""
    law, random_error = RetentionConfig(budget, **config), random.Random(seed)
    state, course, states = initial_state(law), [], []
    due = [step for step in (*FIRST, *range(every, plant.steps + 1, every))]
    for step in range(1, plant.steps + 1):
        plant.step(step, state.effort)
        course.append(plant.excess)
        if step in due:
            after = next((later for later in due if later > step), step + every)
            found = plant.excess + random_error.gauss(0, noise)
            state = decide(law, state, ExcessMeasurement(step, found, noise, after - step))
            states.append(state)
    return course, states


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", [(1 / 20, 0.1), (1 / 100, 0.05), (1 / 5, 0.5), (1 / 50, 1.0)])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_budget_is_held(budget, shape, noise):
    """Forgotten without it: at least twice the budget, and up to 40 times. At most a fifth above it on the way."""
    growth, pull = shape
    free, _ = steered(Forgetting(budget * growth, pull), budget, first_effort=0.0, largest_rise=0.0)
    course, states = steered(Forgetting(budget * growth, pull), budget, noise * budget, seed=1)
    assert free[-1] > 2 * budget - 0.02 * budget
    assert max(course) <= 1.2 * budget and course[-1] <= 1.01 * budget
    assert not states[-1].is_lost


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_that_is_not_needed_costs_no_effort(budget):
    course, states = steered(Forgetting(budget / 4000, 0.0), budget)
    assert course[-1] < 0.1 * budget and states[-1].effort == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_texts_that_contradict_each_other_are_found(noise):
    """Half of every batch holds it at five times the budget."""
    budget = 0.02
    course, states = steered(Forgetting(budget / 2, 0.1), budget, noise * budget)
    assert course[-1] > 4 * budget
    assert states[-1].is_lost and states[-1].effort == 1.0
    assert next(state.step for state in states if state.is_lost) <= 150


def test_effort_at_its_bound_winds_nothing_up():
    """Lost for 300 steps, then nothing is forgotten any more: effort leaves its bound at once and goes to 0."""
    law, state = RetentionConfig(0.02), None
    state = initial_state(law)
    for step in range(10, 310, 10):
        state = decide(law, state, ExcessMeasurement(step, 0.2, 0.001, 10))
    assert state.effort == 1.0 and state.is_lost
    for step in range(310, 600, 10):
        state = decide(law, state, ExcessMeasurement(step, 0.0, 0.001, 10))
    assert state.effort == 0.0 and not state.is_lost


def test_growth_is_anticipated():
    """Two excesses below the budget, of which one grows: only that one costs more effort."""
    law = RetentionConfig(0.1)
    still, rising = initial_state(law), initial_state(law)
    for number in range(1, 6):
        still = decide(law, still, ExcessMeasurement(10 * number, 0.04, 0.001, 10))
        rising = decide(law, rising, ExcessMeasurement(10 * number, 0.016 * number, 0.001, 10))
    assert rising.level_bits < 0.1 and rising.effort > still.effort + 0.2


def test_the_first_measurement_by_hand():
    """Of one that is exact, level and slope are what it says: 0.03 bits in 3 steps."""
    state = decide(RetentionConfig(0.1), RetentionState(effort=0.5), ExcessMeasurement(3, 0.03, 0.0, 3))
    assert state.level_bits == pytest.approx(0.03)
    # growth 0.01 / (1 - 0.5); wanted slope (0.1 - 0.03) / (3 * 3); their difference over growth
    assert state.growth_bits == pytest.approx(0.02)
    change = (0.01 - 0.07 / 9) / 0.02
    assert state.effort == pytest.approx(0.5 + change, rel=0.01)
    assert state.slope_bits == pytest.approx(0.01 - 0.02 * change, rel=0.01)


def test_noise_counts_for_less_the_longer_it_is_measured():
    law, state = RetentionConfig(0.1), initial_state(RetentionConfig(0.1))
    errors = []
    for number in range(1, 20):
        state = decide(law, state, ExcessMeasurement(10 * number, 0.05, 0.02, 10))
        errors.append(state.error_bits)
    assert errors[0] == pytest.approx(0.02, rel=0.01) and errors[-1] < 0.85 * errors[0]


@pytest.mark.parametrize("seen", [(float("nan"), 0.1), (float("inf"), 0.1), (0.1, float("nan")), (0.1, -1.0)])
def test_what_is_no_number_changes_nothing_and_is_counted(seen):
    state = initial_state(RetentionConfig(0.1))
    assert decide(RetentionConfig(0.1), state, ExcessMeasurement(1, *seen, 1)) == replace(state, skipped=1)


def test_steps_must_grow():
    state = RetentionState(effort=0.5, step=7)
    with pytest.raises(ValueError, match="step 7 follows one at step 7"):
        decide(RetentionConfig(0.1), state, ExcessMeasurement(7, 0.1, 0.1, 1))


def test_a_state_survives_a_checkpoint():
    _, states = steered(Forgetting(0.001, 0.1), 0.02, 0.004)
    for state in states:
        assert RetentionState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_the_effort_does_not_fall_before_anything_is_known():
    """The first steps of a training forget least: the adapter has just left 0, the rate warms up."""
    law = RetentionConfig(0.1)
    state, efforts = initial_state(law), []
    for step in range(1, 8):
        state = decide(law, state, ExcessMeasurement(step, 0.0, 0.0001, 1))
        efforts.append(state.effort)
    assert efforts[:3] == [law.first_effort] * 3 and efforts[-1] < efforts[2]


def test_the_mean_excess_by_hand():
    """Documents of 10, 10, 20 and 40 tokens that lose 1, 3, 4 and 4 bits: 12 of 80, unexplained -0.5, 1.5, 1 and -2."""
    mean, error = mean_excess([1.0, 3.0, 4.0, 4.0], [10, 10, 20, 40])
    assert mean == pytest.approx(0.15)
    assert error == pytest.approx((3.0 * 4 / 3 * (0.25 + 2.25 + 1 + 4)) ** 0.5 / 80)
    assert mean_excess([2.0], [10]) == (0.2, 0.2)


def test_the_error_of_the_mean_excess_is_honest():
    """Over 2,000 samples of 8 documents: the 95 % band covers the truth in 93 to 99 %."""
    random_excess, covered = random.Random(0), 0
    for _ in range(2000):
        tokens = [random_excess.randint(20, 120) for _ in range(8)]
        extra = [count * (0.05 + random_excess.gauss(0, 0.04)) for count in tokens]
        mean, error = mean_excess(extra, tokens)
        covered += abs(mean - 0.05) <= 1.96 * error
    assert 0.93 <= covered / 2000 <= 0.99


@pytest.mark.parametrize(
    ("step_s", "row_s", "steps"), [(1.0, 0.01, 500), (0.2, 0.02, 240), (5.0, 0.001, 100), (1, 1, 4000)]
)
def test_measuring_takes_no_more_of_the_time_than_it_may(step_s, row_s, steps):
    spent_s = 0.001 * step_s * steps
    every, rows = measurement_schedule(step_s, row_s, 5, steps, 100, spent_s)
    assert 8 <= rows <= 32
    assert spent_s + (steps - 5) // every * rows * row_s <= 0.02 * step_s * steps + 1e-9


def test_a_run_too_short_for_its_measurements_has_one_more():
    assert measurement_schedule(0.1, 0.1, 5, 20, 100, 3.0) == (15, 8)
    assert measurement_schedule(0.1, 0.0, 5, 20, 6, 0.0) == (1, 6)
