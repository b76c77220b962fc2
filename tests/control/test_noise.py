"""Which rows count as wrong: the cut by hand, and what it does to hard, rare and clean rows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scu_trainer.control.curriculum import CurriculumConfig
from scu_trainer.control.difficulty import Difficulty, Snapshot
from scu_trainer.control.noise import CLIP, chance_losses, class_bar, relative_losses, robust_bar, suspects

TEXT = CurriculumConfig(methods=("noise_guard",), rows_per_batch=4)
CLASSES = replace(TEXT, classes=10)


def known(means, labels=None, scores=None, observations: int = 5) -> Snapshot:
    means = np.asarray(means, dtype=np.float32)
    return Snapshot(
        scores=means if scores is None else np.asarray(scores, dtype=np.float32),
        observations=np.full(means.size, observations),
        last_epoch=np.full(means.size, 4),
        quarantined=np.zeros(means.size, dtype=bool),
        means=means,
        labels=np.arange(means.size) % 10 if labels is None else np.asarray(labels),
    )


def found(snapshot: Snapshot, law: CurriculumConfig = CLASSES) -> list[int]:
    return suspects(snapshot, np.arange(snapshot.scores.size), law)[0].tolist()


def two_groups(rows: int, wrong: int, seed: int = 0) -> np.ndarray:
    """Mean losses (nats) as training leaves them: right rows well below chance with a tail, wrong ones around 4."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.gamma(1.5, 0.25, rows - wrong), rng.normal(4.0, 0.6, wrong)])


# -- the chance loss of a row ------------------------------------------------------------------------------------------


def test_chance_is_the_share_of_the_label_but_at_least_that_of_equal_classes():
    labels = np.array([0] * 90 + [1] * 9 + [2])
    chances = chance_losses(labels, 3)
    assert chances[0] == pytest.approx(math.log(3))  # more frequent than one in three: never below ln 3
    assert chances[90] == pytest.approx(-math.log(0.09))
    assert chances[99] == pytest.approx(-math.log(0.01))


def test_a_label_that_is_not_known_counts_as_any():
    assert chance_losses(np.array([0, 1, -1]), 4)[2] == pytest.approx(math.log(4))
    assert chance_losses(np.array([-1, -1]), 4).tolist() == pytest.approx([math.log(4)] * 2)


def test_losses_in_units_of_chance():
    snapshot = known([math.log(10), 2 * math.log(10), np.nan], labels=[0, 1, 2])
    assert relative_losses(snapshot, 10).tolist() == pytest.approx([1.0, 2.0, math.nan], nan_ok=True)


# -- the bars ----------------------------------------------------------------------------------------------------------


def test_the_cut_lies_in_the_middle_of_the_gap():
    values = np.array([0.0] * 20 + [2.0] * 10)
    assert class_bar(values) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.4])
def test_the_cut_parts_two_groups_whatever_their_sizes(share):
    rows = 2000
    wrong = round(share * rows)
    snapshot = known(two_groups(rows, wrong))
    names = found(snapshot)
    right = sum(number >= rows - wrong for number in names)
    assert right >= 0.95 * wrong
    assert right >= 0.9 * len(names)


@pytest.mark.parametrize("seed", range(10))
def test_clean_rows_stay_in_however_long_their_tail(seed):
    assert found(known(two_groups(2000, 0, seed))) == []
    lognormal = np.random.default_rng(seed).lognormal(-2.5, 1.2, 2000)
    assert found(known(np.minimum(lognormal, 2.2))) == []


def test_one_absurd_loss_does_not_draw_the_cut_up():
    means = two_groups(1000, 200)
    means[0] = 1e6
    names = found(known(means))
    assert names[0] == 0
    assert 195 <= len(names) <= 212


def test_values_beyond_the_clip_are_all_alike_for_the_cut():
    values = np.array([0.1] * 30 + [2.0] * 20)
    far = np.array([0.1] * 30 + [2.0] * 19 + [CLIP * 1e5])
    assert class_bar(far) == pytest.approx(class_bar(values), abs=0.2)


@pytest.mark.parametrize("values", [[], [5.0], [3.0] * 50, [0.1] * 10 + [3.0] * 5])
def test_no_groups_no_bar(values):
    """No rows, one row, all alike, and too few to tell."""
    assert class_bar(np.array(values)) == math.inf


def test_a_few_hard_rows_below_chance_are_no_group():
    assert class_bar(np.array([0.05] * 100 + [0.9] * 20)) == math.inf


def test_the_robust_bar_is_three_deviations_above_the_median():
    assert robust_bar(np.array([1.0, 2, 3, 4, 5])) == pytest.approx(3 + 3 * 1.4826)
    assert robust_bar(np.array([1.0, 2, 3, 4, 5e9])) == pytest.approx(3 + 3 * 1.4826)


@pytest.mark.parametrize("values", [[], [2.0], [0.1] * 7, [0.0] * 6 + [0.3, 0.5, 0.9]])
def test_values_without_a_scale_give_no_robust_bar(values):
    assert robust_bar(np.array(values)) == math.inf


# -- suspects ----------------------------------------------------------------------------------------------------------


def test_a_rare_class_is_hard_and_not_wrong():
    """Rows of classes with one hundredth of the data stand at twice ln 10, and a guess by frequency would cost that."""
    labels = np.array([i % 9 for i in range(990)] + [9] * 10)
    means = np.concatenate([np.random.default_rng(0).gamma(1.5, 0.1, 990), np.full(10, 3.9)])
    snapshot = known(means, labels)
    assert found(snapshot) == []
    alike = replace_labels(snapshot, np.full(1000, -1))  # with one chance for all they would go
    assert found(alike) == list(range(990, 1000))


def replace_labels(snapshot: Snapshot, labels: np.ndarray) -> Snapshot:
    return known(snapshot.means, labels)


def test_half_of_a_class_stays_and_the_rest_is_counted():
    labels = np.array([0] * 20 + [i % 9 + 1 for i in range(180)])
    means = np.array([5.0 + i for i in range(20)] + [0.1] * 180)
    snapshot = known(means, labels)
    names, spared = suspects(snapshot, np.arange(200), CLASSES)
    assert names.tolist() == list(range(19, 9, -1))
    assert spared == 10


def test_worst_first_and_only_of_the_rows_asked_about():
    means = np.where(np.arange(100) % 7 == 0, 5.0 + np.arange(100) / 100, 0.1)
    names, _ = suspects(known(means), np.arange(50), CLASSES)
    assert names.tolist() == [49, 42, 35, 28, 21, 14, 7, 0]


def test_three_losses_are_needed_with_classes_and_two_without():
    means = two_groups(400, 80)
    assert found(known(means, observations=2)) == []
    assert found(known(means, observations=3))
    text = np.concatenate([np.random.default_rng(0).normal(3.0, 0.1, 95), np.full(5, 9.0)])
    assert found(known(text, observations=1), TEXT) == []
    assert found(known(text, observations=2), TEXT) == [95, 96, 97, 98, 99]
    assert found(known(means, observations=2), replace(CLASSES, guard_observations=1))


def test_text_goes_by_the_running_mean_and_classes_by_the_mean_since_the_start():
    """A memorized wrong label: its newest losses are small, its mean still tells."""
    means, scores = two_groups(400, 80), np.full(400, 0.1)
    assert len(found(known(means, scores=scores))) >= 76
    assert found(known(means, scores=scores), TEXT) == []


def test_the_mean_since_the_start_is_kept_by_difficulty():
    state = Difficulty(2, alpha=0.9, window_epochs=3)
    for epoch, loss in enumerate([6.0, 3.0, 0.0]):
        state.update(np.array([1, 1]), np.array([loss, loss]), epoch, labels=np.array([7, 7]))
    assert state.means.tolist() == pytest.approx([math.nan, 3.0], nan_ok=True)
    assert state.labels.tolist() == [-1, 7]
    again = Difficulty(2, 0.9, 3)
    again.load_state_dict(state.state_dict())
    assert again.snapshot().labels.tolist() == [-1, 7]
    assert again.snapshot().means.tolist() == pytest.approx([math.nan, 3.0], nan_ok=True)
    assert Difficulty(2, 0.9, 3).snapshot().labels is None
