"""A plan that is written as a configuration, and read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from transformers import LlamaConfig

from scu_trainer.cli import main as cli
from scu_trainer.cli.background import runs
from scu_trainer.cli.configuration import read_job

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 8}
JOB = [
    "--model_name_or_path",
    "model",
    "--tuning",
    "full",
    "--block_size",
    "1024",
    "--per_device_train_batch_size",
    "1",
    "--lr_milestones",
    "1",
    "2",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES, vocab_size=8000, max_position_embeddings=1024).save_pretrained("model")
    return tmp_path


def planned(capsys, *words) -> dict:
    """For a card: what the heap of this process makes of a plan for the CPU changes from test to test."""
    assert cli.main(["plan", *JOB, "--gpu", "RTX 3050 4GB", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_path_is_written_as_it_was_typed(here, capsys):
    os.rename("model", "größer")
    assert cli.main(["plan", "--model_name_or_path", "größer", "--gpu", "RTX 3050 4GB", "--output", "mine.yaml"]) == 0
    assert "model_name_or_path: größer  # as asked\n" in (here / "mine.yaml").read_text(encoding="utf-8")


def test_what_fits_is_written_with_reasons_and_read_back(here, capsys):
    asked = planned(capsys)["predicted"]["peak_bytes"]
    report = planned(capsys, "--limit", f"{1.1 * asked / 2**20:.0f}MiB", "--output", "mine.yaml")
    assert report["recommended"], "15 % are kept free, so the limit lies below what is asked for"
    text = (here / "mine.yaml").read_text()
    read = yaml.safe_load(text)
    assert {name: read[name] for name in report["recommended"]} == report["recommended"]
    assert read["block_size"] == report["recommended"].get("block_size", 1024) and read["lr_milestones"] == [1, 2]
    for line in text.splitlines():
        assert line.startswith(("#", "-")) or line.partition("  # ")[2], "a value without its reason"
    job = read_job("mine.yaml", [])
    assert job.model.tuning == read["tuning"] and job.efficiency.lr_milestones == [1, 2]
    assert job.model.mixed_precision == read["mixed_precision"]


def test_hardware_config_is_the_same_under_its_own_name(here, capsys):
    assert cli.main(["hardware", "config", *JOB]) == 0
    assert "written: optimal_config.yaml" in capsys.readouterr().out
    assert yaml.safe_load((here / "optimal_config.yaml").read_text())["tuning"] == "full"


@pytest.mark.parametrize(
    ("name", "message"),
    [("there.yaml", "already exists"), ("a.json", "is YAML"), ("/nowhere/a.yaml", "does not exist")],
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_planned(here, capsys, name, message):
    (here / "there.yaml").write_text("")
    assert cli.main(["plan", "--output", name]) == 2
    assert message in capsys.readouterr().err


def test_a_background_run_without_a_file_takes_the_one_of_this_machine(here, capsys, monkeypatch):
    assert runs.main(["start"]) == 2
    assert "scu-trainer hardware config" in capsys.readouterr().err
    (here / "optimal_config.yaml").write_text("tuning: lora\noutput_dir: runs/mine\n")
    wishes = []
    monkeypatch.setattr(runs, "start", lambda wish, root, hands: wishes.append(wish) or _record())
    assert runs.main(["start", "--max_steps", "3"]) == 0
    assert wishes[0].name == "mine" and wishes[0].config.startswith("tuning: lora")
    assert "optimal_config.yaml is used, because there is no --config" in capsys.readouterr().out


def test_a_background_run_needs_no_file_where_flags_say_what_to_train(here, monkeypatch):
    wishes = []
    monkeypatch.setattr(runs, "start", lambda wish, root, hands: wishes.append(wish) or _record())
    assert runs.main(["start", "--dataset", "stdlib_docstrings", "--max_steps", "3"]) == 0
    assert wishes[0].name == "run" and wishes[0].flags == ("--dataset", "stdlib_docstrings", "--max_steps", "3")
    assert yaml.safe_load(wishes[0].config) == {}


def test_a_configuration_is_copied_in_utf_8_whatever_the_locale(here):
    (here / "job.yaml").write_text("# größer\nmax_steps: 3\n", encoding="utf-8")
    code = (
        "from scu_trainer.cli.background import runs; from types import SimpleNamespace as S; "
        "runs.start = lambda wish, *rest: print(ascii(wish.config)) or S(process=S(pid=1)); "
        "raise SystemExit(runs.main(['start', '--config', 'job.yaml']))"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(r"'# gr\xf6\xdfer\nmax_steps: 3\n'")


def _record():
    from types import SimpleNamespace

    return SimpleNamespace(process=SimpleNamespace(pid=1))
