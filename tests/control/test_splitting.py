"""Cutting a pool of rows: bounds, order, padding, and the best cut among all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from scu_trainer.control import splitting
from scu_trainer.control.splitting import (
    MICRO_BATCH_COST_SHARE,
    MicroBatchPlan,
    auto_cap,
    cut,
    cut_unpadded,
    rounded_up_size,
)

POOL = [3, 8, 3, 2, 8, 3, 20]  # rows by length: 3 | 0 2 5 | 1 4 | 6


def rows_of(planned: list[MicroBatchPlan]) -> list[tuple[int, ...]]:
    return [plan.rows for plan in planned]


def lognormal_lengths(chance: random.Random, median: float, sigma: float, count: int = 64) -> list[int]:
    return [max(1, round(chance.lognormvariate(math.log(median), sigma))) for _ in range(count)]


def every_cut(count: int):
    """All ways to cut ``count`` sorted rows: lists of ends."""
    for kept in itertools.product((False, True), repeat=count - 1):
        yield [i + 1 for i, cut_here in enumerate(kept) if cut_here] + [count]


def price(ascending: list[int], ends: list[int], micro_batch_cost: int) -> int:
    starts = [0, *ends[:-1]]
    return sum((end - start) * ascending[end - 1] + micro_batch_cost for start, end in zip(starts, ends, strict=True))


def test_a_chunk_counts_its_padding():
    plan = MicroBatchPlan((4, 1, 6), 5)
    assert (plan.tokens, plan.quadratic) == (15, 75)


def test_rows_come_by_length_then_position():
    assert rows_of(cut(POOL, 16)) == [(3, 0, 2, 5), (1, 4), (6,)]
    assert [plan.length for plan in cut(POOL, 16)] == [3, 8, 20]
    assert rows_of(cut([5] * 6, 15)) == [(0, 1, 2), (3, 4, 5)]


def test_a_row_longer_than_the_cap_stands_alone():
    assert rows_of(cut([30, 1, 40, 30], 8)) == [(1,), (0,), (3,), (2,)]


def test_without_a_cap_there_are_as_few_chunks_as_the_rows_allow():
    assert rows_of(cut([5, 900, 4], None)) == [(2, 0, 1)]
    assert rows_of(cut([9, 1, 9, 1, 9], None, max_rows=3)) == [(1, 3), (0, 2, 4)]
    assert cut([], None) == cut([], 10) == []


def test_max_rows_bounds_short_rows():
    assert rows_of(cut([1] * 5, 1000, max_rows=2)) == [(0, 1), (2, 3), (4,)]


def test_a_row_without_tokens_still_takes_one():
    assert cut([0, 0], 2) == [MicroBatchPlan((0, 1), 1)]


@pytest.mark.parametrize(
    ("lengths", "cap", "max_rows", "min_rows", "sizes"),
    [
        ([10] * 7, 20, None, 3, [3, 4]),  # 3 rows exceed the cap already; no tail of one
        ([10] * 6, 20, None, 3, [3, 3]),
        ([10] * 7, 40, None, 3, [3, 4]),
        ([10] * 9, None, 4, 3, [3, 3, 3]),  # as full as can be would be 4, 4 and a tail of one
        ([10] * 11, None, 5, 3, [3, 3, 5]),
        ([10] * 7, None, 3, 3, [3, 4]),  # no cut within 3 to 3 rows exists
        ([10] * 2, 10, None, 3, [2]),  # the pool has no 3 rows
        ([], 10, None, 3, []),
    ],
)
def test_no_chunk_is_smaller_than_min_rows(lengths, cap, max_rows, min_rows, sizes):
    assert sorted(len(plan.rows) for plan in cut(lengths, cap, max_rows, min_rows)) == sizes


@pytest.mark.parametrize("way", [cut, cut_unpadded])
@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_for_any_pool(way, seed):
    chance = random.Random(seed)
    lengths = lognormal_lengths(chance, 50, 1.0, chance.randint(1, 90))
    cap, min_rows = chance.choice([None, 30, 200, 2000]), chance.choice([1, 1, 2, 5])
    max_rows = chance.choice([None, min_rows, 2 * min_rows, 12])
    planned = way(lengths, cap, max_rows, min_rows)
    assert sorted(row for plan in planned for row in plan.rows) == list(range(len(lengths)))
    assert [plan.length for plan in planned] == sorted(plan.length for plan in planned)
    divisible = max_rows is None or math.ceil(len(lengths) / max_rows) * min_rows <= len(lengths)
    unpadded = [sum(max(1, lengths[row]) for row in plan.rows) for plan in planned]
    tokens = [plan.tokens for plan in planned] if way is cut else unpadded
    for plan, own in zip(planned, tokens, strict=True):
        rows = len(plan.rows)
        assert plan.length == max(lengths[row] for row in plan.rows)
        assert rows >= min(min_rows, len(lengths))
        assert not divisible or max_rows is None or rows <= max_rows
        assert cap is None or own <= cap or rows < 2 * min_rows
    if way is cut_unpadded and min_rows == 1:  # the first row of the next would not fit
        for (one, own), (other, _) in itertools.pairwise(zip(planned, tokens, strict=True)):
            is_full = max_rows is not None and len(one.rows) == max_rows
            assert is_full or (cap is not None and own + max(1, lengths[other.rows[0]]) > cap)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_cheaper(seed):
    chance = random.Random(seed)
    lengths = sorted(chance.choices(range(1, 12), k=chance.randint(1, 10)))
    cap, max_rows = chance.choice([12, 20, 40, 64]), chance.choice([None, 3, 5])
    micro_batch_cost = max(1, int(cap * MICRO_BATCH_COST_SHARE))

    def allowed(ends: list[int]) -> bool:
        return all(
            end - start == 1 or ((end - start) * lengths[end - 1] <= cap and end - start <= (max_rows or 99))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )

    best = min(price(lengths, ends, micro_batch_cost) for ends in every_cut(len(lengths)) if allowed(ends))
    found = list(itertools.accumulate(len(plan.rows) for plan in cut(lengths, cap, max_rows)))
    assert allowed(found)
    assert price(lengths, found, micro_batch_cost) == best


@pytest.mark.parametrize(
    ("median", "sigma", "most_micro_batches"),
    [(100, 0.6, 13), (400, 0.9, 20), (250, 1.2, 16)],
    ids=["short", "chat", "heavy"],
)
@pytest.mark.parametrize("seed", range(3))
def test_little_is_padding_when_lengths_are_long_tailed(median, sigma, most_micro_batches, seed):
    """64 rows per step, 100 steps, cap = the longest row, at least 1024."""
    chance, processed, real, micro_batch_count = random.Random(seed), 0, 0, 0
    for _ in range(100):
        lengths = lognormal_lengths(chance, median, sigma)
        planned = cut(lengths, max(1024, *lengths))
        padded = sum(plan.tokens for plan in planned)
        assert padded <= 1.15 * sum(lengths)
        processed += padded
        real += sum(lengths)
        micro_batch_count += len(planned)
    assert processed / real <= 1.07
    assert micro_batch_count / 100 <= most_micro_batches, (
        "fewer padded tokens must not be bought with a micro-batch per row"
    )


def test_a_pool_of_thousands_asks_for_a_bounded_number_of_comparisons(monkeypatch):
    """Counted, not timed: the worst pool for a plain search is many short rows under a large cap."""

    tried, possible = [], splitting._possible_ends

    def counting(*arguments):
        for end in possible(*arguments):
            tried.append(end)
            yield end

    monkeypatch.setattr(splitting, "_possible_ends", counting)
    chance = random.Random(0)
    cut(lognormal_lengths(chance, 20, 0.6, 4000), 16384)
    assert len(tried) <= 4000 * math.isqrt(16384)


def test_rounded_up_size():
    assert [rounded_up_size(tokens) for tokens in (1, 8, 9, 100, 250, 500, 3000)] == [8, 8, 16, 104, 256, 512, 3072]
    rounded = {tokens: rounded_up_size(tokens) for tokens in range(1, 8192)}
    assert all(tokens <= size <= max(tokens + 7, tokens * 17 / 16) for tokens, size in rounded.items())
    assert len(set(rounded.values())) == 16 + 6 * 16, "every eighth up to 128, then 16 for each doubling"
    assert [rounded_up_size(tokens, 11) for tokens in (7, 9, 11, 12)] == [8, 11, 11, 16], (
        "what is above the most is so anyway"
    )


def test_auto_cap():
    assert auto_cap(300, 4096, 8 * 300) == 2400, "never more than the batch that was asked for"
    assert auto_cap(300, 1024, 8 * 300) == 1024, "no more than keeps the device busy"
    assert auto_cap(3000, 1024, 2400) == 3000, "but the longest row must fit"


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"token_cap": 0}, "token_cap is 0"),
        ({"token_cap": 5, "max_rows": 0}, "max_rows is 0"),
        ({"token_cap": 5, "min_rows": 0}, "min_rows is 0"),
        ({"token_cap": 5, "max_rows": 2, "min_rows": 3}, "max_rows 2 is below min_rows 3"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        cut([1, 2], **bounds)
