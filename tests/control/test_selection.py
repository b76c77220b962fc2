"""Which rows each rule leaves out, by hand and in closed loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Optional

import numpy as np
import pytest

from scu_trainer.control.curriculum import CurriculumConfig
from scu_trainer.control.difficulty import Difficulty, Snapshot
from scu_trainer.control.selection import (
    STRATA,
    Selection,
    acmds,
    difficulty_target,
    infobatch,
    noise_guard,
    without_quarantined,
)

LAW = CurriculumConfig(methods=(), rows_per_batch=4)
NAN = math.nan


def known(scores, observations: int = 3, last_epoch=4, quarantined=(), **more) -> Snapshot:
    scores = np.array(scores, dtype=np.float32)
    unseen = np.isnan(scores)
    out = np.zeros(scores.size, dtype=bool)
    out[list(quarantined)] = True
    return Snapshot(
        scores=scores,
        observations=np.where(unseen, 0, observations),
        last_epoch=np.where(unseen, -1, last_epoch),
        quarantined=out,
        **{"labels": np.arange(scores.size) % 8, **more},
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbers(snapshot: Snapshot) -> np.ndarray:
    return np.arange(snapshot.scores.size)


def guard(snapshot: Snapshot, law: CurriculumConfig = LAW, seed: int = 0) -> Selection:
    return noise_guard(snapshot, numbers(snapshot), law, epoch=5, rng=rng(seed))


def prune(
    snapshot: Snapshot, epoch: int = 2, epochs: Optional[float] = 8, law: CurriculumConfig = LAW, seed: int = 0
) -> Selection:
    return infobatch(snapshot, numbers(snapshot), law, epoch, epochs, rng(seed))


def stratified(
    snapshot: Snapshot, epoch: int = 5, epochs: Optional[float] = 10, law: CurriculumConfig = LAW, **more
) -> Selection:
    return acmds(snapshot, numbers(snapshot), law, epoch, epochs, rng(), **more)


def assert_parted(selection: Selection, reason: str, ids: np.ndarray) -> None:
    """Every id is seen or skipped, once, and what is seen keeps its order."""
    seen = set(selection.ids.tolist())
    assert selection.ids.tolist() == [number for number in ids.tolist() if number in seen]
    assert sorted([*selection.ids.tolist(), *selection.skipped[reason].tolist()]) == sorted(ids.tolist())


def test_quarantined_rows_are_out_and_listed():
    selection = without_quarantined(known([1, 1, NAN, 1], quarantined=(1, 2)), np.array([3, 2, 1, 0]))
    assert selection.ids.tolist() == [3, 0]
    assert selection.skipped["quarantined"].tolist() == [2, 1]


# noise_guard


def noisy(rows: int = 100, bad: int = 20, **more) -> Snapshot:
    """The last ``bad`` rows lie above chance, 3.0 and up, the higher the later."""
    return known([*np.linspace(0.1, 0.6, rows - bad), *np.linspace(3.0, 4.0, bad)], **more)


CHANCE = replace(LAW, classes=8)
"""With as many rows of each class a guess costs ln 8 = 2.08 nats."""


def test_rows_above_the_bar_are_out_but_some_come_back():
    selection = guard(noisy(), CHANCE)
    assert sorted(selection.suspects) == list(range(80, 100))
    assert selection.readmitted.size == 2
    assert set(selection.skipped["noise_guard"]) == set(range(80, 100)) - set(selection.readmitted)
    assert set(selection.readmitted) <= set(selection.ids)
    assert_parted(selection, "noise_guard", np.arange(100))
    assert selection.notes == ()


def test_one_loss_is_not_enough_to_be_suspect():
    assert guard(noisy(observations=1), CHANCE).suspects.size == 0
    assert guard(noisy(observations=1), replace(CHANCE, guard_observations=1)).suspects.size == 20


def test_the_cap_keeps_the_lowest_of_the_suspects_and_says_so():
    selection = guard(noisy(), replace(CHANCE, guard_max_fraction=0.05, guard_readmit=0.0))
    assert sorted(selection.skipped["noise_guard"]) == [95, 96, 97, 98, 99]
    assert selection.suspects.size == 20
    assert len(selection.notes) == 1
    assert "20 of 100 rows look noisy, but noise_guard excludes 5 at most; the other 15" in selection.notes[0]


def test_the_cap_is_of_the_rows_still_in_use():
    selection = noise_guard(noisy(), np.arange(70, 100), CHANCE, 5, rng())
    assert selection.skipped["noise_guard"].size + selection.readmitted.size == 15


def test_a_row_is_left_even_where_all_may_be_excluded():
    law = replace(LAW, guard_max_fraction=1.0, guard_readmit=0.0)
    outliers = known([0.1, 0.2, 0.3, 8.0, 9.0])
    assert noise_guard(outliers, np.array([3, 4]), law, 5, rng()).ids.size >= 1
    assert sorted(guard(outliers, law).ids) == [0, 1, 2]


def test_those_longest_unseen_come_back_first():
    snapshot = known([5.0] * 10 + [0.1] * 30, last_epoch=[4, 4, 4, 1, 4, 4, 0, 4, 4, 4] + [4] * 30)
    assert guard(snapshot, CHANCE).readmitted.tolist() == [6]
    assert guard(snapshot, replace(CHANCE, guard_readmit=0.2)).readmitted.tolist() == [6, 3]


def test_equally_old_suspects_come_back_by_chance():
    back = {int(guard(noisy(bad=10), CHANCE, seed).readmitted[0]) for seed in range(60)}
    assert len(back) > 5


def test_every_excluded_row_is_looked_at_again():
    state, law = Difficulty(100, 0.3, 3), CHANCE
    losses, looked_at = noisy().scores.astype(np.float64), set()
    for epoch in range(14):
        selection = noise_guard(state.snapshot(), np.arange(100), law, epoch, rng(epoch))
        looked_at |= set(selection.readmitted.tolist())
        state.update(selection.ids, losses[selection.ids], epoch)
    assert looked_at == set(range(80, 100))


def test_a_row_whose_loss_falls_comes_back_for_good():
    state, losses = Difficulty(100, 0.5, 3), noisy().scores.astype(np.float64)
    for epoch in range(40):
        selection = noise_guard(state.snapshot(), np.arange(100), CHANCE, epoch, rng(epoch))
        state.update(
            selection.ids, np.where(selection.ids == 85, 0.1 if epoch > 5 else 3.0, losses[selection.ids]), epoch
        )
    assert 85 not in selection.suspects
    assert selection.suspects.size == 19


@pytest.mark.parametrize("scores", [[NAN] * 6, [1.5] * 6, [7.0], [NAN, 2.0, 2.0]])
def test_nothing_is_excluded_where_nothing_stands_out(scores):
    selection = guard(known(scores))
    assert selection.ids.size == len(scores)
    assert selection.suspects.size == selection.skipped["noise_guard"].size == 0


def test_an_empty_dataset_passes_every_rule():
    nothing = known([])
    for selection in (guard(nothing), guard(nothing, CHANCE), prune(nothing), stratified(nothing)):
        assert selection.ids.size == 0


# infobatch


def test_only_rows_below_the_mean_are_pruned_and_the_kept_ones_count_more():
    snapshot = known([1.0] * 50 + [NAN] * 10 + [3.0] * 50)
    selection = prune(snapshot, law=replace(LAW, prune_ratio=0.75))
    assert_parted(selection, "infobatch", np.arange(110))
    pruned = selection.skipped["infobatch"]
    assert 25 < pruned.size < 50
    assert pruned.max() < 50
    kept_easy = np.setdiff1d(np.arange(50), pruned)
    assert (selection.weights[kept_easy] == 4.0).all()
    assert (selection.weights[50:] == 1.0).all()
    assert selection.weights.dtype == np.float32


def test_the_expected_sum_of_losses_is_that_of_all_rows():
    losses = rng(1).gamma(2, 1, 200).astype(np.float32)
    snapshot, law = known(losses), replace(LAW, prune_ratio=0.6)
    sums = []
    for seed in range(2000):
        selection = prune(snapshot, law=law, seed=seed)
        sums.append(float((selection.weights * losses)[selection.ids].sum()))
    error_of_mean = np.std(sums) / math.sqrt(len(sums))
    assert error_of_mean < 0.005 * losses.sum()
    assert abs(np.mean(sums) - losses.sum()) < 4 * error_of_mean


@pytest.mark.parametrize(
    ("epochs", "pruning"), [(1, []), (2, []), (4, [1, 2]), (8, range(1, 7)), (10, range(1, 8)), (2.5, [1])]
)
def test_the_first_and_the_last_epochs_are_full(epochs, pruning):
    snapshot = known(np.arange(100.0))
    active = [epoch for epoch in range(math.ceil(epochs)) if prune(snapshot, epoch, epochs).ids.size < 100]
    assert active == list(pruning)


def test_the_last_epoch_is_full_also_with_no_final_fraction():
    law = replace(LAW, final_full_fraction=0.0)
    snapshot = known(np.arange(100.0))
    assert prune(snapshot, 6, 8, law).ids.size < 100
    assert prune(snapshot, 7, 8, law).ids.size == 100


def test_without_a_known_end_pruning_goes_on():
    assert prune(known(np.arange(100.0)), epoch=50, epochs=None).ids.size < 100


@pytest.mark.parametrize("scores", [[0.1] * 7, [NAN] * 7, [2.0]])
def test_nothing_is_pruned_where_no_row_is_easier(scores):
    selection = prune(known(scores))
    assert selection.ids.size == len(scores)
    assert selection.weights is None or (selection.weights == 1).all()


# acmds


def test_an_epoch_sees_its_share_and_every_stratum():
    snapshot = known(rng().permutation(800).astype(float))
    selection = stratified(snapshot)
    assert_parted(selection, "acmds", np.arange(800))
    assert selection.ids.size == 600
    per_stratum = np.bincount(snapshot.scores[selection.ids].astype(int) // 100, minlength=STRATA)
    assert per_stratum.min() >= 600 / STRATA / 2


def mean_difficulty(epoch: int = 5, availability: float = 1.0, fraction: float = 0.3) -> float:
    snapshot = known(rng().permutation(800).astype(float), availability=availability)
    return float(snapshot.scores[stratified(snapshot, epoch, law=replace(LAW, acmds_fraction=fraction)).ids].mean())


def test_epochs_grow_harder_and_scarce_memory_makes_them_easier():
    # Epoch 7 and later would find every row overdue: these were last seen in epoch 4.
    assert mean_difficulty(3) < mean_difficulty(4) - 5 < mean_difficulty(6) - 25
    assert mean_difficulty(6, availability=0.2) < mean_difficulty(6, availability=0.6) - 25 < mean_difficulty(6) - 50


def test_the_target_grows_to_one_times_free_memory():
    assert [difficulty_target(LAW, epoch, 4, 1.0) for epoch in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert difficulty_target(LAW, 3, 4, 0.5) == 0.5
    assert difficulty_target(LAW, 0, 1, 1.0) == 0.25
    assert difficulty_target(LAW, 2, 2.5, 1.0) == 1
    unknown_end = [difficulty_target(LAW, epoch, None, 1.0) for epoch in (0, 3, 30)]
    assert unknown_end == pytest.approx([0.25, 0.625, 0.25 + 0.75 * 30 / 33])


def test_cheap_rows_go_first_where_memory_is_short():
    costs = np.tile([10.0, 1000.0], 400).astype(np.float32)
    shares = []
    for availability in (1.0, 0.5, 0.0):
        snapshot = known(rng().permutation(800).astype(float), availability=availability)
        selection = stratified(snapshot, law=replace(LAW, acmds_fraction=0.4), lengths=costs)
        assert selection.ids.size == 320
        shares.append(np.mean(costs[selection.ids] == 10.0))
    assert 0.45 < shares[0] < 0.55
    assert shares[0] + 0.15 < shares[1] < shares[2] - 0.1


def test_rows_that_are_due_are_in_even_if_they_are_more_than_the_share():
    snapshot = known([NAN] * 50 + [1.0] * 50, last_epoch=[0] * 50 + [2] * 45 + [4] * 5)
    selection = stratified(snapshot, epoch=5)
    assert set(range(95)) <= set(selection.ids.tolist())


def test_no_stratum_starves_while_another_is_overdue():
    snapshot = known(np.arange(800.0), last_epoch=np.where(np.arange(800) < 500, 0, 4))
    selection = stratified(snapshot, epoch=5)
    per_stratum = np.bincount(selection.ids // 100, minlength=STRATA)
    assert per_stratum[:5].tolist() == [100] * 5
    assert per_stratum[5:].min() >= 600 / STRATA / 2


def equal(epoch: int, ids: np.ndarray) -> np.ndarray:
    return np.ones(ids.size)


def changing(epoch: int, ids: np.ndarray) -> np.ndarray:
    return rng(epoch).gamma(1, 1, ids.size)


def reversing(epoch: int, ids: np.ndarray) -> np.ndarray:
    return ids * (-1.0) ** epoch


def extreme(epoch: int, ids: np.ndarray) -> np.ndarray:
    return np.where(ids == 0, 1e30, 1e-30)


@pytest.mark.parametrize("losses", [equal, changing, reversing, extreme])
@pytest.mark.parametrize("samples", [1, 3, 10, 157])
@pytest.mark.parametrize(("window", "fraction"), [(1, 0.75), (2, 0.5), (3, 0.75), (5, 0.1), (4, 0.01)])
def test_every_row_is_seen_in_every_window(losses, samples, window, fraction):
    law = replace(LAW, window_epochs=window, acmds_fraction=fraction)
    state, seen = Difficulty(samples, 0.5, window), []
    for epoch in range(20):
        snapshot = state.snapshot(availability=rng(epoch).random())
        selection = acmds(snapshot, rng(epoch).permutation(samples), law, epoch, 20, rng(epoch))
        assert 1 <= selection.ids.size <= samples
        assert np.unique(selection.ids).size == selection.ids.size
        state.update(selection.ids, losses(epoch, selection.ids), epoch)
        seen.append(set(selection.ids.tolist()))
    for first in range(len(seen) - window + 1):
        assert set.union(*seen[first : first + window]) == set(range(samples))


def test_scores_that_never_become_known_leave_every_row_in():
    for epoch in range(5):
        assert stratified(known([NAN] * 30), epoch).ids.size == 30


def test_all_equal_scores_are_taken_by_chance():
    snapshot = known([1.0] * 800)
    sums = np.zeros(800)
    for seed in range(200):
        order = rng(seed).permutation(800)
        sums[acmds(snapshot, order, LAW, 5, 10, rng(1000 + seed)).ids] += 1
    assert sums.sum() == 200 * 600
    assert abs(sums / 200 - 0.75).max() < 0.2
