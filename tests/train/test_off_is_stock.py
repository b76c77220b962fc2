"""With every loop and ``safety`` off: the stock Trainer and ours side by side, in all that a user can see."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.checkpoints.format import MANIFEST
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, UnevenRows, arguments, conv_net, gpt2, images, llama, lora, pad, same, weights_of

BOTH = [Trainer, SCUTrainer]
TIMED = ("time", "per_second", "mem_")


class BareLoss(nn.Module):
    """Returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 1)

    def forward(self, x, labels):
        return (self.inner(x).flatten() - labels).square().mean()


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), 0.1 * i), "labels": torch.tensor(0.3 * i)}


class Tupled(BareLoss):
    """The same, as the stock Trainer wants it."""

    def forward(self, x, labels):
        return (super().forward(x, labels),)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = Rows()
        return (rows[i] for i in range(len(rows)))


class Events(TrainerCallback):
    """What a callback gets, and when; it takes one off and puts another on."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        for name in (name for name in dir(TrainerCallback) if name.startswith("on_")):
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Callable:
        def note(args, state, control, **kwargs):
            self.seen.append((name, state.global_step, sorted(kwargs), vars(control).copy()))

        return note


def own_loader(kind: type) -> type:
    class WithOwnLoader(kind):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True)

    return WithOwnLoader


def own_loss(kind: type) -> type:
    class WithOwnLoss(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return (2 * found[0], found[1]) if return_outputs else 2 * found

    return WithOwnLoss


def as_it_is(kind: type) -> type:
    return kind


EVAL = {"eval_dataset": Rows(8, seed=3), "eval_strategy": "steps", "eval_steps": 2}
SAVE = {"save_strategy": "steps", "save_steps": 2}

CONFIGURATIONS: dict[str, tuple[Callable, dict[str, Any], Callable[[type], type]]] = {
    "plain, saved": (llama, {**SAVE, "save_total_limit": 2}, as_it_is),
    "dropout, accumulation, clipping, cosine": (
        lambda: gpt2(resid_pdrop=0.2),
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        as_it_is,
    ),
    "the best is loaded, early stop": (
        llama,
        {**EVAL, **SAVE, "load_best_model_at_end": True, "metric_for_best_model": "loss", "early": True},
        as_it_is,
    ),
    "evaluated at the start, label smoothing": (
        llama,
        {**EVAL, "eval_on_start": True, "label_smoothing_factor": 0.1},
        as_it_is,
    ),
    "a stream": (llama, {"dataset": Stream(), "max_steps": 5}, as_it_is),
    "epochs, uneven rows": (
        llama,
        {"dataset": UnevenRows(14), "data_collator": pad, "max_steps": -1, "num_train_epochs": 2,
         "logging_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 2,
         "lr_scheduler_type": "linear"},
        as_it_is,
    ),
    "lora, neftune, tokens counted": (
        lambda: lora(llama(), lora_dropout=0.2),
        {**SAVE, "neftune_noise_alpha": 5.0, "include_num_input_tokens_seen": "all"},
        as_it_is,
    ),
    "an own loader": (llama, {}, own_loader),
    "an own loss": (llama, {**EVAL}, own_loss),
    "pictures": (conv_net, {"dataset": images(12), "max_steps": 3, **SAVE}, as_it_is),
    "a plain module": (Tupled, {"dataset": Points(), **SAVE}, as_it_is),
    "weights only are saved, a model for each training": (
        lambda: llama(), {**SAVE, "save_only_model": True, "by_init": True}, as_it_is,
    ),
}  # fmt: skip


def made(kind: type, folder: Path, make: Callable, **changes) -> Trainer:
    callbacks = [Events(), *([EarlyStoppingCallback(1)] if changes.pop("early", False) else [])]
    extra = {name: changes.pop(name) for name in ("data_collator", "eval_dataset") if name in changes}
    model = {"model_init": make} if changes.pop("by_init", False) else {"model": make()}
    rows = changes.pop("dataset", None) or Rows()
    args = arguments(folder, **{"logging_steps": 1, **changes})
    return kind(args=args, train_dataset=rows, callbacks=callbacks, **model, **extra)


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not any(part in key for part in TIMED)}


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


def tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every number of a state_dict by its path."""
    if isinstance(state, dict):
        return {k: v for key, inner in state.items() for k, v in tensors(inner, f"{path}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for i, inner in enumerate(state) for k, v in tensors(inner, f"{path}/{i}").items()}
    if torch.is_tensor(state) or isinstance(state, (int, float)):
        return {path: torch.as_tensor(state)}
    return {}


def saved_files(folder: Path) -> dict[str, Any]:
    """Name -> content of every file of every checkpoint, paths and times left out."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        if path.name == "trainer_state.json":
            state = json.loads(path.read_text().replace(str(folder), ""))
            found[name] = {**state, "log_history": [untimed(row) for row in state["log_history"]]}
        elif path.suffix in (".pt", ".pth"):
            found[name] = {k: v.tolist() for k, v in tensors(torch.load(path, weights_only=False)).items()}
        elif path.name == "training_args.bin":
            found[name] = {**vars(torch.load(path, weights_only=False)), "output_dir": ""}.keys()
        elif path.suffix == ".safetensors":
            found[name] = {k: v.tolist() for k, v in load_file(path).items()}
        else:
            found[name] = path.read_bytes()
    return found


def all_of(trainer: Trainer) -> dict[str, Any]:
    folder = trainer.args.output_dir
    state = json.loads(json.dumps(vars(trainer.state), default=str).replace(folder, ""))
    return {
        "generators": generators(),
        "weights": {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()},
        "optimizer": {k: v.tolist() for k, v in tensors(trainer.optimizer.state_dict()).items()},
        "scheduler": {k: v.tolist() for k, v in tensors(trainer.lr_scheduler.state_dict()).items()},
        "state": {**state, "log_history": [untimed(row) for row in state["log_history"]]},
        "callbacks": [type(callback) for callback in trainer.callback_handler.callbacks],
        "told": next(c for c in trainer.callback_handler.callbacks if isinstance(c, Events)).seen,
        "wrapped": trainer.model_wrapped is trainer.model,
        "files": saved_files(Path(folder)),
    }


def test_the_same_checkpoints_stay(tmp_path):
    """Also where there are some of an earlier run, with higher numbers."""
    left = []
    for kind in BOTH:
        folder = tmp_path / kind.__name__
        (folder / "checkpoint-100").mkdir(parents=True)
        os.utime(folder / "checkpoint-100", (1e9, 1e9))
        made(kind, folder, llama, **SAVE, save_total_limit=2).train()
        left.append({path.name for path in folder.iterdir()})
    assert left[0] == left[1] == {"checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_side_by_side(tmp_path, case):
    make, changes, derived = CONFIGURATIONS[case]
    found = []
    for kind in BOTH:
        trainer = made(derived(kind), tmp_path / kind.__name__, make, **changes)
        returned = trainer.train()
        found.append({**all_of(trainer), "returned": untimed(returned.metrics)})
        if "eval_dataset" in changes:
            predicted = trainer.predict(Rows(4, seed=5))
            found[-1]["predicted"] = predicted.predictions.tolist(), untimed(predicted.metrics)
    for part in found[0]:
        assert found[1][part] == found[0][part], part


def test_before_training_too(tmp_path):
    """evaluate, predict without labels, free_memory, callbacks taken off; then train."""
    found = []
    for kind in BOTH:
        trainer = made(kind, tmp_path / kind.__name__, llama, **EVAL)
        before = untimed(trainer.evaluate())
        unlabelled = [{"input_ids": row["input_ids"]} for row in (Rows(4)[i] for i in range(4))]
        predicted = trainer.predict(unlabelled)
        trainer.accelerator.free_memory()
        taken = trainer.pop_callback(Events)
        trainer.add_callback(taken)
        trainer.train()
        found.append((before, predicted.predictions.tolist(), predicted.label_ids, all_of(trainer)))
    assert found[0] == found[1]


# -- nothing stays on what is the user's -------------------------------------------------------------------------------


class Looks(TrainerCallback):
    """At the model while it trains."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        hooked = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert not hooked
        pickle.loads(pickle.dumps(model))
        copy.deepcopy(model)


ON = {
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings("token_budget"),
    "regularization": RegularizationSettings(target_s=0.02),
    "safety": SafetySettings(),
}


def attributes_of(model: nn.Module) -> list[Any]:
    def size(value: Any) -> int:
        return len(value) if hasattr(value, "__len__") else 1

    return [{name: size(value) for name, value in vars(module).items()} for module in model.modules()]


@pytest.mark.parametrize("loops", [{}, ON], ids=["off", "on"])
@pytest.mark.parametrize("kind", [BareLoss, llama], ids=["bare loss", "llama"])
def test_nothing_stays_on_the_model_and_the_optimizer(tmp_path, kind, loops):
    if kind is BareLoss and loops:
        loops = {**loops, "regularization": RegularizationSettings(target_s=0.02, tokens=100.0)}
    model, rows = kind(), Points() if kind is BareLoss else Rows()
    beside = made(Trainer, tmp_path / "stock", Tupled if kind is BareLoss else kind, dataset=rows, max_steps=3)
    beside.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hooks = {name: len(value) for name, value in vars(optimizer).items() if "hooks" in name}
    collator = pad if kind is llama else None
    args = arguments(tmp_path, max_steps=3)
    trainer = SCUTrainer(
        model, args, collator, rows, callbacks=[Looks()], optimizers=(optimizer, None), **loops
    )  # fmt: skip
    pickle.loads(pickle.dumps(model))
    used = trainer.data_collator
    trainer.train()
    assert attributes_of(model) == attributes_of(beside.model)
    assert {name: len(value) for name, value in vars(optimizer).items() if "hooks" in name} == hooks
    assert trainer.data_collator is used and trainer.optimizer.optimizer is optimizer
    assert set(vars(args)) == set(vars(arguments(tmp_path))) and args.remove_unused_columns
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)


def test_a_bare_loss_trains_as_one_in_a_tuple(tmp_path):
    stock = made(Trainer, tmp_path / "stock", Tupled, dataset=Points())
    stock.train()
    ours = made(SCUTrainer, tmp_path / "ours", BareLoss, dataset=Points(), eval_dataset=Points())
    ours.train()
    assert same(weights_of(ours.model), weights_of(stock.model))
    assert ours.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("loops", [{}, ON], ids=["off", "on"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_trainer_that_nobody_holds_is_gone(tmp_path, loops, trains):
    model = llama()
    trainer = SCUTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=Rows(), data_collator=pad, **loops)
    if trains:
        trainer.train()
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_loader_workers_are_those_of_the_stock_trainer(tmp_path):
    inits = []
    for kind in BOTH:
        trainer = made(kind, tmp_path, llama, dataloader_num_workers=1)
        inits.append(trainer.get_train_dataloader().worker_init_fn)
    assert [init.func.__name__ for init in inits] == ["seed_worker"] * 2


# -- single methods ----------------------------------------------------------------------------------------------------


def test_signatures_are_those_of_the_stock_trainer():
    for name, own in vars(SCUTrainer).items():
        if name.startswith("_") or not inspect.isfunction(own) or not hasattr(Trainer, name):
            continue
        expected = inspect.signature(getattr(Trainer, name)).parameters.values()
        found = inspect.signature(own).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected], name


class Nested(nn.Module):
    main_input_name = "words"

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama(layers=1)

    def num_parameters(self, exclude_embeddings=False):
        return 7


@pytest.mark.parametrize(
    "make", [llama, BareLoss, Nested, lambda: lora(llama())], ids=["llama", "bare", "nested", "lora"]
)
def test_operations_are_counted_as_the_stock_trainer_counts_them(tmp_path, make):
    model = make()
    pair = [kind(model, arguments(tmp_path), train_dataset=Rows()) for kind in BOTH]
    small, large = torch.zeros(2, 3), torch.zeros(5, 7)
    for inputs in (
        {"input_ids": small},
        {"input_ids": large},
        {"words": large},
        {"input_ids": small[:0]},
        {},
        {"x": 1},
    ):
        expected, found = (trainer.floating_point_ops(inputs) for trainer in pair)
        assert found == expected
    for trainer in pair:
        if hasattr(model, "num_parameters"):
            with pytest.raises(AttributeError):
                trainer.floating_point_ops({getattr(model, "main_input_name", "input_ids"): [[1, 2]]})
