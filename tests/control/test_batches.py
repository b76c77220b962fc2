"""Cutting rows into micro-batches: every row once, within the budget, as many as the ranks need."""

from __future__ import annotations

import numpy as np
import pytest

from scu_trainer.control.batches import Batches, for_ranks, token_budget, uniform


def lists(batches: Batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def padded_tokens(batches: Batches, lengths: np.ndarray) -> np.ndarray:
    return np.array([batch.size * lengths[batch].max() for batch in batches])


def lognormal(rows: int, sigma: float, seed: int = 0) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(seed).lognormal(np.log(100), sigma, rows)).astype(np.int64)


def filled(
    lengths: np.ndarray, budget_tokens: int | None, pool_rows: int = 1600, seed: int = 0, rows_per_batch: int = 16
) -> Batches:
    rng = np.random.default_rng(seed)
    return token_budget(rng.permutation(lengths.size), lengths, budget_tokens, rows_per_batch, pool_rows, rng)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 400, 1714])
def test_without_a_budget_there_are_as_many_micro_batches_as_uniform_makes(rows):
    lengths = lognormal(rows, 0.6)
    batches = filled(lengths, None)
    assert len(batches) <= len(uniform(np.arange(rows), 16)) <= len(batches) + 1
    assert sorted(batches.order.tolist()) == list(range(rows))
    if rows >= 400:
        tokens = padded_tokens(batches, lengths)
        assert tokens.sum() <= (1.06 if rows == 400 else 1.03) * lengths.sum()
        assert tokens.max() <= 1.25 * tokens.mean()


def test_uniform_cuts_the_order_as_it_is():
    assert lists(uniform(np.array([4, 2, 0, 1, 3]), 2)) == [[4, 2], [0, 1], [3]]
    assert lists(uniform(np.array([4, 2]), 2)) == [[4, 2]]
    assert lists(uniform(np.array([4, 2]), 5)) == [[4, 2]]


def test_the_last_batch_gets_rows_where_it_would_have_too_few():
    assert lists(uniform(np.arange(7), 3, fewest_rows=2)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert lists(uniform(np.arange(8), 3, fewest_rows=2)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert lists(uniform(np.arange(1), 3, fewest_rows=2)) == [[0]]
    assert lists(uniform(np.arange(3), 2, fewest_rows=2)) == [[0, 1], [2]]


def test_no_rows_are_refused_with_a_plain_sentence():
    nothing = np.array([], dtype=np.int64)
    for cut in (
        lambda: uniform(nothing, 2),
        lambda: token_budget(nothing, nothing, 10, 2, 4, np.random.default_rng(0)),
        lambda: for_ranks(Batches(nothing, nothing), 2),
    ):
        with pytest.raises(ValueError, match="there are no rows to make a micro-batch from"):
            cut()


def test_token_budget_by_hand():
    lengths = np.array([5, 10, 4, 2, 2, 30, 9])
    batches = filled(lengths, budget_tokens=20)
    assert sorted(sorted(batch) for batch in lists(batches)) == [[0, 2, 3, 4], [1, 6], [5]]


@pytest.mark.parametrize("seed", range(8))
def test_token_budget_holds_every_row_once_and_keeps_to_the_budget(seed):
    rng = np.random.default_rng(seed)
    lengths = lognormal(int(rng.integers(1, 700)), 1.0, seed)
    budget = int(rng.integers(1, 3000))
    batches = filled(lengths, budget, pool_rows=int(rng.integers(1, 300)), seed=seed)
    assert sorted(batches.order.tolist()) == list(range(lengths.size))
    assert batches.sizes.min() >= 1
    several = batches.sizes > 1
    assert (padded_tokens(batches, lengths)[several] <= budget).all()


@pytest.mark.parametrize(("sigma", "spread"), [(0.3, 0.05), (0.6, 0.08), (0.9, 0.13), (1.2, 0.27)])
def test_little_is_padded_and_batches_are_nearly_equal(sigma, spread):
    lengths = lognormal(20_000, sigma)
    batches = filled(lengths, round(lengths.mean() * 16))
    real = np.array([lengths[batch].sum() for batch in batches])
    assert padded_tokens(batches, lengths).sum() <= 1.03 * lengths.sum()
    assert real.std() <= spread * real.mean()


def test_no_micro_batch_of_a_pool_is_a_crumb():
    lengths = np.full(105, 10)
    sizes = filled(lengths, budget_tokens=100).sizes
    assert sizes.size == 11
    assert sizes.min() >= 5
    assert filled(np.full(101, 10), budget_tokens=1000).sizes.tolist() in ([51, 50], [50, 51])


def test_rows_of_equal_length_are_as_many_per_batch_as_the_budget_holds():
    assert filled(np.full(40, 7), budget_tokens=70).sizes.tolist() == [10, 10, 10, 10]


def test_a_row_longer_than_the_budget_stands_alone():
    lengths = np.array([10] * 20 + [5000])
    batches = filled(lengths, budget_tokens=100)
    assert [20] in lists(batches)
    assert sorted(batches.order.tolist()) == list(range(21))


def test_rows_without_a_token_are_counted_as_one():
    assert filled(np.zeros(6, dtype=np.int64), budget_tokens=3).sizes.tolist() == [3, 3]


def test_micro_batches_are_shuffled_and_mixed_again_by_another_seed():
    lengths = lognormal(2000, 0.6)
    first, again, other = (filled(lengths, 1600, pool_rows=400, seed=seed) for seed in (1, 1, 2))
    assert first.order.tobytes() == again.order.tobytes()
    assert first.ends.tobytes() == again.ends.tobytes()
    assert {frozenset(batch) for batch in lists(first)} != {frozenset(batch) for batch in lists(other)}
    one_pool = filled(lengths, 1600, pool_rows=2000)
    longest = np.array([lengths[batch].max() for batch in one_pool])
    assert abs(np.corrcoef(longest, np.arange(longest.size))[0, 1]) < 0.3


def test_rows_of_a_micro_batch_come_from_one_pool():
    rows = np.arange(2000)
    batches = token_budget(rows, lognormal(2000, 0.6), 1600, 16, 400, np.random.default_rng(0))
    assert all(np.unique(batch // 400).size == 1 for batch in batches)


def test_enough_micro_batches_stay_as_they_are():
    batches = uniform(np.arange(8), 2)
    dealt, repeated = for_ranks(batches, 2)
    assert lists(dealt) == lists(batches)
    assert repeated.size == 0


def test_the_last_of_the_largest_is_cut_in_two():
    dealt, repeated = for_ranks(uniform(np.arange(10), 4), 2)
    assert lists(dealt) == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9]]
    assert repeated.size == 0


def test_one_micro_batch_is_dealt_to_all_ranks():
    dealt, repeated = for_ranks(uniform(np.arange(8), 100), 8)
    assert lists(dealt) == [[row] for row in range(8)]
    assert repeated.size == 0


def test_rows_repeat_only_where_there_are_too_few():
    dealt, repeated = for_ranks(uniform(np.array([7, 9, 8]), 2), 8)
    assert lists(dealt) == [[7], [9], [8], [7], [9], [8], [7], [9]]
    assert repeated.tolist() == [7, 9, 8, 7, 9]
    dealt, repeated = for_ranks(uniform(np.arange(5), 1), 4)
    assert lists(dealt) == [[0], [1], [2], [3], [4], [0], [1], [2]]
    assert repeated.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_ranks_gets_equally_many_and_no_row_twice(seed):
    rng = np.random.default_rng(seed)
    rows, multiple = int(rng.integers(1, 200)), int(rng.integers(1, 17))
    batches = uniform(rng.permutation(rows), int(rng.integers(1, 20)))
    dealt, repeated = for_ranks(batches, multiple)
    needed = -(-len(batches) // multiple) * multiple
    assert len(dealt) == needed
    assert dealt.sizes.min() >= 1
    assert dealt.sizes.sum() == dealt.order.size == rows + repeated.size
    assert repeated.size == max(0, needed - rows)
    assert dealt.order[:rows].tolist() == batches.order.tolist()
