"""Names that other programs have for our settings: taken, said, or explained; never a silent other meaning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import TrainingArguments

from scu_trainer.cli.configuration import read_data, read_job, typed_entries
from scu_trainer.cli.fields import field_names, settings_parser
from scu_trainer.cli.names.common import NAMES, ZERO
from scu_trainer.cli.names.known import known_names, own_names, stock_fields
from scu_trainer.cli.names.meaning import Alias, Switch
from scu_trainer.cli.names.tools import ALL_KEYS, TOOLS
from scu_trainer.cli.names.translation import translated, translated_entries
from scu_trainer.errors import SettingsError

ROOT = Path(__file__).parents[2]
OURS = field_names(settings_parser(TrainingArguments))


def test_no_name_of_ours_is_taken_and_every_counterpart_is_there():
    assert not OURS & NAMES.keys()
    for table in (ALL_KEYS, *(tool.TABLE for tool in TOOLS.values())):
        for meant in table.values():
            if isinstance(meant, Switch):
                assert {*meant.means, *meant.otherwise} <= OURS, meant
            elif isinstance(meant, Alias):
                found = {meant.name} if isinstance(meant.name, str) else {meant.name("resnet50"), meant.name("mine")}
                assert found <= OURS, meant
    assert all((ROOT / path).is_file() for path in ZERO.values())


def test_names_are_known_without_the_classes():
    assert {name for name in OURS if "-" not in name} - {"help"} <= known_names()
    assert stock_fields().keys() == {item.name for item in dataclasses.fields(TrainingArguments)}
    assert own_names() <= OURS


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--epochs", "3"], {"num_train_epochs": 3}),
        (["--epochs=3"], {"num_train_epochs": 3}),
        (["--grad-accum-steps", "4", "--batch-size", "2"], {"gradient_accumulation_steps": 4}),
        (["--qlora", "--seed", "7"], {"tuning": "qlora", "seed": 7}),
        (["--qlora", "false", "--seed", "7"], {"tuning": "lora", "seed": 7}),
        (["--optimizer", "adam"], {"optim": "adamw_torch_fused", "weight_decay": 0.0}),
        (["--optim", "adam"], {"optim": "adamw_torch_fused", "weight_decay": 0.0}),
        (["--optim", "muon"], {"use_muon": True}),
        (["--optim", "sgd", "--momentum", "0.9"], {"optim": "sgd", "optim_args": "momentum=0.9"}),
        (
            ["--lr-scheduler-type", "step", "--lr-step-size", "2"],
            {"lr_scheduler_type": "constant", "lr_step_size": 2},
        ),
        (
            ["--lr_milestones", "2", "4", "--lr_scheduler_type=multi_step"],
            {"lr_scheduler_type": "constant", "lr_milestones": [2.0, 4.0]},
        ),
        (["--dataset", "cifar100", "--task", "image-classification"], {"dataset": "uoft-cs/cifar100"}),
        (["--no-amp"], {"mixed_precision": "no"}),
        (["--no-checkpointing"], {"checkpoint_every_layer": False}),
        (["--optimizer", "AdamW8bit"], {"optim": "adamw_8bit"}),
        (["--model", "resnet50", "--task", "image-classification"], {"architecture": "resnet50"}),
        (["--model", "me/mine"], {"model_name_or_path": "me/mine"}),
        (["--resume", "runs/x/checkpoint-4"], {"resume_from_checkpoint": "runs/x/checkpoint-4", "resume": True}),
        (["--resume", "false"], {"resume_from_checkpoint": None, "resume": False}),
    ],
)
def test_the_same_meaning_is_taken(typed, meant):
    entries = read_job(None, typed).as_dict()
    assert {name: entries[name] for name in meant} == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("optim: muon", {"use_muon": True, "optim": "adamw_torch_fused"}),
        ("optim: sgd\nmomentum: 0.9", {"optim": "sgd", "optim_args": "momentum=0.9"}),
        ("lr: 1e-4\nepochs: 2", {"learning_rate": 1e-4, "num_train_epochs": 2}),
    ],
)
def test_the_same_meaning_is_taken_from_a_file(written, meant, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(written)
    entries = read_job(str(path), []).as_dict()
    assert {name: entries[name] for name in meant} == meant


def test_it_is_said_and_so_it_is_for_a_file(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"epochs": 2, "use-bf16": True, "seed": 3}))
    job = read_job(str(path), ["--lr", "1e-3"])
    assert job.training.num_train_epochs == 2 and job.training.learning_rate == 1e-3 and job.training.bf16
    said = " ".join(job.notes)
    assert "read: lr as learning_rate" in said
    of_ours = read_job(None, ["--dataset", "cifar100", "--task", "image-classification", "--optim", "muon"]).notes
    assert "read: dataset: cifar100 as dataset: uoft-cs/cifar100; optim: muon as use_muon: true" in of_ours
    assert f"read in {path}: epochs as num_train_epochs; use_bf16 as mixed_precision: bf16" in said
    assert typed_entries(str(path), ["--lr", "1e-3"]).keys() == {
        "num_train_epochs", "mixed_precision", "seed", "learning_rate",
    }  # fmt: skip
    assert read_data(str(path), ["--model", "me/mine"])[1].model_name_or_path == "me/mine"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--epochs", "3", "--num-train-epochs", "3"], "epochs sets num_train_epochs here, and both are given"),
        (["--lr_scheduler_type", "step"], "this lr_scheduler_type needs lr_step_size"),
        (["--optim", "adam", "--weight_decay", "0.1"], "optim sets weight_decay here, and both are given"),
        (["--checkpoint-interval", "5"], "checkpoint_interval is unknown here: write save_strategy: epoch"),
        (["--dataset", "custom"], "dataset: custom has no counterpart here: give the path of your own"),
        (["--multi-gpu"], "multi_gpu is unknown here: start one process per GPU"),
        (["--qlora", "maybe"], "qlora: it is a switch and does not take 'maybe'"),
        (["--lr", "--seed", "1"], "lr: it has no value"),
        (["--epoks", "3"], "unknown option --epoks"),
    ],
)
def test_what_has_no_counterpart_is_explained(typed, message):
    with pytest.raises(SettingsError, match=message):
        read_job(None, typed)


def test_a_file_that_gives_both_names_it(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("lr: 1\nlearning_rate: 2\n")
    with pytest.raises(SettingsError, match=r"job\.yaml: lr sets learning_rate here, and both are given"):
        read_job(str(path), [])


def test_nothing_else_is_touched():
    words = ["--dataset", "a b", "--lr_milestones", "1", "2", "--no_scu", "free"]
    assert translated(words, OURS) == (words, [])
    entries = {"dataset": [{"dataset": "a", "weight": 1}], "resume": True, "odd": 1}
    assert translated_entries(entries, OURS) == (entries, [])


def test_a_folder_of_that_name_is_that_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").mkdir()
    assert translated(["--dataset", "imagenet"], OURS) == (["--dataset", "imagenet"], [])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["--momentum", "0.9"],
            "optim_args names momentum, which optim: adamw_torch_fused does not take; momentum is for",
        ),
        (
            ["--optim", "sgd", "--optim_args", "momentun=0.9"],
            "it takes momentum, dampening, nesterov .*did",
        ),
    ],
)
def test_an_argument_that_the_optimizer_would_drop_is_refused(typed, message):
    with pytest.raises(SettingsError, match=message):
        read_job(None, [*typed, "--use_cpu", "true"]).check()
