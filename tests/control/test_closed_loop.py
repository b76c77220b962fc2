"""The laws against a toy plant: does S arrive, stay, and come back?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.control.plant import (
    MODEL,
    ORIGINAL,
    Plant,
    constant,
    decaying,
    logarithm_of_time,
    straight_walk,
)

NOISE = 0.03  # of DataBPT from step to step


def assert_on_target(tracking, largest_bias: float = 0.01) -> None:
    assert tracking.verdict == "on target"
    assert tracking.overshoot is None or tracking.overshoot <= 0.05
    assert abs(tracking.bias) <= largest_bias


@pytest.mark.parametrize("control_frequency", [1, 10])
@pytest.mark.parametrize("gain", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("growth", [straight_walk, constant, decaying, logarithm_of_time], ids=lambda g: g.__name__)
def test_model_law_settles_whatever_the_growth_and_the_gain(growth, gain, control_frequency):
    plant = Plant(growth, gain, NOISE)
    run = plant.run(MODEL, control_frequency=control_frequency)
    tracking = run.tracking()
    assert_on_target(tracking)
    assert tracking.settling_step <= 200


@pytest.mark.parametrize("seed", range(5))
def test_model_law_holds_s_through_noise(seed):
    run = Plant(constant, noise=NOISE, seed=seed).run(MODEL)
    settled = run.steps.index(run.tracking().settling_step)
    spread = [abs(state.s_ema / 0.1 - 1.0) for state in run.states[settled + 50 :]]
    assert max(spread) <= 0.05


def test_without_control_s_passes_the_target():
    """What the loop is there for: the same plant with lambda 0."""
    tracking = Plant(constant).run(replace(MODEL, max_shrink=1e-12)).tracking()
    assert tracking.verdict == "left above target"
    assert tracking.overshoot > 5.0


def test_model_law_in_steady_state_cancels_exactly_the_growth():
    run = Plant(constant, gain=3.0).run(MODEL)
    assert run.states[-1].growth == pytest.approx(0.05, rel=1e-6)
    assert -3.0 * math.log1p(-run.shrinks[-1]) == pytest.approx(0.05, rel=1e-6)
    assert run.states[-1].s_ema == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_model_law_settles_again_after_a_shift_of_the_data(factor):
    plant = Plant(constant, noise=0.01, data_bpt=lambda step: 4.0 if step <= 300 else 4.0 * factor)
    run = plant.run(MODEL, steps=600)
    assert_on_target(run.tracking(last=300))
    assert abs(run.tracking(first=300).bias) <= 0.01
    errors = [abs(state.s_ema / 0.1 - 1.0) for state in run.states]
    assert max(errors[300:]) > 0.03, "the shift must be felt, or this test shows nothing"
    assert max(errors[400:]) <= 0.05


@pytest.mark.parametrize(("control_frequency", "largest_bias"), [(1, 0.01), (10, 0.02)])
def test_model_law_follows_a_decaying_learning_rate(control_frequency, largest_bias):
    """Learning slows down with the rate, and so does the pull lambda * rate: S stays where it is."""

    def rate(step: int) -> float:
        return 1e-3 * (1.0 - step / 401)

    def growth(step: int, y: float) -> float:
        return 2.0 * math.log1p(10.0 * rate(step) / math.exp(y / 2.0))

    run = Plant(growth, noise=0.01, learning_rate=rate).run(MODEL, control_frequency=control_frequency)
    assert_on_target(run.tracking(), largest_bias)


def test_lambda_makes_up_for_a_rate_that_drops():
    """What acts is u = lambda * rate."""
    run = Plant(straight_walk, learning_rate=lambda step: 1e-3 if step < 250 else 5e-4).run(MODEL)
    assert_on_target(run.tracking())
    assert run.states[-1].lam == pytest.approx(2.0 * run.states[240].lam, rel=0.01)


def test_model_law_survives_a_warm_up_from_rate_zero():
    run = Plant(straight_walk, learning_rate=lambda step: 1e-3 * min(1.0, (step - 1) / 30)).run(MODEL)
    assert_on_target(run.tracking())


def test_growth_is_estimated_from_the_pull_that_was_applied():
    """200 steps at max_shrink: an estimate from the pull that was wanted would wind up and hold S down afterwards."""
    ends = 200
    plant = Plant(lambda step, y: 0.05 if step <= ends else 0.0, param_bpt=4.0 / 9.0)
    run = plant.run(replace(MODEL, max_shrink=0.01), steps=500)
    assert {state.saturated for state in run.states[50:ends]} == {"high"}
    assert run.states[ends - 1].s_ema > 0.9
    assert run.states[ends - 1].growth == pytest.approx(0.05, rel=1e-6)
    assert run.states[ends + 40].growth == pytest.approx(0.0, abs=1e-4)
    tail = run.tracking(first=ends)
    assert tail.verdict == "left above target" or tail.overshoot is not None
    assert min(state.s_ema for state in run.states[ends:]) >= 0.095, "S must not be pushed below the target"


def test_a_target_out_of_reach_is_called_so():
    run = Plant(logarithm_of_time, param_bpt=4.0 * math.exp(-15.0)).run(MODEL)
    tracking = run.tracking()
    assert (tracking.verdict, tracking.reached, tracking.settling_step) == ("target not reached", False, None)
    assert tracking.saturated_fraction > 0.9
    assert {state.lam for state in run.states} == {0.0}


def test_growth_too_strong_for_the_actuator_is_called_so():
    run = Plant(constant).run(replace(MODEL, max_shrink=1e-3))
    assert run.tracking().verdict == "left above target"
    assert run.states[-1].saturated == "high"


@pytest.mark.parametrize("learning_rate", [1e-3, 1e-2])
def test_original_law_on_the_same_plant_does_not_settle(learning_rate):
    """The published gains, for contrast: too slow for this plant at a low rate, swinging at a high one."""
    law = replace(ORIGINAL, actuator="decoupled")
    plant = Plant(constant, noise=NOISE, learning_rate=lambda step: learning_rate)
    tracking = plant.run(law).tracking()
    assert tracking.settling_step is None
    assert tracking.overshoot > 1.0
    assert max(tracking.bias, -tracking.bias) > 0.1


def test_original_law_moves_lambda_toward_the_target():
    """Both signs of the error, through the plant: above target lambda rises, below it falls."""
    law = replace(ORIGINAL, actuator="decoupled")
    above = Plant(constant, param_bpt=4.0).run(law, steps=5)
    below = Plant(lambda step, y: 0.0, param_bpt=1e-3).run(law, steps=20)
    assert all(b.lam > a.lam for a, b in zip(above.states, above.states[1:], strict=False))
    assert all(b.lam < a.lam for a, b in zip(below.states, below.states[1:], strict=False))
    assert below.states[-1].s_ema < 0.1 < above.states[-1].s_ema


def test_stop_at_target_waits_then_holds():
    run = Plant(constant).run(replace(MODEL, wait_for_target=True))
    reached = run.states[-1].reached_step
    for step, state in zip(run.steps, run.states, strict=True):
        assert (state.lam > 0.0) <= (step >= reached)
    assert run.states[reached - 2].s_ema < 0.1 <= run.states[reached - 1].s_ema
    assert run.tracking().verdict == "on target"
