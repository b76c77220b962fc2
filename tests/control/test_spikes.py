"""The band of losses and gradient norms by numbers: what is a spike, what is a new level, what is neither."""

from __future__ import annotations

import json
import math

import pytest

from scu_trainer.control.guard.spikes import FEWEST, MOST_IN_A_ROW, SPAN, SpikeState, observe

THRESHOLD = 10.0


def after(values, state=None, name="norm"):
    """(state, verdicts) of steps with these logarithms of one of both, the other one being 1."""
    state, verdicts = state or SpikeState(), []
    for value in values:
        state, verdict = observe(THRESHOLD, state, **{"loss": 1.0, "norm": 1.0, name: math.exp(value)})
        verdicts.append(verdict)
    return state, verdicts


EVEN = [-0.2, 0.2] * 16
"""Median 0, median absolute deviation 0.2, so a spread of 1.4826 x 0.2; the upper quartile is 0.2 = 0.6745 x 0.2965."""


@pytest.mark.parametrize("name", ["norm", "loss"])
def test_the_band_ends_at_the_threshold_times_the_spread_above_the_median(name):
    band, _ = after(EVEN, name=name)
    end = 10 * 1.4826 * 0.2
    (_, (below,)), (_, (above,)) = (after([value], band, name) for value in (end - 0.01, end + 0.01))
    assert not below.is_spike and above.is_spike
    assert above.excess.name == {"norm": "gradient", "loss": "loss"}[name]
    assert above.excess.usual == pytest.approx(1.0) and above.excess.value == pytest.approx(math.exp(end + 0.01))
    assert above.excess.deviations == pytest.approx((end + 0.01) / (1.4826 * 0.2))


def test_a_long_upper_tail_widens_the_band():
    band, _ = after([0.0] * 23 + [0.6745] * 9)  # a quarter lies at 0.6745 or above: a spread of 1; the deviation is 0
    assert [verdict.is_spike for verdict in after([9.9], band)[1]] == [False]
    assert [verdict.is_spike for verdict in after([10.1], band)[1]] == [True]


def test_trifles_of_a_steady_run_are_no_spikes():
    band, _ = after([0.0] * FEWEST)
    assert [verdict.is_spike for verdict in after([0.99], band)[1]] == [False]  # 10 x the floor of 0.1
    assert [verdict.is_spike for verdict in after([1.01], band)[1]] == [True]
    assert [verdict.is_spike for verdict in after([0.51], band, "loss")[1]] == [True]  # 10 x 0.05


def test_nothing_is_judged_before_the_band_is_known_and_a_fall_never():
    _, verdicts = after([0.0] * (FEWEST - 1) + [9.0])
    assert not any(verdict.excess for verdict in verdicts)
    assert not any(verdict.excess for verdict in after([*[0.0] * FEWEST, -9.0])[1])


def test_a_loss_that_is_not_above_zero_is_not_judged():
    band, _ = after([0.0] * FEWEST)
    state, verdict = observe(THRESHOLD, band, loss=-3.0, norm=1.0)
    assert verdict.excess is None and state.losses == band.losses


def test_a_spike_does_not_widen_the_band_and_the_oldest_value_leaves_it():
    band, _ = after([0.0] * FEWEST)
    spiked, _ = after([5.0], band)
    assert (spiked.norms, spiked.losses, spiked.in_a_row) == (band.norms, band.losses, 1)
    assert len(after([0.0] * (SPAN + 5))[0].norms) == SPAN


def test_many_spikes_in_a_row_are_a_new_level():
    band, _ = after([0.0] * FEWEST)
    state, verdicts = after([5.0] * (MOST_IN_A_ROW + 1), band)
    assert [verdict.is_spike for verdict in verdicts] == [True] * MOST_IN_A_ROW + [False]
    assert verdicts[-1].is_shift and (state.shifts, state.in_a_row, state.norms) == (1, 0, (pytest.approx(5.0),))
    _, verdicts = after([5.0] * FEWEST + [9.0], state)
    assert [verdict.is_spike for verdict in verdicts] == [False] * FEWEST + [True]


def test_a_sound_step_between_them_begins_the_count_again():
    band, _ = after([0.0] * FEWEST)
    _, verdicts = after([5.0, 5.0, 0.0] * 4, band)
    assert not any(verdict.is_shift for verdict in verdicts) and sum(verdict.is_spike for verdict in verdicts) == 8


def test_the_state_survives_a_file():
    state, _ = after([*EVEN, 8.0])
    assert SpikeState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
