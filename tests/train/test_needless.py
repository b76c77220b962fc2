"""``model.train()`` is left out where it would change nothing, and only there; packages are looked for once."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import Trainer, TrainerCallback

from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.needless import ASKED, redundant_train_call_skipped
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.tiny import Rows, same, weights_of


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation, as people do it who freeze statistics."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


@pytest.fixture
def walks(monkeypatch) -> list[str]:
    """The kind of each module whose ``train`` has run."""
    kinds, stock = [], nn.Module.train

    def train(module, mode=True):
        kinds.append(type(module).__name__)
        return stock(module, mode)

    monkeypatch.setattr(nn.Module, "train", train)
    monkeypatch.setattr("scu_trainer.train.step.needless.STOCK", (train,))
    return kinds


def in_evaluation(model: nn.Module) -> None:
    model[1].eval()


def with_its_own(model: nn.Module) -> None:
    model[1].train = lambda mode=True: model[1]


@pytest.mark.parametrize("prepare", [in_evaluation, with_its_own])
def test_what_was_changed_since_is_walked_through(walks, prepare):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with redundant_train_call_skipped(model, list(model.modules())):
        prepare(model)  # by a training_step of the user's, which comes before the stock one
        walks.clear()
        model.train()
    assert "Sequential" in walks


@pytest.mark.parametrize("prepare", [None, in_evaluation, with_its_own])
def test_the_first_call_walks_only_where_something_would_change(walks, prepare):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    if prepare is not None:
        prepare(model)
    walks.clear()
    with redundant_train_call_skipped(model, list(model.modules())):
        assert model.train() is model
        assert bool(walks) == (prepare is not None)
        model.train()
        assert "Sequential" in walks
    assert "train" not in vars(model)


def test_other_modes_and_other_models_are_as_ever():
    model = nn.Sequential(nn.Linear(2, 2), Frozen(2))
    with redundant_train_call_skipped(model, list(model.modules())):
        assert not model.train()[1].training
    with redundant_train_call_skipped(model[0], [model[0]]):
        assert not model[0].train(False).training
    with redundant_train_call_skipped(model[0], ()):
        assert model[0].train().training
    assert "train" not in vars(model[0])


class PutsIntoEvaluation(TrainerCallback):
    """One layer, before every other step."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % 2:
            model.model.layers[0].eval()


class ReadsMode(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        self.modes = [*getattr(self, "modes", []), [module.training for module in model.modules()]]
        model.eval()
        with torch.no_grad():
            model(input_ids=inputs["input_ids"])
        model.train()
        return super().compute_loss(model, inputs, **kwargs)


class OursReadsMode(SCUTrainer, ReadsMode):
    pass


@pytest.mark.parametrize("callbacks", [[], [PutsIntoEvaluation()]], ids=["none", "evaluation"])
def test_every_forward_finds_the_modules_as_in_the_stock_run(tmp_path, callbacks):
    found = []
    for kind, loops in ((ReadsMode, {}), (OursReadsMode, {"memory": MemorySettings()})):
        arguments = tiny.arguments(tmp_path / kind.__name__, max_steps=4)
        trainer = kind(
            tiny.llama(attention_dropout=0.3),
            arguments,
            train_dataset=Rows(),
            data_collator=tiny.pad,
            callbacks=list(callbacks),
            **loops,
        )
        trainer.train()
        found.append(trainer)
    stock, ours = found
    assert ours.modes[-1] == stock.modes[-1] == [True] * len(stock.modes[-1])
    assert same(weights_of(ours.model), weights_of(stock.model))


def test_no_step_looks_for_a_package(tmp_path, monkeypatch):
    sought, find_spec = [], importlib.util.find_spec

    def seeking(name, *rest):
        sought.append(name)
        return find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", seeking)

    def in_steps(count: int) -> list[str]:
        arguments = tiny.arguments(tmp_path / str(count), max_steps=count, num_train_epochs=1)
        trainer = SCUTrainer(
            tiny.llama(), arguments, train_dataset=Rows(), data_collator=tiny.pad, memory=MemorySettings()
        )
        sought.clear()
        trainer.train()
        return list(sought)

    asked = [vars(module)[name] for module, name in ASKED]
    in_steps(1)  # what is looked for once in a process
    assert in_steps(4) == in_steps(2)
    assert [vars(module)[name] for module, name in ASKED] == asked


def adapted(names: Sequence[str] = ("default",), **lora) -> nn.Module:
    """Adapters in float32 beside a base in half precision."""
    config = LoraConfig(r=4, target_modules="all-linear", **lora)
    model = get_peft_model(tiny.llama().bfloat16(), config)
    for name in names[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(names))
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.data = weight.data.float() + 0.01 * ("lora_B" in name)
    return model


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"lora_dropout": 0.1}, {"names": ("default", "second")}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_casts_no_input_that_autocast_would_cast_back(tmp_path, monkeypatch, lora, checkpointing):
    casts, stock = [], BaseTunerLayer._cast_input_dtype

    def counted(layer, x, dtype):
        made = stock(layer, x, dtype)
        casts.append(made is not x)
        return made

    monkeypatch.setattr(BaseTunerLayer, "_cast_input_dtype", counted)
    found, weights = [], []
    for memory in (None, MemorySettings()):
        how = {"bf16": True, "max_steps": 2, "memory": memory, "activation_checkpointing": checkpointing}
        weights.append(weights_of(tiny.trained(adapted(**lora), tmp_path / str(memory is None), **how).model))
        found.append(sum(casts))
        casts.clear()
    assert found[0] > 0 and (found[1] == 0) == (lora == {})
    assert same(*weights) and "_cast_input_dtype" not in vars(Linear)
