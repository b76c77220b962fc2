"""Every recipe trains through the command: its own paths and loops, on a model and documents that are made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from scu_trainer.cli import train
from scu_trainer.run_files import read_rows
from tests import tiny

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
TEXT = ("compare.yaml", "device_map.yaml", "qlora.yaml", "scu_lora.yaml")
FAMILIES = {
    "efficientnet.yaml": {"dataset_size": 40},
    "gru.yaml": {"dataset_size": 200},
    "resnet.yaml": {"dataset_size": 40},
    "sensors.yaml": {"sensor_samples": 90},
}
"""Recipes of the other tasks, and what makes their embedded data small."""

STEPS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    rows = [{"text": f"A list is a sequence that can be changed in place. Number {i}. " * 6} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_recipes_of_every_path_are_there():
    # test_public_images, test_granite, test_retaining
    elsewhere = ("cifar10.yaml", "deepspeed.yaml", "granite.yaml", "imagenet.yaml", "retain.yaml")
    assert RECIPES == sorted([*elsewhere, *TEXT, *FAMILIES])


@pytest.mark.parametrize("name", TEXT)
def test_a_recipe_trains(name, model_dir, documents, tmp_path, monkeypatch, capsys):
    """Shortened; the model is so small that a little main memory is already enough for it."""
    monkeypatch.chdir(tmp_path)
    changes = {
        "model_name_or_path": model_dir,
        "dataset": documents,
        "block_size": 64,
        "max_steps": STEPS,
        "eval_steps": 2,
        "save_steps": 2,
        "warmup_steps": 0,
        "sample_prompts": 1,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "use_cpu": "true",
    }
    if name == "device_map.yaml":
        changes["cpu_mem"] = "300KB"
    run(name, changes, capsys)
    shown = capsys.readouterr().out
    recipe = yaml.safe_load((ROOT / "recipes" / name).read_text())
    assert ("on disk" in shown) == (name == "device_map.yaml")
    assert ("4 bits" in shown) == (name == "qlora.yaml")
    assert ("activations: kept at the borders of" in shown) == recipe.get("checkpoint_every_layer", False)
    assert "precision: " in shown and "attention: " in shown
    assert len(read_rows(tmp_path / "run" / "scu_history.json")) == STEPS
    metrics = json.loads((tmp_path / "run" / "scu_metrics.json").read_text())
    assert metrics["costs"]["seconds_per_step"] > 0 and metrics["costs"]["peak_bytes"] > 0
    assert metrics["held_out_bpt_after"]["value"] < metrics["held_out_bpt_before"]["value"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_of_another_task_trains(name, tmp_path, capsys):
    changes = {
        **FAMILIES[name],
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "eval_strategy": "no",
        "predict_memory": "false",
        "output_dir": tmp_path / "run",
        "use_cpu": "true",
    }
    run(name, changes, capsys)
    shown = capsys.readouterr().out
    recipe = yaml.safe_load((ROOT / "recipes" / name).read_text())
    metrics = json.loads((tmp_path / "run" / "scu_metrics.json").read_text())
    assert ("held-out accuracy" in shown) == (recipe["task"] != "word-generation")
    assert metrics["steps"] == STEPS and metrics["held_out_bpt_after"]["value"] > 0
    assert (tmp_path / "run" / "scu_history.json").is_file() == recipe["scu"]
    assert (tmp_path / "run" / "memory_history.json").is_file() and (tmp_path / "run" / "curriculum.json").is_file()
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_recipe_that_keeps_one_checkpoint_can_be_tried_out(tmp_path, capsys):
    changes = {"sensor_samples": 60, "output_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    assert yaml.safe_load((ROOT / "recipes" / "sensors.yaml").read_text())["save_total_limit"] == 1
    run("sensors.yaml", changes, capsys, "--test_run")
    assert "test run passed: trained, evaluated, saved and resumed" in " ".join(capsys.readouterr().out.split())


def run(name, changes, capsys, *modes):
    flags = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    assert train.main(["--config", str(ROOT / "recipes" / name), *flags, *modes]) == 0, capsys.readouterr().err


def test_the_recipe_of_deepspeed_is_started_by_its_launcher():
    """tests/train/test_deepspeed_launch.py starts it; here: its file is one of those that are loaded there."""
    recipe = yaml.safe_load((ROOT / "recipes" / "deepspeed.yaml").read_text())
    assert (ROOT / recipe["deepspeed"]).is_file()
