"""Buffers are put back whenever they begin to change, and however: in the very step that has to run again."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery import snapshot
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers
from tests import tiny
from tests.faults import fail_in_backward, oom
from tests.train.test_recovery import faulty_and_replayed, same_steps

LATE_STEP = 3
MICRO_BATCHES_PER_STEP = 2


class Late(nn.Module):
    """A classifier whose loss depends on a buffer that its forward changes from step ``LATE_STEP`` on."""

    main_input_name = "pixel_values"

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.now = how, 1
        self.head = nn.Linear(3 * 8 * 8, 3)
        self.register_buffer("shift", torch.zeros(3))
        if how == "by batch_norm":
            self.norm = nn.BatchNorm1d(3, track_running_stats=True)
            self.norm.train(False)

    def forward(self, pixel_values, labels):
        logits = self.head(pixel_values.flatten(1)) + self.shift
        if self.training and self.now >= LATE_STEP:
            self._change(logits.detach().mean(dim=0))
        if hasattr(self, "seen"):
            logits = logits + 0.1 * self.seen
        return {"loss": nn.functional.cross_entropy(logits, labels)}

    def _change(self, mean: torch.Tensor) -> None:
        if self.how == "in place":
            self.shift.add_(mean)
        elif self.how == "without counting":
            self.shift.data.add_(mean)
        elif self.how == "another tensor":
            self.shift = self.shift + mean
        elif self.how == "a new name":
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(3))
            self.seen.add_(mean)
        elif self.how == "a new size":
            self.shift = torch.cat([self.shift, mean])[-3:] + mean
        elif self.how == "by batch_norm":
            self.norm.train()
            self.norm(torch.stack([mean, mean + 1]))
            self.shift.copy_(self.norm.running_mean)


class Clock(TrainerCallback):
    """The module learns which step it is: replays call its forward more often."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.now = state.global_step + 1


def faulty(folder, how: str, call: int):
    """Backward number ``call`` fails; the recorders of that run and of the same micro-batches without a fault."""

    def fault(trainer, stack) -> None:
        stack.enter_context(fail_in_backward(trainer.model.head.weight, call))

    changes = {"per_device_train_batch_size": 4, "callbacks": [Clock()]}
    return faulty_and_replayed(functools.partial(Late, how), tiny.images(), folder, fault, **changes)


HOWS = ["in place", "without counting", "another tensor", "a new name", "a new size", "by batch_norm"]


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("how", HOWS)
def test_a_buffer_that_begins_to_change_in_the_step_that_fails(tmp_path, how, batch):
    """The first batch of the step touches gradients only of its own; the second makes the window run again."""
    found, expected = faulty(tmp_path, how, MICRO_BATCHES_PER_STEP * (LATE_STEP - 1) + batch)
    assert same_steps(found, expected)
    assert all(tiny.same(*pair) for pair in zip(found.buffers, expected.buffers, strict=True))
    assert any(float(buffer.abs().max()) > 0 for buffer in found.buffers[-1].values())


@pytest.mark.parametrize("how", HOWS)
def test_without_the_copies_it_would_be_seen(tmp_path, monkeypatch, how):
    monkeypatch.setattr(ChangingBuffers, "restore", lambda self, kept: None)
    found, expected = faulty(tmp_path, how, MICRO_BATCHES_PER_STEP * (LATE_STEP - 1) + 1)
    buffers_are_same = all(tiny.same(*pair) for pair in zip(found.buffers, expected.buffers, strict=True))
    assert not (same_steps(found, expected) and buffers_are_same)


# -- larger than what is copied ----------------------------------------------------------------------------------------


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 0)


def test_a_large_buffer_that_begins_to_change_in_the_step_that_fails_is_named(tmp_path, all_are_large):
    with pytest.raises(OutOfMemory, match=r"buffer shift \(.* MiB\) first changed.*resume_from_checkpoint"):
        faulty(tmp_path, "in place", MICRO_BATCHES_PER_STEP * (LATE_STEP - 1))


def test_a_large_buffer_that_another_tensor_takes_the_place_of_is_put_back(tmp_path, all_are_large):
    found, expected = faulty(tmp_path, "another tensor", MICRO_BATCHES_PER_STEP * (LATE_STEP - 1))
    assert same_steps(found, expected)


def test_a_large_buffer_that_changes_from_the_first_step_on_is_put_back(tmp_path, all_are_large, monkeypatch):
    monkeypatch.setitem(globals(), "LATE_STEP", 1)
    for call in (0, 1, 3):
        found, expected = faulty(tmp_path / str(call), "in place", call)
        assert same_steps(found, expected)
        assert all(tiny.same(*pair) for pair in zip(found.buffers, expected.buffers, strict=True))


class Table(nn.Module):
    """A constant table and a counter, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.counter = nn.Module(), nn.Module()
        self.table.register_buffer("codes", torch.arange(2000.0))
        self.counter.register_buffer("seen", torch.zeros(1))


def test_large_constant_buffers_are_copied_in_the_first_window_only(monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 1000)
    model = Table()
    buffers = ChangingBuffers(model)
    with caplog.at_level(logging.INFO, "scu_trainer"):
        copied = []
        for _ in range(3):
            kept = buffers.copies()
            copied.append([one.name for one in kept.buffers if one.copy is not None])
            assert buffers.copies().buffers[0].copy is kept.buffers[0].copy, "one copy for as long as it is constant"
            model.counter.seen.add_(1)
            buffers.end_window()
    assert copied == [["codes", "seen"], ["seen"], ["seen"]]
    assert caplog.text.count("table.codes") == 1
    model.table.codes.add_(1)
    buffers.copies()
    model.table.codes.add_(1)
    buffers.end_window()
    kept = buffers.copies()
    assert all(one.copy is not None for one in kept.buffers), "it has been seen to change"
    model.table.codes.zero_()
    buffers.restore(kept)
    assert torch.equal(model.table.codes, torch.arange(2000.0) + 2)


def test_a_large_buffer_that_cannot_be_copied_in_the_first_window_is_left_out(monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 1000)
    model = Table()
    buffers = ChangingBuffers(model)

    def full(tensor):
        raise oom()

    monkeypatch.setattr(torch.Tensor, "clone", full)
    assert snapshot._clone_if_it_fits(model.table.codes) is None
    monkeypatch.undo()
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 1000)
    monkeypatch.setattr(snapshot, "_clone_if_it_fits", lambda buffer: None)
    kept = buffers.copies()
    assert [one.copy is None for one in kept.buffers] == [True, False]
    buffers.restore(kept)
    model.table.codes.add_(1)
    with pytest.raises(OutOfMemory, match=r"table\.codes"):
        buffers.restore(kept)


def test_the_walk_finds_what_modules_finds_in_its_order():
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(torch.nn.ReLU(), shared), torch.nn.BatchNorm1d(2))
    model[1].register_module("none", None)
    assert snapshot._all_modules(model) == list(model.modules())
