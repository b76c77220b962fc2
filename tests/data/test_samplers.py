"""The curriculum as a batch sampler: epochs over ranks and workers, its state, what it refuses."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from dataclasses import replace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from scu_trainer.data.samplers import CurriculumSampler
from scu_trainer.errors import CheckpointError, DataError
from scu_trainer.settings import CurriculumSettings

LENGTHS = 4 + numpy.arange(30) * 7 % 23
METHODS = [
    "none",
    "token_budget",
    "noise_guard",
    "acmds",
    "infobatch",
    "length_warmup",
    "token_budget+noise_guard+infobatch",
]


def sampler(methods="none", rank=0, world=1, rows=4, lengths=LENGTHS, seed=3, **options) -> CurriculumSampler:
    settings = CurriculumSettings(methods, **options)
    return CurriculumSampler(lengths, settings, rows_per_batch=rows, epochs=5, seed=seed, rank=rank, world=world)


def loss_of(ids: numpy.ndarray, epoch: int) -> numpy.ndarray:
    return 1 + ids * 13 % 17 / 10 + 20.0 * (ids % 11 == 0) - epoch / 10


def passed(subject: CurriculumSampler, epochs: int) -> CurriculumSampler:
    """The sampler after so many epochs, at the beginning of the next."""
    for epoch in range(epochs):
        for ids in subject.plan(epoch).batches:
            subject.update(ids, loss_of(ids, epoch), epoch)
    subject.set_epoch(epochs)
    return subject


def same_plan(one, other) -> bool:
    def arrays(plan):
        return plan.batches.order, plan.batches.ends, plan.suspects, 1.0 if plan.weights is None else plan.weights

    return all(map(numpy.array_equal, arrays(one), arrays(other)))


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_an_epoch_and_take_equally_many_batches(methods, world):
    ranks = [passed(sampler(methods, rank, world), 3) for rank in range(world)]
    batches = [list(rank) for rank in ranks]
    assert len({len(own) for own in batches}) == 1
    rows = sorted(row for own in batches for batch in own for row in batch)
    plan = ranks[0].current
    assert rows == sorted(plan.batches.order.tolist())
    skipped = numpy.concatenate([numpy.zeros(0, int), *plan.skipped.values()])
    assert sorted([*rows, *skipped.tolist()]) == list(range(30)), "a row is neither seen nor said to be skipped"


def test_uniform_is_the_order_of_the_stock_trainer():
    subject = sampler()
    for epoch in (0, 4):
        subject.set_epoch(epoch)
        order = torch.randperm(30, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        assert list(subject) == [order[start : start + 4] for start in range(0, 30, 4)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_length_is_that_of_a_full_epoch(world):
    subject = passed(sampler("acmds", world=world), 4)
    assert len(subject) == 8 // world > len(list(subject))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_the_plan(workers):
    subject = passed(sampler("token_budget+infobatch"), 2)
    loader = DataLoader(list(range(30)), batch_sampler=subject, num_workers=workers, collate_fn=list)
    assert [numpy.array(batch).tolist() for batch in loader] == [ids.tolist() for ids in subject.current.batches]


def test_a_plan_does_not_change_when_losses_come_in():
    subject = passed(sampler("noise_guard"), 2)
    before = list(subject)
    subject.update(numpy.arange(30), numpy.linspace(9, 1, 30), 2)
    subject.set_epoch(2)
    assert list(subject) == before


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("methods", METHODS)
def test_a_sampler_goes_on_from_its_state_bit_for_bit(methods):
    """Also when the losses that came in since the plan was made would give another plan."""
    whole = passed(sampler(methods), 3)
    first = whole.current.batches[0]
    whole.update(first, loss_of(first, 3) + 5, 3)
    state, arrays = whole.state_dict()
    resumed = sampler(methods)
    notices = resumed.load_state_dict(json.loads(json.dumps(state)), arrays, done=1)
    assert notices == []
    assert same_plan(resumed.current, whole.current)
    for name, array in whole.difficulty.state_dict().items():
        numpy.testing.assert_array_equal(resumed.difficulty.state_dict()[name], array)
    assert same_plan(resumed.plan(4), whole.plan(4))


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize(("world", "rows"), [(2, 4), (1, 3), (3, 5)])
@pytest.mark.parametrize("done", [0, 2])
def test_other_ranks_or_batches_finish_the_epoch_with_every_row_once(methods, world, rows, done):
    whole = passed(sampler(methods), 3)
    seen = [row for batch in list(whole)[:done] for row in batch]
    resumed = [sampler(methods, rank, world, rows) for rank in range(world)]
    for subject in resumed:
        state, arrays = whole.state_dict()
        changed, cut = subject.load_state_dict(state, arrays, done)
        assert ("processes 1 -> " in changed) == (world > 1) and (f"rows_per_batch 4 -> {rows}" in changed) == (
            rows != 4
        )
        assert (
            f"the {whole.current.rows - len(seen)} rows that epoch 4 has not used yet are divided into new "
            "micro-batches" in cut
        )
    rest = [row for subject in resumed for batch in subject for row in batch]
    assert sorted(seen + rest) == sorted(whole.current.batches.order.tolist())


def test_what_was_cut_again_can_be_saved_and_loaded_again():
    whole = passed(sampler("infobatch"), 2)
    second = sampler("infobatch", rows=3)
    second.load_state_dict(*whole.state_dict(), done=2)
    third = sampler("infobatch", rows=3)
    assert third.load_state_dict(*second.state_dict(), done=1) == []
    assert same_plan(third.current, second.current)
    fourth = sampler("infobatch", rows=2)
    fourth.load_state_dict(*second.state_dict(), done=1)
    seen = [row for batch in list(whole)[:2] for row in batch] + next(iter(second))
    rest = [row for batch in fourth for row in batch]
    assert sorted(seen + rest) == sorted(whole.current.batches.order.tolist())


def test_what_the_model_told_of_its_classes_is_part_of_the_state():
    whole = sampler("noise_guard")
    whole.config = replace(whole.config, classes=3)
    resumed = sampler("noise_guard")
    assert resumed.load_state_dict(*passed(whole, 2).state_dict(), done=0) == []
    assert resumed.config.classes == 3


@pytest.mark.parametrize("lengths", [LENGTHS[:-1], LENGTHS + (numpy.arange(30) == 8)])
def test_other_data_are_refused(lengths):
    state = passed(sampler(), 1).state_dict()
    with pytest.raises(CheckpointError, match=f"written with 30 training rows, now there are {len(lengths)}"):
        sampler(lengths=lengths).load_state_dict(*state, done=0)


# -- small data --------------------------------------------------------------------------------------------------------


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="the training dataset is empty"):
        sampler(lengths=[])


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("world", [1, 3])
def test_one_sample_is_enough(methods, world):
    subject = passed(sampler(methods, lengths=[5], world=world), 3)
    assert [list(sampler(methods, rank, world, lengths=[5])) for rank in range(world)] == [[[0]]] * world
    assert subject.current.micro_batches == world and len(subject.current.repeated) == world - 1


@pytest.mark.parametrize("methods", METHODS)
def test_equal_losses_leave_something_to_train_on(methods):
    subject = sampler(methods)
    for epoch in range(5):
        for ids in subject.plan(epoch).batches:
            subject.update(ids, numpy.full(len(ids), 2.0), epoch)
    assert 0 < subject.current.rows <= 30


def test_quarantined_rows_are_out_and_none_left_is_said():
    subject = passed(sampler(), 1)
    subject.update(numpy.array([4, 9]), numpy.array([numpy.nan, numpy.inf]), 1)
    subject.set_epoch(2)
    assert sorted(subject.current.batches.order.tolist()) == [row for row in range(30) if row not in (4, 9)]
    assert subject.report()["quarantined"] == 2 and subject.report()["skipped"]["quarantined"] == 2
    subject.update(numpy.arange(30), numpy.full(30, numpy.nan), 2)
    with pytest.raises(DataError, match=r"epoch 3 has nothing to train on: .* all 30 had a loss that is not"):
        subject.set_epoch(3)


def test_the_report_counts():
    subject = passed(sampler("noise_guard+infobatch"), 3)
    report, plan = subject.report(), subject.current
    assert report["samples"] == 30
    assert sum(report["skipped"].values()) == 30 - plan.rows
    used = plan.weights[plan.batches.order]
    assert report["weights"] == {"min": 1.0, "max": 2.0, "mean": pytest.approx(used.mean())}
    assert report["suspects"] == len(plan.suspects) and report["unseen"] == report["stale"] == 0
    scores = subject.difficulty.scores
    assert report["difficulty"]["p50"] == pytest.approx(numpy.median(scores))
    assert (report["difficulty"]["p0"], report["difficulty"]["p100"]) == (scores.min(), scores.max())
    json.dumps(report, allow_nan=False)


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_sample_takes_few_bytes():
    """Nothing of Python's own per sample or per batch: lengths, losses and order as arrays."""
    samples = 200_000
    lengths = numpy.full(samples, 7, dtype=numpy.int32)
    tracemalloc.start()
    try:
        subject = sampler(lengths=lengths, rows=8)
        first = next(iter(subject))
        held, peak = (size / samples for size in tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        state, arrays = subject.live_state()
        _, saving = (size / samples for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert len(first) == 8
    assert subject.current.batches.order.dtype == numpy.int32
    assert held < 24 and peak < 32 and saving < 26
    assert sum(array.nbytes for array in arrays.values()) / samples < 23
    assert state["lengths_crc32"] == zlib.crc32(lengths.astype(numpy.int64).tobytes())


def test_a_state_taken_earlier_is_gone_back_to():
    subject = passed(sampler(), 1)
    state, arrays = subject.state_dict()
    before = subject.difficulty.scores.copy()
    subject.update(numpy.arange(4), numpy.full(4, 99.0), 1)
    assert not numpy.array_equal(subject.difficulty.scores, before, equal_nan=True)
    subject.load_state_dict(state, arrays, done=0)
    assert numpy.array_equal(subject.difficulty.scores, before, equal_nan=True)


def test_a_checkpoint_from_before_labels_were_left_out_is_read():
    whole = passed(sampler(), 1)
    state, arrays = whole.state_dict()
    older = {name: array.astype(numpy.int64) if name == "plan.order" else array for name, array in arrays.items()}
    older["difficulty.labels"] = numpy.full(len(LENGTHS), -1, dtype=numpy.int32)
    resumed = sampler()
    assert resumed.load_state_dict(json.loads(json.dumps(state)), older, done=1) == []
    assert same_plan(resumed.current, whole.current) and same_plan(resumed.plan(2), whole.plan(2))
