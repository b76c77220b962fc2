"""Plans of whole epochs: what every combination of methods must keep to, and how an interrupted epoch goes on."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scu_trainer.control import curriculum
from scu_trainer.control.curriculum import (
    CurriculumConfig,
    EpochPlan,
    check_methods,
    plan,
    remaining_plan,
    reselected_plan,
    warmup_limit,
)
from scu_trainer.control.difficulty import Difficulty, Snapshot

NAMES = ("token_budget", "noise_guard", "acmds", "infobatch", "length_warmup")
COMBINATIONS = [
    methods for size in range(len(NAMES) + 1) for methods in combinations(NAMES, size) if check_methods(methods) is None
]


def trained(samples: int, seed: int = 0, broken: int = 0, epochs: int = 4) -> Snapshot:
    """A snapshot as after ``epochs`` epochs of which each saw most rows; some rows are unseen, some are outliers."""
    rng = np.random.default_rng(seed)
    state = Difficulty(samples, 0.3, 3)
    losses = rng.gamma(2, 1, samples) * np.where(rng.random(samples) < 0.1, 20, 1)
    for epoch in range(epochs):
        ids = np.flatnonzero(rng.random(samples) < 0.7)
        state.update(ids, losses[ids], epoch)
    ids = rng.permutation(samples)[:broken]
    state.update(ids, np.full(ids.size, np.nan), epochs - 1)
    return state.snapshot(availability=0.6)


def some_lengths(samples: int, seed: int = 0) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(seed).lognormal(4, 0.8, samples)).astype(np.int64)


def planned(
    methods=(), samples: int = 200, world: int = 1, seed: int = 0, snapshot=None, lengths=None, **law
) -> EpochPlan:
    return plan(
        CurriculumConfig(tuple(methods), **{"rows_per_batch": 8, **law}),
        trained(samples, seed) if snapshot is None else snapshot,
        epoch=4,
        epochs=10,
        permutation=np.random.default_rng(seed).permutation(samples),
        lengths=some_lengths(samples, seed) if lengths is None else lengths,
        world=world,
        seed=seed,
    )


def dealt(one: EpochPlan, world: int) -> list[int]:
    return sorted(int(number) for rank in range(world) for batch in one.batches_of(rank, world) for number in batch)


def assert_same(one: EpochPlan, other: EpochPlan) -> None:
    assert one.batches.order.tobytes() == other.batches.order.tobytes()
    assert one.batches.ends.tobytes() == other.batches.ends.tobytes()
    assert (one.weights is None) == (other.weights is None)
    assert one.weights is None or one.weights.tobytes() == other.weights.tobytes()
    assert {reason: ids.tolist() for reason, ids in one.skipped.items()} == {
        reason: ids.tolist() for reason, ids in other.skipped.items()
    }
    for name in ("suspects", "readmitted", "repeated"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert one.notes == other.notes


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(curriculum).failed == 0


def test_without_methods_the_permutation_is_cut_as_a_stock_sampler_does():
    permutation = np.random.default_rng(0).permutation(21)
    one = planned(samples=21)
    assert [batch.tolist() for batch in one.batches_of(0, 1)] == [
        permutation[:8].tolist(),
        permutation[8:16].tolist(),
        permutation[16:].tolist(),
    ]
    assert one.weights is None
    assert (one.micro_batches, one.rows, one.notes) == (3, 21, ())


def test_ranks_take_turns():
    whole, shared = planned(samples=64), planned(samples=64, world=4)
    for rank in range(4):
        for turn, batch in enumerate(shared.batches_of(rank, 4)):
            assert batch.tolist() == whole.batches[turn * 4 + rank].tolist()


@pytest.mark.parametrize("methods", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize(("samples", "world"), [(1, 1), (1, 3), (2, 5), (7, 2), (60, 1), (60, 4), (333, 3), (333, 16)])
def test_every_sample_is_seen_or_skipped_with_its_reason(methods, samples, world):
    snapshot = trained(samples, seed=samples, broken=samples // 20)
    one = planned(methods, samples, world, seed=samples, snapshot=snapshot)
    skipped = [int(number) for ids in one.skipped.values() for number in ids]
    again = planned(methods, samples, world, seed=samples, snapshot=snapshot)
    assert_same(one, again)
    assert one.micro_batches % world == 0
    assert one.batches.sizes.min() >= 1
    assert sorted(dealt(one, world) + skipped) == sorted([*range(samples), *one.repeated.tolist()])
    assert sorted(one.skipped["quarantined"]) == np.flatnonzero(snapshot.quarantined).tolist()
    assert one.repeated.size < world
    assert set(one.readmitted) <= set(one.suspects) & set(dealt(one, world))
    assert (one.weights is not None) == ("infobatch" in methods)


@pytest.mark.parametrize("methods", COMBINATIONS, ids=" ".join)
def test_all_equal_losses_exclude_nothing_but_the_share_of_acmds(methods):
    state = Difficulty(80, 0.3, 3)
    for epoch in (2, 3):
        state.update(np.arange(80), np.full(80, 0.1), epoch)
    one = planned(methods, 80, snapshot=state.snapshot())
    assert one.rows == (60 if "acmds" in methods else 80)
    assert one.weights is None or (one.weights == 1).all()
    assert one.suspects.size == 0


@pytest.mark.parametrize("methods", COMBINATIONS, ids=" ".join)
def test_nothing_known_means_every_row(methods):
    one = planned(methods, 50, snapshot=Difficulty(50, 0.3, 3).snapshot())
    assert dealt(one, 1) == list(range(50))


@pytest.mark.parametrize("methods", COMBINATIONS, ids=" ".join)
def test_nothing_left_to_see_is_said(methods):
    nobody = Difficulty(0, 0.3, 3).snapshot()
    with pytest.raises(ValueError, match="the dataset has no row"):
        planned(methods, 0, snapshot=nobody)
    state = Difficulty(6, 0.3, 3)
    state.update(np.arange(6), np.full(6, np.nan), 0)
    with pytest.raises(ValueError, match="all 6 had a loss that is not a finite number"):
        planned(methods, 6, snapshot=state.snapshot())


def test_another_seed_or_epoch_draws_again():
    law, snapshot, order, lengths = CurriculumConfig(("infobatch",), 8), trained(200), np.arange(200), some_lengths(200)
    pruned = [
        plan(law, snapshot, epoch, 10, order, lengths, world=1, seed=seed).skipped["infobatch"].tolist()
        for epoch, seed in ((4, 0), (5, 0), (4, 1))
    ]
    assert pruned[0] != pruned[1] != pruned[2] != pruned[0]


def test_a_method_draws_the_same_whatever_else_is_on():
    alone, beside = planned(["infobatch"]), planned(["infobatch", "token_budget"])
    assert alone.skipped["infobatch"].tolist() == beside.skipped["infobatch"].tolist()
    assert alone.skipped["infobatch"].size


def test_a_budget_that_is_given_is_kept():
    lengths = np.minimum(some_lengths(400), 200)
    one = planned(["token_budget"], 400, lengths=lengths, token_budget=1500)
    padded = [batch.size * lengths[batch].max() for batch in one.batches]
    assert 0.8 * 1500 < max(padded) <= 1500


def test_without_a_budget_an_epoch_has_as_many_steps_as_a_uniform_one():
    lengths = np.minimum(some_lengths(400), 200)
    uniform, budgeted = planned([], 400, lengths=lengths), planned(["token_budget"], 400, lengths=lengths)
    assert budgeted.micro_batches == uniform.micro_batches


def test_weights_are_by_sample_number_whatever_the_order():
    losses = np.random.default_rng(3).random(100)
    state = Difficulty(100, 0.3, 3)
    state.update(np.arange(100), losses, 3)
    one = planned(["infobatch", "token_budget"], 100, snapshot=state.snapshot())
    easy = np.setdiff1d(np.flatnonzero(losses < losses.mean()), one.skipped["infobatch"])
    assert easy.size
    assert np.flatnonzero(one.weights == 2.0).tolist() == easy.tolist()
    assert np.flatnonzero(one.weights == 1.0).size == 100 - easy.size


def test_one_huge_row_stands_alone():
    lengths = np.where(np.arange(50) == 17, 100_000, 10)
    one = planned(["token_budget"], 50, lengths=lengths, token_budget=100)
    assert [17] in [batch.tolist() for batch in one.batches]
    assert dealt(one, 1) == list(range(50))


def test_more_ranks_than_rows_repeats_rows_and_says_so():
    one = planned(samples=3, world=8, snapshot=Difficulty(3, 0.3, 3).snapshot())
    assert (one.micro_batches, one.rows, one.repeated.size) == (8, 8, 5)
    assert one.notes == ("epoch 4: 3 rows cannot be divided evenly among 8 ranks; 5 repeated rows fill the gap",)


def test_costs_of_the_snapshot_go_before_lengths():
    state = Difficulty(800, 0.3, 3)
    state.update(np.arange(800), np.random.default_rng(0).random(800), 3)
    dear_when_short = (2000 - some_lengths(800)).astype(np.float32)
    shares = []
    for costs in (None, dear_when_short):
        snapshot = state.snapshot(availability=0.0, costs=costs)
        one = planned(["acmds"], 800, snapshot=snapshot, acmds_fraction=0.4)
        shares.append(some_lengths(800)[one.batches.order].mean())
    assert shares[0] < some_lengths(800).mean() < shares[1]


# An interrupted epoch


@pytest.mark.parametrize("methods", [(), ("token_budget",), ("noise_guard", "infobatch", "token_budget"), ("acmds",)])
@pytest.mark.parametrize(("old_world", "new_world"), [(1, 1), (1, 4), (4, 1), (2, 3), (16, 5)])
def test_the_rest_of_an_epoch_loses_no_row_and_sees_none_twice(methods, old_world, new_world):
    old = planned(methods, 333, old_world)
    wanted = sorted(set(old.batches.order.tolist()))
    law, lengths = CurriculumConfig(methods, rows_per_batch=5), some_lengths(333)
    for done in range(0, old.micro_batches, old_world):
        rest = remaining_plan(old, done, new_world, law, lengths, seed=0)
        delivered = [int(number) for batch in range(done) for number in old.batches[batch]]
        assert sorted(delivered + dealt(rest, new_world)) == sorted([*wanted, *rest.repeated.tolist()])
        assert rest.micro_batches % new_world == 0
        assert rest.weights is old.weights
        assert rest.skipped is old.skipped
        assert_same(rest, remaining_plan(old, done, new_world, law, lengths, seed=0))


def test_the_rest_keeps_the_order_without_a_budget():
    old = planned(samples=21)
    rest = remaining_plan(old, 1, 1, CurriculumConfig((), rows_per_batch=4), some_lengths(21), seed=0)
    assert rest.batches.order.tolist() == old.batches.order[8:].tolist()
    assert rest.batches.sizes.tolist() == [4, 4, 4, 1]


def test_repeated_rows_of_the_old_plan_are_not_in_the_rest():
    old = planned(samples=5, world=4, snapshot=Difficulty(5, 0.3, 3).snapshot(), rows_per_batch=1)
    assert old.repeated.size == 3
    rest = remaining_plan(old, 4, 1, CurriculumConfig((), rows_per_batch=1), some_lengths(5), seed=0)
    assert rest.batches.order.tolist() == [old.batches.order[4]]
    rest = remaining_plan(old, 2, 1, CurriculumConfig((), rows_per_batch=1), some_lengths(5), seed=0)
    assert rest.batches.order.tolist() == old.batches.order[2:5].tolist()


def test_nothing_is_left_of_a_finished_epoch():
    old = planned(samples=21)
    with pytest.raises(ValueError, match="there are no rows"):
        remaining_plan(old, old.micro_batches, 1, CurriculumConfig((), rows_per_batch=4), some_lengths(21), seed=0)


# Sequence-length warm-up


def test_lengths_grow_linearly_and_then_are_free():
    law = CurriculumConfig(("length_warmup",), 8, warmup_share=0.5, warmup_start_tokens=64)
    limits = [warmup_limit(law, step, max_steps=20, longest=264) for step in range(12)]
    assert limits == [64, 80, 104, 128, 144, 160, 184, 208, 224, 240, None, None]


def test_no_limit_where_there_is_nothing_to_warm_up():
    law = CurriculumConfig(("length_warmup",), 8)
    assert warmup_limit(law, 0, 100, longest=64) is None
    assert warmup_limit(law, 0, 0, longest=500) is None
    assert warmup_limit(CurriculumConfig((), 8, warmup_share=0.0), 0, 100, longest=500) is None
    assert warmup_limit(CurriculumConfig((), 8, warmup_start_tokens=3), 0, 100, longest=500) == 8


@pytest.mark.parametrize("longest", [65, 70, 72, 100, 4096])
def test_limits_never_fall_and_stay_below_the_longest(longest):
    limits = [warmup_limit(CurriculumConfig((), 8), step, 200, longest) for step in range(200)]
    given = [limit for limit in limits if limit is not None]
    assert given == sorted(given)
    assert limits[len(given) :] == [None] * (200 - len(given))
    assert all(limit < longest and limit % 8 == 0 for limit in given)


# Combinations


def test_what_composes_and_what_does_not():
    assert len(COMBINATIONS) == 24
    assert check_methods(("none",)) is None
    assert check_methods(NAMES[:3]) is None
    assert "both choose samples by difficulty" in check_methods(("acmds", "token_budget", "infobatch"))
    assert "'token_budget' is set too" in check_methods(("none", "token_budget"))
    assert "'acmds' is named 2 times" in check_methods(("acmds", "acmds"))


def lines_run(function: Callable[[], Any]) -> tuple[Any, int]:
    """What ``function`` returns, and how many lines of Python it has run, each turn of a loop counted."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(), lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("methods", [(), ("token_budget", "noise_guard", "acmds"), ("token_budget", "infobatch")])
def test_a_million_samples_are_planned_without_a_loop_over_rows(methods):
    samples = 1_000_000
    snapshot, permutation = trained(samples, epochs=2), np.random.default_rng(0).permutation(samples)
    lengths, law = some_lengths(samples), CurriculumConfig(methods, rows_per_batch=16)
    one, lines = lines_run(lambda: plan(law, snapshot, 2, 10, permutation, lengths, world=8, seed=0))
    # Finding the budget of each pool goes over micro-batches again and again: 1.95 lines a row, where it is highest.
    assert lines < (2.2 * samples if methods else 2_000)
    for_one_rank = one.batches_of(0, 8)
    assert len(for_one_rank) * 8 == one.micro_batches


@pytest.mark.parametrize("method", ["noise_guard", "infobatch", "acmds", "token_budget"])
def test_a_plan_survives_a_checkpoint(method):
    state = Difficulty(100, 0.3, 3)
    for epoch in range(3):
        state.update(np.arange(100), np.where(np.arange(100) < 90, np.linspace(1, 2, 100), 9.0), epoch)
    before = planned([method], 100, snapshot=state.snapshot())
    after = EpochPlan.from_arrays(before.to_arrays(), before.epoch, before.notes)
    assert [ids.tolist() for ids in after.batches_of(0, 1)] == [ids.tolist() for ids in before.batches_of(0, 1)]
    assert {reason: ids.tolist() for reason, ids in after.skipped.items()} == {
        reason: ids.tolist() for reason, ids in before.skipped.items()
    }
    for name in ("suspects", "readmitted", "repeated"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist()
    assert (after.weights is None) == (before.weights is None)
    assert after.weights is None or after.weights.tobytes() == before.weights.tobytes()
    assert (after.epoch, after.notes) == (before.epoch, before.notes)


# An epoch that follows memory


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("broken", [0, 20])
def test_an_epoch_that_is_chosen_again_keeps_what_was_done_and_its_length(world, broken):
    before, law = trained(333, broken=broken), CurriculumConfig(("acmds",), rows_per_batch=5, acmds_fraction=0.5)
    old = planned(["acmds"], 333, world, snapshot=before, rows_per_batch=5, acmds_fraction=0.5)
    overdue = np.flatnonzero((before.last_epoch <= 4 - law.window_epochs) & ~before.quarantined)
    for done in range(0, old.micro_batches, world):
        now = replace(before, availability=0.1)
        new = reselected_plan(old, done, law, now, 10, some_lengths(333), seed=0)
        delivered = int(old.batches.ends[done - 1]) if done else 0
        assert new.batches.order[:delivered].tolist() == old.batches.order[:delivered].tolist()
        assert new.batches.ends.tolist() == old.batches.ends.tolist()
        assert np.unique(new.batches.order).size == old.batches.order.size, "no row twice"
        assert sorted([*new.batches.order, *new.skipped["acmds"]]) == sorted(
            [*old.batches.order, *old.skipped["acmds"]]
        )
        assert np.isin(overdue, new.batches.order).all()
        assert new.skipped["quarantined"].tolist() == old.skipped["quarantined"].tolist()


def test_less_memory_makes_the_rest_of_an_epoch_easier():
    before = trained(800)
    old = planned(["acmds"], 800, snapshot=before, acmds_fraction=0.4)
    law = CurriculumConfig(("acmds",), rows_per_batch=8, acmds_fraction=0.4)
    scores = {
        free: before.scores[
            reselected_plan(old, 10, law, replace(before, availability=free), 10, some_lengths(800), 0).batches.order[
                80:
            ]
        ]
        for free in (0.1, 0.5, 1.0)
    }
    easier, same, harder = (np.nanmean(found) for found in scores.values())
    assert easier < same < harder


@pytest.mark.parametrize("methods", [(), ("infobatch",), ("token_budget", "acmds")])
def test_there_is_nothing_to_choose_again_for_other_methods(methods):
    old = planned(methods)
    law = CurriculumConfig(methods, rows_per_batch=8)
    assert reselected_plan(old, 3, law, trained(200), 10, some_lengths(200), 0) is old
