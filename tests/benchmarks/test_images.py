"""The arithmetic of the tables of images.py and families.py, and that their contenders do equal work."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from benchmarks.headline import images
from benchmarks.lib.common import RESULTS
from benchmarks.lib.images_contenders import WAYS, augmented_by_loader, contender_of, tiny, tried_out
from benchmarks.lib.turns import Ended
from benchmarks.studies import families

SECONDS = {
    "plain loop": 2.0,
    "plain loop, bf16": 1.5,
    "recipe": 1.0,
    "recipe without bf16": 1.8,
    "recipe with channels_last": 1.25,
    "recipe with torch_compile": 0.8,
}


def a_round(slower: float = 1.0) -> dict[str, Ended]:
    """Five turns of each contender, the first of them ten times as long; the plain loop is ``slower`` than usual."""
    found = {}
    for name in WAYS:
        usual_s = SECONDS.get(name, 1.0) * (slower if name == images.PLAIN else 1.0)
        said = {"accuracy": 0.9, "peak_bytes": 100, "mixed_precision": "no", "bits_per_label": 1.0, "rows_per_step": 32}
        said |= {"accuracy": 0.95, "peak_bytes": 80, "mixed_precision": "bf16"} if name == images.OURS else {}
        found[name] = Ended([10 * usual_s, *[usual_s] * 4], said)
    return found


def test_an_ingredient_that_pays_is_above_one_on_either_contender():
    shown = images.figures([a_round(), a_round(slower=1.5)])
    assert shown["images per second, recipe / plain loop"].value == pytest.approx(2.5)
    assert shown["images per second, recipe / plain loop"].spread == pytest.approx(0.4)
    assert shown["images per second, recipe / without bf16"].value == pytest.approx(1.8)
    assert shown["images per second, recipe with channels_last / recipe"].value == pytest.approx(0.8)
    assert shown["images per second, recipe with torch_compile / recipe"].value == pytest.approx(1.25)
    assert shown["held-out accuracy, recipe - plain loop"].value == pytest.approx(0.05)
    assert shown["peak memory, recipe / plain loop"].value == pytest.approx(0.8)
    assert len(shown) == 10


def test_compiling_is_what_long_turns_take_beyond_the_usual_time():
    """The first turn: 8 s where 0.8 are usual. 10 steps of the recipe take 1.0."""
    first, later = a_round(), a_round()
    later[images.COMPILED].seconds[0] = 0.9
    compiled = images.compiling([first, later], steps_per_turn=10)
    assert compiled.seconds == pytest.approx([7.2, 0.0]) and compiled.saved_s == pytest.approx(0.02)
    assert compiled.line == "7 s, paid after 360 steps; from its cache 0 s, paid after 0 steps"


def test_compiling_that_gains_nothing_is_never_paid():
    assert images.Compiling([20.0], -0.01).line == images.Compiling([20.0], 0.0).line == "20 s, never paid"


def test_the_grid_has_a_row_for_every_contender():
    grid = images.grid([a_round()], images.Compiling([20.0], 0.0))
    rows = {row[0]: row[1:] for row in grid.rows}
    assert list(rows) == list(WAYS) and all(len(row) == len(grid.heads) for row in grid.rows)
    assert rows["recipe"] == ("bf16", "2.00", "1.00", "95.0%", "0.80", "")
    assert rows["plain loop"] == ("float32", "1.00", "0.50", "90.0%", "1.00", "")
    assert rows[images.COMPILED][-1] == "20 s, never paid"


def job_of(name: str, folder):
    with patch.dict(os.environ):  # TrainingArguments leave there what accelerate is to compile with
        return families.read(images.RECIPE, 2, str(folder), (*tiny(name), *WAYS[name].flags))


def test_each_contender_changes_what_its_name_says(tmp_path):
    recipe = job_of("recipe", tmp_path)
    assert recipe.efficiency.keep_freed_memory and recipe.training.optim == "adamw_torch_fused"
    assert not (recipe.efficiency.channels_last or recipe.training.torch_compile)
    assert job_of("recipe without bf16", tmp_path).model.mixed_precision == "no"
    assert not job_of("recipe without keep_freed_memory", tmp_path).efficiency.keep_freed_memory
    assert job_of("recipe without fused AdamW", tmp_path).training.optim == "adamw_torch"
    loops = job_of("recipe without the three loops", tmp_path)
    assert loops.regularization is None and not loops.memory.acts and not loops.curriculum.methods
    assert job_of("recipe with channels_last", tmp_path).efficiency.channels_last
    assert job_of("recipe with torch_compile", tmp_path).training.torch_compile
    assert job_of("recipe with a loader worker", tmp_path).training.dataloader_num_workers == 1


def test_a_loader_that_augments_makes_what_the_model_would(tmp_path):
    job = job_of("recipe", tmp_path)
    parts = job.kind.load(job, Console(quiet=True))
    seen = []
    first = next(module for module in parts.model.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rows = [parts.data.train[number] for number in range(4)]
    for each in (parts, augmented_by_loader(parts)):
        torch.manual_seed(0)
        parts.model.train()(pixel_values=each.collator(rows)["pixel_values"])
    assert torch.equal(*seen)


def test_contenders_do_equal_work(tmp_path):
    """The same images in the same order: so early the loops change nothing, and loading elsewhere never does."""
    names = ("stock Trainer", "recipe without bf16", "recipe with a loader worker", "recipe")
    found = tried_out([contender_of(name, images.QUICK_STEPS, tiny(name), str(tmp_path)) for name in names])
    stock, ours, worker, recipe = (found[name].said["bits_per_label"] for name in names)
    assert ours == pytest.approx(stock, rel=1e-3) and worker == pytest.approx(recipe, rel=1e-3)
    for ended in found.values():
        assert len(ended.seconds) == images.QUICK_STEPS - 1 and ended.said["peak_bytes"] > 0
        assert ended.said["rows_per_step"] == 4


def test_families_write_the_fields_of_before(monkeypatch):
    said = {"bpt": 0.2, "accuracy": 0.9, "mixed_precision": "bf16", "rows_per_step": 32}
    found = [{"plain": Ended([2.0, 3.0, 2.5], said), "ours": Ended([ours, ours, ours], said)} for ours in (1.0, 2.0)]
    monkeypatch.setattr(families, "rounds", lambda contenders, steps_per_turn, repeats: found[:repeats])
    result = families.compare("resnet", "recipe", 20)
    assert result["speed_against_by_order"] == {"plain": [2.5, 1.25]}
    assert result["speed_against_the_better"] == result["speed_against"]["plain"] == 1.875
    assert result["seconds_per_step"] == {"plain": 0.5, "ours": 0.3} and result["turns"] == 6
    assert result["held_out_accuracy"] == {"plain": 0.9, "ours": 0.9}
    written = json.loads((RESULTS / "families.json").read_text())["results"]
    assert all(list(result) == list(one) for one in written)
