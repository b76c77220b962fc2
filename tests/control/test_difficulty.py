"""Moving averages of losses: numbers given, numbers worked out by hand expected."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from scu_trainer.control import difficulty
from scu_trainer.control.difficulty import Difficulty

FIELDS = ("scores", "observations", "last_epoch", "quarantined")


def known(samples: int = 5, alpha: float = 0.25) -> Difficulty:
    return Difficulty(samples, alpha, window_epochs=3)


def update(state: Difficulty, losses: dict[int, float], epoch: int) -> None:
    state.update(np.array(list(losses)), np.array(list(losses.values())), epoch)


def assert_same(one, other) -> None:
    for name in FIELDS:
        mine, its = getattr(one, name), getattr(other, name)
        assert mine.dtype == its.dtype
        assert mine.tobytes() == its.tobytes()


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(difficulty).failed == 0


def test_the_first_loss_is_taken_as_is_and_later_ones_move_it():
    state = known()
    update(state, {2: 4.0}, epoch=0)
    assert state.scores[2] == 4.0
    update(state, {2: 2.0}, epoch=1)
    assert state.scores[2] == pytest.approx(3.5)
    assert state.observations.tolist() == [0, 0, 2, 0, 0]
    assert state.last_epoch.tolist() == [-1, -1, 1, -1, -1]
    assert np.isnan(state.scores[[0, 1, 3, 4]]).all()


def test_an_id_that_occurs_several_times_is_booked_in_order():
    together, one_by_one = known(), known()
    ids, losses = np.array([1, 3, 1, 1, 3]), np.array([8.0, 1.0, 4.0, 2.0, 3.0])
    together.update(ids, losses, epoch=2)
    for number, loss in zip(ids, losses, strict=True):
        update(one_by_one, {number: loss}, epoch=2)
    assert_same(together, one_by_one)
    assert together.scores[1] == pytest.approx(0.75 * (0.75 * 8 + 0.25 * 4) + 0.25 * 2)


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_of_repeats_and_broken_losses_equals_one_at_a_time(seed):
    rng = np.random.default_rng(seed)
    together, one_by_one = known(7), known(7)
    for epoch in range(3):
        ids, losses = rng.integers(0, 7, 40), rng.choice([0.5, 2.0, 9.0, np.nan, np.inf], 40)
        together.update(ids, losses, epoch)
        for number, loss in zip(ids, losses, strict=True):
            update(one_by_one, {number: loss}, epoch)
    assert_same(together, one_by_one)


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf, 1e39])
def test_a_loss_that_is_not_finite_quarantines_and_leaves_the_score(loss):
    state = known()
    update(state, {0: 1.0}, epoch=0)
    update(state, {0: loss, 1: loss}, epoch=1)
    assert state.quarantined.tolist() == [True, True, False, False, False]
    assert state.scores[0] == 1.0
    assert np.isnan(state.scores[1])
    assert (state.observations[0], state.last_epoch[0], state.observations[1]) == (1, 0, 0)


def test_a_finite_loss_does_not_end_the_quarantine():
    state = known()
    update(state, {0: np.nan}, epoch=0)
    update(state, {0: 1.0}, epoch=1)
    assert state.quarantined[0]


@pytest.mark.parametrize("number", [-1, 5])
def test_an_unknown_id_is_refused_before_anything_is_booked(number):
    state = known()
    with pytest.raises(ValueError, match="0 to 4 are known"):
        update(state, {1: 1.0, number: 1.0}, epoch=0)
    assert_same(state, known())


def test_one_loss_per_id_is_needed():
    with pytest.raises(ValueError, match="one loss per number"):
        known().update(np.array([0, 1]), np.array([1.0]), epoch=0)


def test_nothing_to_book_is_fine_also_without_samples():
    state = known(0)
    state.update(np.array([], dtype=np.int64), np.array([]), epoch=0)
    assert state.counts(0) == {"unseen": 0, "stale": 0, "quarantined": 0}
    assert set(state.quantiles().values()) == {None}


def test_stale_is_seen_but_not_for_more_than_the_window():
    state = known()
    update(state, {0: 1.0, 1: 1.0, 3: 1.0}, epoch=0)
    update(state, {1: 1.0}, epoch=1)
    update(state, {3: np.nan}, epoch=1)
    assert not state.stale(3).any()
    assert state.stale(4).tolist() == [True, False, False, False, False]
    assert state.counts(4) == {"unseen": 2, "stale": 1, "quarantined": 1}


def test_quantiles_are_of_the_known_scores():
    state = known(12)
    update(state, {number: float(number) for number in range(11)}, epoch=0)
    assert state.quantiles() == {"p0": 0, "p10": 1, "p25": 2.5, "p50": 5, "p75": 7.5, "p90": 9, "p100": 10}


def test_a_snapshot_is_a_copy_that_cannot_be_changed():
    state = known()
    update(state, {0: 1.0}, epoch=0)
    snapshot = state.snapshot(availability=0.5)
    update(state, {0: 9.0, 1: np.nan}, epoch=1)
    assert (snapshot.scores[0], snapshot.observations[0], snapshot.quarantined.any()) == (1.0, 1, False)
    with pytest.raises(ValueError, match="read-only"):
        snapshot.scores[0] = 2.0


def test_costs_stay_the_callers_own():
    costs = np.ones(5, dtype=np.float32)
    snapshot = known().snapshot(costs=costs)
    costs[0] = 7.0
    assert snapshot.costs[0] == 1.0


def test_state_survives_a_checkpoint_bit_for_bit():
    before, after = known(), known()
    update(before, {0: 1.1, 4: np.nan}, epoch=2)
    saved = before.state_dict()
    update(before, {0: 5.0}, epoch=3)
    after.load_state_dict(saved)
    update(after, {0: 5.0}, epoch=3)
    assert_same(after, before)


def test_state_of_another_dataset_is_refused_and_nothing_is_changed():
    state = known()
    with pytest.raises(ValueError, match=r"\(6,\); \(5,\) is needed"):
        state.load_state_dict(known(6).state_dict())
    with pytest.raises(ValueError, match="missing"):
        state.load_state_dict({name: value for name, value in known().state_dict().items() if name != "quarantined"})
    assert_same(state, known())


def test_rows_that_were_trained_on_without_a_known_loss_are_seen():
    state = known()
    unseen = state.counts(epoch=5)["unseen"]
    state.mark_seen(np.flatnonzero(state.last_epoch < 0)[:1], epoch=5)
    assert state.counts(epoch=5)["unseen"] == unseen - 1
    assert np.isnan(state.scores).sum() == unseen
