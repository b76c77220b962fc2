"""Which learning rates are tried, and what is advised: by hand."""

from __future__ import annotations

import math

import pytest

from scu_trainer.control.rate_search import MOST_TRIALS, RUNGS, RateAdvice, advice, next_exponent, rate_of


def searched(loss, rung=RUNGS[0], start: int = 0) -> dict[int, float]:
    losses: dict[int, float] = {}
    while (exponent := next_exponent(rung, losses, start)) is not None:
        losses[exponent] = loss(exponent)
    return losses


def test_a_search_walks_to_the_valley_in_strides_and_then_looks_halfway():
    losses = searched(lambda exponent: abs(exponent - 3.1))
    assert list(losses) == [0, 2, 4, 6, 5, 3, 1]


def test_the_second_rung_begins_at_the_best_of_the_first_and_follows_it_down():
    assert list(searched(lambda exponent: abs(exponent - 3), RUNGS[1], 3)) == [3, 4, 2]
    assert list(searched(lambda exponent: abs(exponent - 1), RUNGS[1], 3)) == [3, 4, 2, 1, 0]


@pytest.mark.parametrize("valley", range(-4, 5))
def test_the_valley_is_found_from_either_side_and_with_trainings_that_break(valley):
    losses = searched(lambda e: math.inf if e > valley + 1 else (e - valley) ** 2)
    assert min(losses, key=losses.get) == valley and len(losses) <= MOST_TRIALS
    assert {valley - 1, valley + 1} <= set(losses)


def test_a_loss_that_keeps_falling_ends_the_search_and_is_said_to_be_open():
    losses = searched(lambda exponent: -float(exponent))
    assert len(losses) == MOST_TRIALS
    found = advice(losses, {exponent: float(exponent < max(losses)) for exponent in losses})
    assert found.chosen == found.lowest == found.highest == max(losses) and found.is_open


def test_what_is_not_told_apart_reaches_to_the_first_rate_that_is():
    losses = {-2: 3.0, -1: 2.2, 0: 2.0, 1: 2.1, 2: math.inf}
    assert advice(losses, {-2: -0.1, -1: 0.2, 0: 0.0, 1: -0.01, 2: math.inf}) == RateAdvice(0, 0, 1, False)


def test_nothing_is_advised_where_no_training_ended():
    assert advice({0: math.inf}, {0: math.inf}) is None


def test_rates_are_those_asked_for_times_powers_of_two():
    assert rate_of(3e-4, -2) == pytest.approx(7.5e-5)
