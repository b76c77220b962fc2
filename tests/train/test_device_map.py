"""LoRA on a model that lies partly or wholly on disk is LoRA on the same model in main memory, bit for bit."""

from __future__ import annotations

import functools
import sys
from typing import Optional

import pytest
import torch
from peft import get_peft_model_state_dict

from scu_trainer.data import Collator
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from scu_trainer.train.evaluation.scoring import score_documents
from tests import processes, tiny
from tests.faults import fail_in_backward, fail_in_forward, is_training
from tests.offloading import saved, with_adapters
from tests.tiny import UnevenRows, pad, same, trained, weights_of
from tests.train.test_evaluate import held_out

FAMILIES = {
    "llama": lambda: tiny.llama(layers=4),
    "tied": lambda: tiny.llama(layers=4, tie_word_embeddings=True),
    "gpt2": lambda: tiny.gpt2(n_layer=3),
    "granite": tiny.granite_hybrid,
}

PARTLY, WHOLLY = 0.7, 0.24

LOOPS = {
    "none": {},
    "regularization": {"regularization": RegularizationSettings(target_s=0.01, sigma=0.01)},
    "memory": {"memory": MemorySettings(token_cap=24)},
    "curriculum": {"curriculum": CurriculumSettings("token_budget")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: saved(make(), tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


def devices(model) -> set:
    return set(model.hf_device_map.values())


def run(folder, share, output_dir, seed=1, **changes):
    given = {"max_steps": -1, "num_train_epochs": 1, "data_collator": pad, "dataset": UnevenRows(), **changes}
    return trained(with_adapters(folder, share, seed), output_dir, **given)


@pytest.fixture(scope="module")
def epochs(folders, tmp_path_factory):
    """An epoch with a loop, of ``share`` of the weights in main memory, scored at its end. For reading alone."""

    @functools.cache
    def trained_once(loop: str, share: Optional[float]):
        changes = {"dataset": UnevenRows(20), "eval_dataset": UnevenRows(8, seed=3), "eval_strategy": "epoch"}
        return run(folders["llama"], share, tmp_path_factory.mktemp("epoch"), **LOOPS[loop], **changes)

    return trained_once


@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_trains_the_same_weights(folders, epochs, loop):
    here, away = epochs(loop, None), epochs(loop, PARTLY)
    assert devices(away.model) == {"cpu", "disk"}
    assert same(weights_of(here.model), weights_of(away.model))
    assert not same(weights_of(away.model), weights_of(with_adapters(folders["llama"], None)))
    assert [row.get("eval_loss") for row in here.state.log_history] == [
        row.get("eval_loss") for row in away.state.log_history
    ]


@pytest.mark.parametrize("family", ["tied", "gpt2", "granite"])
def test_each_family_trains_the_same_weights(folders, tmp_path, family):
    """Of tied weights one copy lies on disk; mamba layers read parameters that belong to no linear layer."""
    few = {"max_steps": 3, "dataset": UnevenRows(12)}
    here = run(folders[family], None, tmp_path / "here", **few)
    away = run(folders[family], PARTLY, tmp_path / "away", **few)
    assert "disk" in devices(away.model)
    assert same(weights_of(here.model), weights_of(away.model))


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_a_model_wholly_on_disk(folders, tmp_path, family):
    few = {"max_steps": 3, "dataset": UnevenRows(12)}
    away = run(folders[family], WHOLLY, tmp_path / "away", **few)
    assert devices(away.model) == {"disk"}
    assert same(weights_of(run(folders[family], None, tmp_path / "here", **few).model), weights_of(away.model))


def test_lambda_acts_and_s_is_measured(epochs):
    loop, free = epochs("regularization", PARTLY), epochs("none", PARTLY)
    assert loop.regularizer.state.s_ema > 0
    assert not same(weights_of(loop.model), weights_of(free.model))


def test_the_curriculum_statistics_every_row(epochs):
    here, away = epochs("curriculum", None), epochs("curriculum", PARTLY)
    assert (away.difficulty.observations == 1).all()
    assert away.difficulty.scores.tolist() == here.difficulty.scores.tolist()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_out_of_memory_in_an_offloaded_layer_changes_nothing(folders, tmp_path, place):
    """A layer that failed was not put back on disk; its next run does that. The cap bounds micro-batches to one row,
    so the retry uses the same micro-batches."""
    cap = {"memory": MemorySettings(token_cap=4), "max_steps": 3, "dataset": UnevenRows(12)}
    unbroken = run(folders["llama"], PARTLY, tmp_path / "unbroken", **cap)
    model = with_adapters(folders["llama"], PARTLY)
    layer = model.get_base_model().model.layers[2].mlp.up_proj
    weight = layer.lora_B["default"].weight
    in_forward = fail_in_forward(layer.base_layer, call=5, counts=is_training)
    fault = in_forward if place == "forward" else fail_in_backward(weight, call=5)
    with fault as counter:
        broken = trained(model, tmp_path / "broken", data_collator=pad, **cap)
    assert counter.calls > 5
    (row,) = [row for row in read_rows(tmp_path / "broken" / "memory_history.json") if "out of memory" in row["reason"]]
    assert "retrying as" in row["reason"]
    assert same(weights_of(unbroken.model), weights_of(broken.model))
    assert layer.base_layer.weight.is_meta


@pytest.mark.parametrize("share", [PARTLY, WHOLLY])
def test_checkpointed_layers_have_the_same_gradients(folders, share):
    batch = pad([UnevenRows()[i] for i in range(4)])

    def gradients(share, checkpoints: bool) -> dict[str, torch.Tensor]:
        model = with_adapters(folders["llama"], share).train()
        if checkpoints:
            model.enable_input_require_grads()
            checkpoint_every_layer(model)
        torch.manual_seed(5)
        model(**batch, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients(None, False)
    assert same(expected, gradients(share, False))
    assert same(expected, gradients(share, True))


# -- saved and read again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_resumed_is_uninterrupted(folders, tmp_path, loop):
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **LOOPS[loop]}
    whole = run(folders["llama"], PARTLY, tmp_path, **steps)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = run(folders["llama"], PARTLY, tmp_path / "resumed", seed=9, resume=checkpoint, **steps)
    assert resumed.state.global_step == 4
    assert same(weights_of(whole.model), weights_of(resumed.model))


def test_a_run_may_be_resumed_on_a_machine_where_all_fits(folders, tmp_path):
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run(folders["llama"], PARTLY, tmp_path, **steps)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = run(folders["llama"], None, tmp_path / "resumed", seed=9, resume=checkpoint, **steps)
    assert same(weights_of(whole.model), weights_of(resumed.model))


def test_the_best_model_is_loaded_at_the_end(folders, tmp_path):
    """The second evaluation is worse: a learning rate that destroys."""
    best = run(
        folders["llama"],
        PARTLY,
        tmp_path,
        max_steps=2,
        learning_rate=1.0,
        eval_dataset=UnevenRows(8, seed=3),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    assert best.state.best_model_checkpoint.endswith("checkpoint-1")
    first = run(folders["llama"], PARTLY, tmp_path / "first", max_steps=1, learning_rate=1.0)
    assert same(weights_of(first.model), weights_of(best.model))


def test_training_goes_on_from_a_saved_adapter(folders, tmp_path):
    first = run(folders["llama"], PARTLY, tmp_path / "first", max_steps=2)
    first.save_model()
    ends = []
    for share in (None, PARTLY):
        model = with_adapters(folders["llama"], share, seed=9, name=tmp_path / "first")
        assert same(weights_of(first.model), weights_of(model))
        ends.append(weights_of(trained(model, tmp_path / "on", data_collator=pad, dataset=UnevenRows()).model))
    assert same(*ends)
    assert not same(ends[0], weights_of(first.model))


def test_the_saved_adapter_holds_no_more_than_the_adapter(folders, tmp_path):
    trainer = run(folders["llama"], PARTLY, tmp_path, max_steps=1)
    trainer.save_model()
    assert not list(tmp_path.glob("model*")), "offloaded weights were written again"
    assert not any(weight.is_meta for weight in get_peft_model_state_dict(trainer.model).values())


@pytest.mark.parametrize("share", [PARTLY, WHOLLY])
def test_documents_are_scored_alike(folders, share):
    rows = held_out((0, [3, 9, 11, 30]), (1, [5, 6, 7]), (1, [7, 8, 30, 31, 9]))
    here = score_documents(with_adapters(folders["llama"], None), rows, Collator())
    away = score_documents(with_adapters(folders["llama"], share), rows, Collator())
    assert here.nats.tolist() == away.nats.tolist()


# -- what it is for ----------------------------------------------------------------------------------------------------

PEAK = """
import sys, threading
from pathlib import Path
import torch
from scu_trainer.models.checkpointing import checkpoint_every_layer
from tests.offloading import with_adapters

def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

model = with_adapters(Path(sys.argv[1]), float(sys.argv[2]) if sys.argv[2] != "none" else None).train()
model.config.use_cache = False
model.enable_input_require_grads()
checkpoint_every_layer(model)
start, peak, done = torch.arange(32)[None] % 64, [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], resident_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(2):
    model(input_ids=start, labels=start).loss.backward()
done.set()
watcher.join()
print(peak[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has")
def test_offloading_with_checkpoints_saves_memory(tmp_path):
    """56 million weights, 214 MiB, in 8 layers; in a process of its own each, which has all that is imported resident.
    Weights in main memory count as resident also where they are mapped from their file."""
    folder = saved_large(tmp_path / "base")
    here, away = (peak_bytes(folder, share) for share in ("none", "0.2"))
    assert here - away > 64 * 2**20


def saved_large(folder):
    tiny.llama(hidden=768, layers=8).save_pretrained(folder, max_shard_size="30MB")
    return folder


def peak_bytes(folder, share: str) -> int:
    done = processes.launch(["-c", PEAK, folder, share], timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
