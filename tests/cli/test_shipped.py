"""Recipes and launch files found by name: in the checkout here, in an installed package in tests/test_wheel.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from scu_trainer import shipped
from scu_trainer.cli import main
from scu_trainer.cli.configuration import read_values
from scu_trainer.errors import SettingsError
from scu_trainer.train.step.distributed import deepspeed_start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main([*words])
    return code, *capsys.readouterr()


def test_each_file_is_there_once():
    """The package holds links; a copy would go its own way."""
    for folder in (*shipped.FOLDERS, "scripts"):
        link = ROOT / "scu_trainer" / "shipped" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder and not (ROOT / folder).is_symlink()
    assert shipped.ROOT == ROOT


def test_a_name_means_one_file():
    names = [name for folder in shipped.FOLDERS for name in shipped.files(folder)]
    assert len(names) == len(set(names)) >= 28
    for folder in shipped.FOLDERS:
        assert len(shipped.files(folder)) == len(list((ROOT / folder).iterdir()))


@pytest.mark.parametrize("word", ["scu_lora", "scu_lora.yaml", "recipes/scu_lora.yaml"])
def test_a_recipe_is_found_by_name_from_anywhere(elsewhere, word):
    assert shipped.recipe(word) == str(ROOT / "recipes" / "scu_lora.yaml")


def test_a_file_of_ones_own_goes_first(elsewhere):
    (elsewhere / "recipes").mkdir()
    for word in ("scu_lora", "recipes/scu_lora.yaml"):
        Path(word).write_text("max_steps: 3\n")
        assert shipped.recipe(word) == word


def test_what_is_no_name_is_left_to_who_opens_it(elsewhere):
    (elsewhere / "folder").mkdir()
    for word in ("no/such.yaml", "such.yaml", "folder", ""):
        assert shipped.recipe(word) == word
    for word in ("no/such.json", '{"zero_optimization": {"stage": 2}}', ""):
        assert shipped.deepspeed(word) == word


def test_an_unknown_name_lists_the_near_one_and_all(elsewhere, capsys):
    code, _, said = run(capsys, "train", "--config", "scu_lorra")
    assert code == 2 and "'scu_lorra' is not a file here" in said and "did you mean 'scu_lora'?" in said
    assert all(name in said for name in shipped.files("recipes"))
    with pytest.raises(
        SettingsError, match=r"nor a name in ds_configs \(did you mean 'zero2'\?\); known: zero2, .*JSON"
    ):
        shipped.deepspeed("zero22")


@pytest.mark.parametrize("given", ["flag", "file"])
def test_deepspeed_takes_a_name(elsewhere, given):
    (elsewhere / "job.yaml").write_text("deepspeed: zero3\n" if given == "file" else "max_steps: 1\n")
    flags = ["--deepspeed", "zero3"] if given == "flag" else []
    assert read_values("job.yaml", flags)["deepspeed"] == str(ROOT / "ds_configs" / "zero3.json")


def test_the_configuration_that_a_launch_file_names_is_found_elsewhere(elsewhere, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds_configs/zero2.json")
    assert deepspeed_start._file_of_accelerate() == str(ROOT / "ds_configs" / "zero2.json")
    assert os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(ROOT / "ds_configs" / "zero2.json")


def test_the_list_has_each_file_with_a_sentence(capsys):
    code, printed, _ = run(capsys, "recipes")
    assert code == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in printed.splitlines() if line.startswith("  ")}
    assert [*lines] == [name for folder in shipped.FOLDERS for name in shipped.files(folder)]
    assert all(len(text) > 5 for text in lines.values())
    assert lines["zero3_offload"] == "ZeRO-3 with weights and optimizer state in main memory"
    assert lines["cpu"].startswith("one process on the CPU") and lines["acmds"].startswith("task image-class")


def test_one_is_printed_copied_or_named(elsewhere, capsys):
    text = (ROOT / "recipes" / "resnet.yaml").read_text()
    assert run(capsys, "recipes", "resnet")[:2] == (0, text)
    assert run(capsys, "recipes", "zero2", "--path")[1] == f"{ROOT / 'ds_configs' / 'zero2.json'}\n"
    (elsewhere / "mine").mkdir()
    assert run(capsys, "recipes", "resnet", "--copy", "mine")[:2] == (0, "mine/resnet.yaml\n")
    assert Path("mine/resnet.yaml").read_text() == text
    assert yaml.safe_load(text) and json.loads(shipped.one("zero2").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnett"], "did you mean 'resnet'?"),
        (["--copy", "x.yaml"], "--copy and --path need a name"),
        (["resnet", "--copy", "there.yaml"], "there.yaml already exists"),
        (["resnet", "--copy", "no/folder/x.yaml"], "the folder of no/folder/x.yaml does not exist"),
        (["resnet", "--copy", "x.yaml", "--path"], "not allowed with"),
    ],
)
def test_what_the_list_refuses(elsewhere, capsys, words, said):
    Path("there.yaml").write_text("kept\n")
    code, _, error = run(capsys, "recipes", *words)
    assert code == 2 and said in error
    assert Path("there.yaml").read_text() == "kept\n" and [*elsewhere.iterdir()] == [elsewhere / "there.yaml"]


def test_menus_offer_what_the_package_brings(elsewhere):
    assert shipped.here("recipes") == ROOT / "recipes"
    (elsewhere / "recipes").mkdir()
    assert shipped.here("recipes") == Path("recipes")
