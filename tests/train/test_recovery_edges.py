"""Less usual trainings: what stood before a window, what changes on the way, losses and batches of other kinds."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding, TrainerCallback

from scu_trainer.errors import OutOfMemory
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loss.wrap import wrap
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import layout_for, read_layout, signature, take
from scu_trainer.train.step.batches.window import AccumulationWindow
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers, WindowSnapshot
from tests import tiny
from tests.faults import fail_in_backward
from tests.tiny import Rows, UnevenRows, pad, trained, weights_of
from tests.train.sites import Sites

SGD = {"optim": "sgd", "learning_rate": 0.3, "data_collator": pad}


class Stream(torch.utils.data.IterableDataset):
    """10 batches of 4: with accumulation 4 the last window of an epoch is short, and nobody steps after it."""

    def __iter__(self):
        rows = Rows(40)
        return iter([rows[i] for i in range(len(rows))])


def close(first, second) -> bool:
    first, second = weights_of(first.model), weights_of(second.model)
    return all(torch.allclose(first[name], weight, rtol=1e-5, atol=1e-7) for name, weight in second.items())


def run(folder, dataset, fault: int | None = None, sites: Sites | None = None, **changes):
    model = tiny.llama(layers=1)
    weight = model.model.layers[0].mlp.up_proj.weight

    def prepare(trainer) -> None:
        if fault is not None:
            failing.enter_context(fail_in_backward(weight, fault))
        if sites is not None:
            sites.watch(trainer)

    with contextlib.ExitStack() as failing:
        return trained(model, folder, dataset=dataset, memory=MemorySettings(), prepare=prepare, **{**SGD, **changes})


@pytest.mark.parametrize("fault", [9, 10, 11, 13])
def test_gradients_from_before_a_window_survive_a_replay(tmp_path, fault):
    changes = {"gradient_accumulation_steps": 4, "max_steps": 4}
    stock = trained(tiny.llama(layers=1), tmp_path, dataset=Stream(), **SGD, **changes)
    faulty = run(tmp_path, Stream(), fault, **changes)
    assert faulty.micro_batches.loop.statistics.out_of_memory == 1
    assert close(faulty, stock)


@pytest.mark.parametrize("copies", ["kept", "put back"])
def test_memory_that_runs_out_while_those_gradients_are_copied(tmp_path, copies):
    changes = {"gradient_accumulation_steps": 4, "max_steps": 4}
    expected, sites = run(tmp_path, Stream(), 13, **changes), Sites(5, only=copies)
    found = run(tmp_path, Stream(), 13, sites=sites, **changes)
    assert sites.failed_kinds == [copies]
    assert tiny.same(weights_of(found.model), weights_of(expected.model))


class Unfreeze(TrainerCallback):
    """The embedding is trained from step 2 on."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_input_embeddings().weight.requires_grad_(False)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.get_input_embeddings().weight.requires_grad_(True)


@pytest.mark.parametrize("fault", [2, 3])
def test_weights_unfrozen_on_the_way_are_recovered_too(tmp_path, fault):
    changes = {"gradient_accumulation_steps": 2, "max_steps": 3, "callbacks": [Unfreeze()]}
    stock = trained(tiny.llama(layers=1), tmp_path, dataset=Rows(), **SGD, **changes)
    faulty = run(tmp_path, Rows(), fault, **changes)
    assert faulty.micro_batches.loop.statistics.out_of_memory == 1
    assert close(faulty, stock)


def test_a_loss_over_pairs_of_rows_runs_whole(tmp_path, caplog):
    def paired(outputs, labels, num_items_in_batch=None):
        scores = outputs.logits.mean(dim=(1, 2)).view(-1, 2)
        return nn.functional.softplus(scores[:, 1] - scores[:, 0]).mean()

    changes = {"compute_loss_func": paired, "max_steps": 2}
    stock = trained(tiny.llama(), tmp_path, dataset=Rows(), **SGD, **changes)
    ours = trained(tiny.llama(), tmp_path, dataset=Rows(), memory=MemorySettings(), **SGD, **changes)
    assert tiny.same(weights_of(ours.model), weights_of(stock.model))
    assert "could not be tested" in caplog.text


def test_the_model_is_asked_about_real_rows_only(tmp_path):
    seen: list[int] = []

    def spying(outputs, labels, num_items_in_batch=None):
        seen.extend(labels.flatten().tolist())
        logits = outputs.logits[..., :3].reshape(-1, 3)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    class Tags(UnevenRows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "labels": row["input_ids"] % 3}

    trainer = trained(
        tiny.llama(), tmp_path, dataset=Tags(), memory=MemorySettings(), compute_loss_func=spying, max_steps=1, **SGD
    )
    assert set(seen) <= {-100, 0, 1, 2}
    assert trainer.micro_batches.reduction == Reduction("num_items", known="torch.nn.functional.cross_entropy")


def test_two_time_axes_keep_the_cap_together():
    rows, targets = [4, 6, 20, 22], [20, 22, 4, 6]
    mask = (torch.arange(22) < torch.tensor(rows)[:, None]).long()
    labels = torch.where(torch.arange(22) < torch.tensor(targets)[:, None], 5, -100)
    batch = read_layout({"input_ids": mask, "attention_mask": mask, "labels": labels}, is_encoder_decoder=True)
    window = AccumulationWindow([batch], Reduction("labels"))
    pieces = window.pooled(56, None, 1)
    shapes = [window.inputs(piece) for piece in pieces]
    processed = [part["input_ids"].numel() + part["labels"].numel() for part in shapes]
    assert processed == [piece.tokens for piece in pieces] and max(processed) <= 56


def test_rows_with_a_picture_each_are_pooled_no_further_than_a_batch():
    def batch(*lengths: int):
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        return read_layout(
            {
                "input_ids": mask,
                "attention_mask": mask,
                "labels": mask,
                "pixel_values": torch.rand(len(lengths), 3, 4, 5),
            }
        )

    assert AccumulationWindow([batch(2, 3), batch(4, 2)], Reduction("num_items")).most_rows == 2
    mask = torch.ones(2, 3, dtype=torch.long)
    text = read_layout({"input_ids": mask, "attention_mask": mask})
    assert AccumulationWindow([text], Reduction("num_items")).most_rows is None


def test_a_batch_keeps_its_type():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs = BatchEncoding({"input_ids": mask, "attention_mask": mask})
    assert isinstance(take([read_layout(inputs)], [(0, 0)]), BatchEncoding)


def test_packed_rows_of_two_batches_stay_apart():
    positions = torch.tensor([[0, 1, 0, 1]])
    packed = [read_layout({"input_ids": positions + 3, "position_ids": positions}) for _ in range(2)]
    assert signature(packed[0]) != signature(packed[1])


def test_an_input_that_once_had_no_row_of_its_own_never_has():
    text = torch.ones(2, 4, dtype=torch.long)
    first = layout_for(None, {"input_ids": text, "pixel_values": torch.rand(3, 3, 4, 4)})
    assert first.obstacle_name == "pixel_values"
    second = layout_for(None, {"input_ids": text, "pixel_values": torch.rand(2, 3, 4, 4)}, {"pixel_values"})
    assert second.obstacle == "pixel_values does not always have one entry per row"


def test_as_many_images_as_rows_are_not_one_for_each_where_a_row_has_none():
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=9))
    text = torch.tensor([[9, 9, 1], [2, 1, 1], [9, 9, 9]])
    own, none, mixed = torch.full_like(text, 9), torch.ones_like(text), text
    obstacles = [
        layout_for(model, {"input_ids": one, "pixel_values": torch.rand(3, 3, 4, 4)}).obstacle
        for one in (own, none, mixed)  # none: the model places images by other means
    ]
    assert obstacles[:2] == [None, None] and obstacles[2].endswith("but some rows have no image")
    looked_at = {"pixel_values": torch.rand(3, 1, 2, 3, 4, 4), "cross_attention_mask": torch.ones(3, 3, 1, 2)}
    assert layout_for(model, {"input_ids": mixed, **looked_at}).obstacle is None  # Mllama: by row, and padded


def test_all_generators_go_back():
    draw = [lambda: torch.rand(1).item(), lambda: float(np.random.rand()), random.random]
    snapshot = WindowSnapshot([torch.device("cpu")], ChangingBuffers(nn.Linear(1, 1)), [])
    first = [one() for one in draw]
    snapshot.restore_surroundings()
    assert [one() for one in draw] == first
    assert len(set(itertools.chain(first))) == 3


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_the_optimizers_state_is_made_at_the_second_try(tmp_path, optim):
    """Half of it is there when memory runs out; it begins again once memory was freed."""
    sites, made = Sites(9), []

    def watch(trainer) -> None:
        make = trainer.micro_batches._guard_optimizer

        def noted(model) -> None:
            make(model)
            made.append(len(trainer.optimizer.optimizer.state))

        trainer.micro_batches._guard_optimizer = sites.inside(noted, "preallocation")

    common = {**SGD, "optim": optim, "max_steps": 2, "memory": MemorySettings(), "dataset": Rows()}
    expected = trained(tiny.llama(layers=1), tmp_path, **common)
    found = trained(tiny.llama(layers=1), tmp_path, prepare=watch, **common)
    assert sites.failed_kinds == ["preallocation"] and made == [len(list(found.model.parameters()))]
    assert tiny.same(weights_of(found.model), weights_of(expected.model))


def test_an_optimizers_state_that_does_not_fit_twice_is_told(tmp_path):
    sites = Sites(range(9, 1000))

    def watch(trainer) -> None:
        trainer.micro_batches._guard_optimizer = sites.inside(trainer.micro_batches._guard_optimizer, "preallocation")

    with pytest.raises(
        OutOfMemory, match=r"the state of AdamW does not fit in memory: it needs about .* GiB. Use optim"
    ):
        common = {**SGD, "optim": "adamw_torch", "max_steps": 2, "memory": MemorySettings(), "dataset": Rows()}
        trained(tiny.llama(layers=1), tmp_path, prepare=watch, **common)


def test_rows_of_batch_norm_are_never_cut_down_to_one(tmp_path):
    """BatchNorm1d refuses a single row: two that did not fit are tried once more as they are."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        return wrap(net, loss=nn.CrossEntropyLoss())

    rows = [(row["pixel_values"], row["labels"]) for row in (tiny.images()[i] for i in range(32))]
    common = {"dataset": rows, "optim": "sgd", "max_steps": 2, "per_device_train_batch_size": 2}
    stock = trained(make(), tmp_path, **common)
    with contextlib.ExitStack() as stack:

        def fault(trainer) -> None:
            stack.enter_context(fail_in_backward(trainer.model.module[1].weight, 1))

        found = trained(make(), tmp_path, memory=MemorySettings(), prepare=fault, **common)
    assert found.micro_batches.loop.statistics.out_of_memory == 1
    assert tiny.same(weights_of(found.model), weights_of(stock.model))
