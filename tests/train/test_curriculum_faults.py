"""Rows whose loss is not finite, data that hardly exist, and memory that runs out, under a curriculum."""

from __future__ import annotations

import contextlib
import math

import numpy
import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from scu_trainer.errors import DataError, NonFiniteLoss
from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loss.loss_path import LossPath
from tests.faults import FakeGauge, fail_in_backward, fail_in_forward, is_training
from tests.tiny import Examples, UnevenRows, bert, images, labelled, llama, pairs, same, t5, weights_of
from tests.train.curricula import NAN_TOKEN, SGD, PoisonedRows, Watched, curriculum_run, poisoned
from tests.train.stepwise import ENDLESS_BYTES, error_of
from tests.train.test_loss_path import CHUNKED, batch_of, class_losses, learned, token_sums, with_weights

PATHS = {"stock": None, "chunked": CHUNKED, "memory": MemorySettings(token_cap=16)}
METHODS = ["none", "token_budget", "noise_guard", "acmds", "infobatch", "length_warmup"]


def row_at(place: int, rows: int = 12) -> int:
    """The row that an epoch's order has at this place."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()[place]


def assert_set_aside(trainer, folder, caplog, bad: list[int]) -> None:
    assert trainer.difficulty.quarantined.nonzero()[0].tolist() == sorted(bad)
    assert not trainer.difficulty.observations[bad].any()
    later = [row for epoch in trainer.plans if epoch for row in trainer.rows_of(epoch)]
    assert later and not set(later) & set(bad)
    for row in bad:
        assert "the loss of sample" in caplog.text and f"{row}" in caplog.text
    statistics = read_rows(folder / "curriculum.json")
    assert [row["quarantined"] for row in statistics] == [len(bad)] * len(statistics)
    assert [row["skipped"]["quarantined"] for row in statistics] == [0] + [len(bad)] * (len(statistics) - 1)
    assert trainer.curriculum.figures()["curriculum"]["quarantined"] == len(bad)
    for weights in trainer.recorder.weights:
        assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", [0, 5, 11], ids=["first batch", "middle", "last batch"])
def test_a_row_without_a_finite_loss_is_set_aside_and_said(tmp_path, caplog, path, place):
    bad = row_at(place)
    data = PoisonedRows(12, [bad])
    trainer = curriculum_run(
        tmp_path, "none", model=poisoned(llama(layers=1)), data=data, memory=PATHS[path], logging_steps=1, **SGD
    )
    assert_set_aside(trainer, tmp_path, caplog, [bad])
    step = place // 4
    _, batches = trainer.planned_steps()[step]
    model = llama(layers=1)
    if step:
        with_weights(model, trainer.recorder.weights[step - 1])
    every = batch_of(data, torch.cat(batches))
    others = batch_of(data, [row for row in torch.cat(batches).tolist() if row != bad])
    (token_sums(model, others).sum() / learned(every).sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert error_of(trainer.recorder.gradients[step], expected) < 1e-4
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("path", ["stock", "memory"])
def test_a_mean_over_rows_is_taken_over_the_others(tmp_path, caplog, path):
    bad, data = row_at(1), labelled(12)
    data.rows[bad]["input_ids"][0] = NAN_TOKEN
    model = poisoned(bert(BertForSequenceClassification))
    changes = {**SGD, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    memory = None if path == "stock" else MemorySettings()
    trainer = curriculum_run(tmp_path, "none", model=model, data=data, memory=memory, **changes)
    assert_set_aside(trainer, tmp_path, caplog, [bad])
    model = bert(BertForSequenceClassification)
    others = [row for row in trainer.planned_steps()[0][1][0].tolist() if row != bad]
    class_losses(model, batch_of(data, others)).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert error_of(trainer.recorder.gradients[0], expected) < 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_a_step_of_nothing_else_changes_nothing(tmp_path, caplog, path):
    bad = row_at(3, rows=6)
    changes = {**SGD, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": 2}
    data = PoisonedRows(6, [bad])
    trainer = curriculum_run(
        tmp_path, "none", model=poisoned(llama(layers=1)), data=data, memory=PATHS[path], **changes
    )
    assert_set_aside(trainer, tmp_path, caplog, [bad])
    assert trainer.state.global_step == 6 + 5
    assert same(trainer.recorder.weights[3], trainer.recorder.weights[2])
    assert not any(gradient.any() for gradient in trainer.recorder.gradients[3].values())


@pytest.mark.parametrize("path", PATHS)
def test_when_no_row_has_a_finite_loss_it_is_the_model(tmp_path, path):
    data = PoisonedRows(40, range(40))
    with pytest.raises(NonFiniteLoss, match="step 4: 16 rows in a row gave no finite loss"):
        curriculum_run(tmp_path, "none", model=poisoned(llama(layers=1)), data=data, memory=PATHS[path])


class Measured(nn.Module):
    """Says the loss of each row itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        losses = (x * self.weight - labels).square()
        return {"loss": losses.mean(), "losses": losses}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_model_that_says_its_rows_losses(tmp_path, caplog, value):
    bad = row_at(6)
    rows = [{"x": torch.tensor(value if row == bad else row / 10), "labels": torch.tensor(0.5)} for row in range(12)]
    changes = {"data_collator": None, "remove_unused_columns": False, "learning_rate": 1e-3}
    trainer = curriculum_run(tmp_path, "none", model=Measured(), data=Examples(rows), **changes)
    assert trainer.loss_path.reading.kind == "own"
    assert_set_aside(trainer, tmp_path, caplog, [bad])


# -- data that hardly exist --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_an_empty_dataset_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="the training dataset is empty"):
        curriculum_run(tmp_path, name, data=Examples([]), num_train_epochs=4)


@pytest.mark.parametrize("name", METHODS)
def test_one_sample_is_trained_on_in_every_epoch(tmp_path, name):
    trainer = curriculum_run(tmp_path, name, data=UnevenRows(1), num_train_epochs=4)
    assert trainer.state.global_step == 4 and trainer.difficulty.observations.tolist() == [4]


@pytest.mark.parametrize("name", METHODS)
def test_equal_losses_leave_something_to_train_on(tmp_path, name):
    model = llama(layers=1)
    nn.init.zeros_(model.lm_head.weight)
    trainer = curriculum_run(tmp_path, name, model=model, num_train_epochs=4, learning_rate=0.0)
    numpy.testing.assert_allclose(trainer.difficulty.scores, math.log(64), rtol=1e-6)
    assert all(plan.rows for plan in trainer.plans.values()) and not trainer.difficulty.quarantined.any()


# -- out of memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "infobatch"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_chunk_that_runs_again_counts_once(tmp_path, name, place):
    calls, hit = (4, 12), []

    def trained(folder, faults) -> Watched:
        model = llama(layers=1)
        own = {"memory": MemorySettings(), "memory_gauge": FakeGauge(ENDLESS_BYTES), "num_train_epochs": 4, **SGD}
        with contextlib.ExitStack() as stack:
            counters = [stack.enter_context(fault(model, call)) for fault, call in faults]
            trainer = curriculum_run(folder, name, model=model, **own)
        hit.extend(counter.calls > call for counter, (_, call) in zip(counters, faults, strict=True))
        return trainer

    def fault(model, call: int):
        if place == "forward":
            return fail_in_forward(model.model.norm, call, counts=is_training)
        return fail_in_backward(model.model.embed_tokens.weight, call)

    calm, faulty = trained(tmp_path / "calm", []), trained(tmp_path / "faulty", [(fault, call) for call in calls])
    assert hit == [True, True]
    assert any(row["reason"] != "start" for row in read_rows(tmp_path / "faulty" / "memory_history.json"))
    assert faulty.difficulty.observations.tolist() == calm.difficulty.observations.tolist()
    numpy.testing.assert_allclose(faulty.difficulty.scores, calm.difficulty.scores, rtol=1e-4)
    assert faulty.curriculum.figures()["curriculum"] == calm.curriculum.figures()["curriculum"]
    torch.testing.assert_close(weights_of(faulty.model), weights_of(calm.model), rtol=1e-3, atol=1e-5)


def test_a_window_with_a_bad_row_ends_as_if_each_micro_batch_had_been_asked_at_once(tmp_path, monkeypatch):
    """It is asked once, when all have run, and runs again then: with the same dropout, rows and gradients."""
    settled, settle = [], LossPath.settle

    def watched(path) -> bool:
        settled.append(settle(path))
        return settled[-1]

    def run(name: str) -> tuple:
        model = poisoned(llama(layers=1, attention_dropout=0.5))
        data = PoisonedRows(12, [row_at(5)])
        trainer = curriculum_run(tmp_path / name, "none", model=model, data=data, memory=PATHS["memory"], **SGD)
        return weights_of(trainer.model), trainer.difficulty

    monkeypatch.setattr(LossPath, "settle", watched)
    weights, difficulty = run("held")
    assert settled.count(False) == 1 and settled.count(True) > 3
    monkeypatch.setattr(LossPath, "hold", lambda path: None)
    settled_at_once, expected = run("at once")

    assert same(weights, settled_at_once)
    assert numpy.array_equal(difficulty.scores, expected.scores, equal_nan=True)
    assert numpy.array_equal(difficulty.observations, expected.observations)
    assert difficulty.quarantined.nonzero()[0].tolist() == [row_at(5)]


# -- what one bad row must not spoil -----------------------------------------------------------------------------------


class NormalizedNet(nn.Module):
    """A classifier of pictures with BatchNorm: one picture that is not finite makes all losses of its batch none."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, pixel_values, labels):
        logits = self.head(self.norm(self.conv(pixel_values)).relu().mean(dim=(2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("memory", [None, MemorySettings()], ids=["stock", "memory"])
@pytest.mark.parametrize("rows", [4, 24])
def test_one_bad_picture_spoils_neither_its_batch_nor_the_running_statistics(tmp_path, caplog, memory, rows):
    data = images(24)
    data.rows[7]["pixel_values"][0, 0, 0] = math.nan
    trainer = curriculum_run(
        tmp_path, "none", model=NormalizedNet(), data=data, memory=memory, per_device_train_batch_size=rows
    )
    assert trainer.difficulty.quarantined.nonzero()[0].tolist() == [7]
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())


def test_label_smoothing_takes_the_labels_and_a_bad_row_still_goes_alone(tmp_path, caplog):
    trainer = curriculum_run(
        tmp_path,
        "none",
        model=poisoned(llama(layers=1)),
        data=PoisonedRows(12, [3]),
        label_smoothing_factor=0.1,
    )
    assert trainer.difficulty.quarantined.nonzero()[0].tolist() == [3]
    assert "the trained loss has other parts as well" in caplog.text
    assert all(torch.isfinite(weight).all() for weight in weights_of(trainer.model).values())


def test_encoder_decoders_with_a_large_vocabulary_keep_their_own_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("scu_trainer.train.loss.loss_path.LARGE_VOCABULARY", 16)
    trainer = curriculum_run(tmp_path, "none", model=t5(), data=pairs(12), memory=MemorySettings(), num_train_epochs=1)
    assert trainer.loss_path.kind != "headless"
    assert numpy.isfinite(trainer.difficulty.scores).all()
