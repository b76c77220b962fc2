"""A training epoch by epoch, and a checkpoint under a name of one's own."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from scu_trainer.errors import ControlError, SettingsError, StorageError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, gpt2, pad, same, weights_of
from tests.train.stepwise import losses_of

LOOPS = {
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings(),
    "regularization": RegularizationSettings(target_s=0.1),
}
LENGTH = {"max_steps": -1, "num_train_epochs": 3, "logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "no"}


def made(folder, kind=SCUTrainer, seed=0, loops=LOOPS, safety=None, **changes):
    rows = {"train_dataset": UnevenRows(13), "eval_dataset": UnevenRows(4), "data_collator": pad}
    model = gpt2(seed=seed, resid_pdrop=0.1)
    return kind(
        model,
        arguments(folder, **{**LENGTH, **changes}),
        **rows,
        **({**loops, "safety": safety} if kind is SCUTrainer else {}),
    )


def trained(trainer, **given):
    trainer.train(**given)
    return trainer


@pytest.mark.parametrize("loops", [{}, LOOPS], ids=["stock", "loops"])
def test_epoch_by_epoch_is_the_same_training_bit_for_bit(tmp_path, loops):
    whole, parts = trained(made(tmp_path, loops=loops)), made(tmp_path, loops=loops)
    found = list(parts.epochs())
    assert same(weights_of(parts.model), weights_of(whole.model)) and losses_of(parts) == losses_of(whole)
    assert [metrics["epoch"] for metrics in found] == [1, 2, 3]
    evaluated = [row["eval_loss"] for row in whole.state.log_history if "eval_loss" in row]
    assert [metrics["eval_loss"] for metrics in found] == evaluated
    if not loops:
        stock = trained(made(tmp_path, Trainer))
        assert same(weights_of(parts.model), weights_of(stock.model))


def test_the_loss_is_the_mean_over_the_steps_of_the_epoch(tmp_path):
    trainer = made(tmp_path, logging_steps=1)
    found = list(trainer.epochs())
    losses, before = losses_of(trainer), 0
    for metrics in found:
        mean = sum(losses[before : metrics["step"]]) / (metrics["step"] - before)
        assert metrics["train_loss"] == pytest.approx(mean, rel=1e-5)
        before = metrics["step"]


def test_leaving_the_loop_ends_the_training(tmp_path):
    trainer = made(tmp_path)
    for metrics in trainer.epochs():
        if metrics["epoch"] == 2:
            break
    assert trainer.state.epoch == 2 and "train_runtime" in trainer.state.log_history[-1]
    assert same(weights_of(trained(trainer).model), weights_of(trainer.model)), "it can train again"


def test_an_error_in_the_body_and_one_in_the_training_arrive(tmp_path):
    with pytest.raises(ZeroDivisionError):
        for _ in (trainer := made(tmp_path)).epochs():
            raise ZeroDivisionError
    trainer = made(tmp_path)
    trainer.train_dataset.tokens[:] = 10**6  # no token of the model
    with pytest.raises(IndexError):
        next(trainer.epochs())
    assert trainer.after_epoch is None


def test_two_at_once_are_refused(tmp_path):
    trainer = made(tmp_path)
    first = trainer.epochs()
    next(first)
    with pytest.raises(ControlError, match="already running"):
        next(trainer.epochs())
    assert len(list(first)) == 2


def test_a_checkpoint_under_a_name_of_ones_own_goes_on_bit_for_bit(tmp_path):
    whole, saved = made(tmp_path / "run"), {}
    for metrics in whole.epochs():
        whole.save(saved.setdefault(metrics["epoch"], tmp_path / f"after epoch {metrics['epoch']:.0f}"))
    assert not list((tmp_path / "run").glob("checkpoint-*")) and not list(tmp_path.glob(".*"))
    for path in list(saved.values())[:2]:
        resumed = trained(made(tmp_path / "again"), resume_from_checkpoint=str(path))
        assert same(weights_of(resumed.model), weights_of(whole.model)), path


def test_a_checkpoint_of_nothing_or_over_something_is_refused(tmp_path):
    trainer = made(tmp_path)
    with pytest.raises(ControlError, match="no training to save yet"):
        trainer.save(tmp_path / "mine")
    trained(trainer).save(tmp_path / "mine")
    with pytest.raises(StorageError, match="already exists"):
        trainer.save(tmp_path / "mine")


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    trainer = trained(made(tmp_path / "run"))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StorageError, match=r"mine could not be written.*No space left"):
        trainer.save(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# -- a checkpoint after every so many epochs ---------------------------------------------------------------------------


def kept(folder, epochs, **changes):
    changes = {"save_strategy": "epoch", "num_train_epochs": epochs, "eval_strategy": "no", **changes}
    trainer = trained(made(folder, safety=SafetySettings(save_epochs=2), **changes))
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")), trainer


@pytest.mark.parametrize(("epochs", "expected"), [(5, [2, 4, 5]), (4, [2, 4]), (2.5, [2, 2.5]), (1, [1])])
def test_checkpoints_come_after_so_many_epochs_and_at_the_end(tmp_path, epochs, expected):
    found, trainer = kept(tmp_path, epochs)
    per_epoch = trainer.state.max_steps / epochs
    assert found == [round(epoch * per_epoch) for epoch in expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_strategy": "steps"}, "save_strategy is steps; set save_strategy: epoch"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "may leave out the best checkpoint"),
    ],
)
def test_what_contradicts_is_refused(tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        kept(tmp_path, 2, **changes)
