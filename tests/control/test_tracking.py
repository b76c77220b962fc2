"""Figures and verdicts by hand."""

from __future__ import annotations

import math

import pytest

from scu_trainer.control.regularization import logit
from scu_trainer.control.tracking import BAND, assess, forecast_s

STEPS = [10, 20, 30, 40, 50, 60]


def test_a_run_that_settles():
    result = assess(STEPS, [0.02, 0.08, 0.12, 0.115, 0.104, 0.098], 0.1, ["low", "", "high", "", "", ""])
    assert result.verdict == "on target"
    assert result.reached
    assert result.settling_step == 50
    assert result.overshoot == pytest.approx(0.2)
    # Inside first at position 4 of 6: the late half starts at (4 + 6) // 2 = 5.
    assert result.bias == pytest.approx(-0.02)
    # The climb before that is no trouble, and neither is what happened outside the judged stretch.
    assert result.saturated_fraction == 0.0
    assert (result.target_s, result.final_s) == (0.1, 0.098)


def test_saturation_counts_from_the_first_time_inside():
    result = assess(STEPS, [0.02, 0.1, 0.2, 0.2, 0.2, 0.2], 0.1, ["low", "", "high", "high", "high", ""])
    assert result.saturated_fraction == pytest.approx(3 / 5)


def test_settling_counts_from_the_last_time_outside():
    assert assess(STEPS, [0.05, 0.10, 0.15, 0.10, 0.10, 0.10], 0.1).settling_step == 40


def test_a_run_that_approaches_from_below_has_no_overshoot():
    result = assess(STEPS, [0.05, 0.091, 0.095, 0.096, 0.097, 0.099], 0.1)
    assert (result.verdict, result.settling_step, result.overshoot) == ("on target", 20, None)
    assert result.bias == pytest.approx((-0.04 - 0.03 - 0.01) / 3)
    assert result.saturated_fraction == 0.0


def test_a_run_that_starts_on_target():
    assert assess(STEPS, [0.1] * 6, 0.1).settling_step == 10


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.05, 0.10, 0.10, 0.10, 0.10, 0.12], "left above target"),
        ([0.05, 0.10, 0.10, 0.10, 0.10, 0.08], "left below target"),
        ([0.05, 0.20, 0.30, 0.40, 0.50, 0.60], "left above target"),
        ([0.01, 0.02, 0.03, 0.04, 0.05, 0.06], "target not reached"),
    ],
)
def test_runs_that_do_not_settle(values, verdict):
    result = assess(STEPS, values, 0.1)
    assert result.verdict == verdict
    assert result.settling_step is None
    assert result.reached == (verdict != "target not reached")


def test_jumping_over_the_band_counts_as_reached_without_a_bias():
    result = assess(STEPS[:2], [0.05, 0.2], 0.1)
    assert (result.reached, result.bias, result.overshoot) == (True, None, pytest.approx(1.0))


def test_the_band_includes_its_edges():
    assert assess([1], [0.25 * (1 + BAND) - 1e-12], 0.25).verdict == "on target"
    assert assess([1], [0.25 * (1 + BAND) + 1e-12], 0.25).verdict == "left above target"


def test_an_empty_history():
    result = assess([], [], 0.1)
    assert (result.verdict, result.final_s, result.reached) == ("target not reached", 0.0, False)


def test_forecast_by_hand():
    """A slope of 2 in ln(step): from y = -6 at step 10 to -6 + 2 ln 2 at 20, and -6 + 2 ln 40 at 400."""
    now = -6.0 + 2.0 * math.log(2.0)
    predicted_s, is_reachable = forecast_s((10, -6.0), (20, now), 400, 0.5)
    assert predicted_s == pytest.approx(1.0 / (1.0 + math.exp(6.0) / 1600.0))  # 0.7986
    assert is_reachable
    assert not forecast_s((10, -6.0), (20, now), 100, 0.5)[1]  # 100 / (e^6 + 100) = 0.199


def test_forecast_counts_the_band_as_arrival():
    flat = (10, logit(0.46)), (20, logit(0.46))
    assert forecast_s(*flat, 100, 0.5)[1]
    assert not forecast_s(*flat, 100, 0.52)[1]


def test_forecast_takes_a_falling_s_as_standing_still():
    predicted_s, _ = forecast_s((10, -1.0), (20, -2.0), 1000, 0.5)
    assert predicted_s == pytest.approx(1.0 / (1.0 + math.exp(2.0)))


def test_forecast_at_the_last_step_is_what_was_measured():
    assert forecast_s((10, -4.0), (20, -2.0), 20, 0.5)[0] == pytest.approx(1.0 / (1.0 + math.exp(2.0)))
