"""Sizes of a job: what a typed mode replaces, what the full run is said to take, and how that is printed."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console

from scu_trainer.cli import configuration, modes
from scu_trainer.cli.modes import ModeMeasurement, measure_in_this_process
from scu_trainer.settings.tasks import KINDS
from scu_trainer.train.session import test_run as trying_out
from tests import tiny

ROOT = Path(__file__).parents[2]
SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]
FIGURES = {
    "rows": 1200,
    "steps": 1500,
    "load_s": 1.0,
    "first_steps_s": 1.0,
    "seconds_per_step": 0.25,
    "evaluations": 3,
    "evaluation_s": 2.04,
    "peak_bytes": 3 * 2**29,
    "total_s": 379.0,
}


def job_of(*words, config=None):
    return configuration.read_job(config, [*map(str, words), "--use_cpu", "true"])


# -- a mode in the file, and one that is typed -------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"dataset_size": 80, "block-size": 256, "max_steps": 240, "logging_steps": 7}))
    return str(path)


def test_a_typed_mode_stands_over_the_file_and_says_what_it_replaced(recipe):
    job = job_of("--mode", "tiny", config=recipe)
    tiny_values = KINDS["text-generation"].modes["tiny"]
    assert (job.data.dataset_size, job.data.block_size) == (tiny_values["dataset_size"], tiny_values["block_size"])
    assert job.training.max_steps == -1 and job.training.num_train_epochs == 1
    assert job.training.logging_steps == 7, "what the mode does not name is the file's"
    (note,) = [note for note in job.notes if note.startswith("mode")]
    assert (
        note
        == f"mode tiny overrides {recipe}: dataset_size 40 instead of 80, block_size 128 instead of 256, max_steps "
        "-1 instead of 240"
    )


def test_a_typed_value_stands_over_a_typed_mode(recipe):
    job = job_of("--mode=tiny", "--max_steps", 5, "--block_size=64", config=recipe)
    assert (job.training.max_steps, job.data.block_size, job.data.dataset_size) == (5, 64, 40)
    assert job.notes[-1] == f"mode tiny overrides {recipe}: dataset_size 40 instead of 80"


def test_a_mode_of_the_file_stands_under_the_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("mode: tiny\nblock_size: 256\n")
    job = job_of(config=str(path))
    assert (job.data.block_size, job.data.dataset_size) == (256, 40)
    assert not [note for note in job.notes if note.startswith("mode")]


def test_a_typed_mode_replaces_one_of_the_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("mode: extended\nblock_size: 256\n")
    job = job_of("--mode", "tiny", config=str(path))
    assert (job.task.mode, job.data.block_size) == ("tiny", 128)


def test_all_that_there_is_takes_the_place_of_a_cap(recipe):
    job = job_of("--mode", "standard", config=recipe)
    assert job.data.dataset_size is None
    assert any("dataset_size the default instead of 80" in note for note in job.notes)


@pytest.mark.parametrize("task", KINDS)
def test_standard_is_what_a_job_is_without_a_mode(task):
    shown = {name: value for name, value in job_of("--task", task, "--mode", "standard").as_dict().items()}
    assert {**shown, "mode": None} == job_of("--task", task).as_dict()


@pytest.mark.parametrize("task", KINDS)
def test_modes_name_one_set_of_fields_and_let_epochs_count(task):
    groups = KINDS[task].modes
    assert list(groups) == list(modes.ALL_MODES)
    for group in groups.values():
        assert group["max_steps"] == -1 and {"num_train_epochs", "dataset_size"} <= {*group}
    epochs = [group["num_train_epochs"] for group in groups.values()]
    assert epochs == sorted(epochs) and epochs[0] == 1


@pytest.mark.parametrize(
    "recipe", sorted({path.name for path in (ROOT / "recipes").glob("*.yaml")} - {"deepspeed.yaml"})
)
def test_every_recipe_has_a_tiny_size(recipe):
    """But that of DeepSpeed, which would make this process one of its ranks."""
    job = job_of("--mode", "tiny", config=str(ROOT / "recipes" / recipe))
    job.check()
    assert job.training.num_train_epochs == 1 and job.training.max_steps == -1


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """40 texts of uneven lengths on a tiny model, one row each."""
    folder = tmp_path_factory.mktemp("modes")
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}. " * (1 + i % 7)} for i in range(60)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"model_name_or_path": tiny.saved_llama(folder / "model"), "dataset": folder / "documents.jsonl"}
    words |= {"cache_dir": folder / "cache", "output_dir": folder / "run", "use_cpu": "true"}
    words |= {"per_device_train_batch_size": 2, "packing": "false", "validation_split_percentage": 20}
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def test_a_few_real_steps_give_the_length_of_the_full_run(flags):
    figures = measure_in_this_process("tiny", None, [*flags, "--eval_strategy", "epoch", "--num_train_epochs", "3"])
    assert figures["rows"] > 30 and figures["steps"] == 3 * math.ceil(figures["rows"] / 2)
    assert figures["evaluations"] == 3 + 2
    assert 0 < figures["seconds_per_step"] < 5 and figures["peak_bytes"] > 2**27
    train_s = figures["first_steps_s"] + (figures["steps"] - trying_out.STEPS) * figures["seconds_per_step"]
    evaluations_s = figures["evaluations"] * figures["evaluation_s"]
    assert figures["total_s"] == pytest.approx(figures["load_s"] + train_s + evaluations_s)
    assert not Path(flags[flags.index("--output_dir") + 1]).exists()


def test_batches_of_equal_tokens_are_counted_as_they_will_run(flags):
    """Rows alone would tell another number of steps."""
    more = [*flags, "--curriculum", "token_budget", "--token_budget", "64"]
    figures = measure_in_this_process("tiny", None, more)
    job = configuration.read_job(None, [*more, "--mode", "tiny"])
    quiet = trying_out.Console(quiet=True)
    trainer = trying_out.build_trainer(job, job.kind.load(job, quiet), None, quiet)
    assert figures["steps"] == len(trainer.get_train_dataloader()) != job.planned_steps(figures["rows"])


def test_the_peak_is_that_of_the_device_that_trained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and use_cpu is set
    job = SimpleNamespace(training=SimpleNamespace(device=torch.device("cpu"), output_dir="."))
    console = Console(file=io.StringIO())
    known = {field.name: FIGURES[field.name] for field in dataclasses.fields(trying_out.Estimate)}
    trying_out._print_estimate(console, trying_out.Estimate(**known), True, 0, job)
    assert "peak memory of this process 1.50 GiB" in console.file.getvalue()


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_the_table_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert modes.report(["tiny", "standard"], lambda mode: ModeMeasurement(mode, FIGURES), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [
        line
        for line in lines
        if "standard" in line and "1,500" in line and "3 x 2.0 s" in line and "6 min 19 s" in line
    ]


def test_a_mode_that_cannot_run_says_why_beside_the_others(capsys):
    found = {
        "tiny": ModeMeasurement("tiny", FIGURES),
        "extended": ModeMeasurement("extended", None, "block_size 1024 is too long"),
    }
    assert modes.report(["tiny", "extended"], found.get, as_json=False) == 2
    printed = capsys.readouterr().out
    assert "6 min 19 s" in printed and "extended: block_size 1024 is too long" in printed


def test_what_no_mode_takes_is_said_once(capsys):
    assert (
        modes.report(["tiny", "standard"], lambda mode: ModeMeasurement(mode, None, "no such file"), as_json=False) == 2
    )
    assert capsys.readouterr().out == "tiny, standard: no such file\n"


def test_what_a_mode_replaced_in_the_file_stands_below_the_table(flags, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("block_size: 96\n")
    figures = measure_in_this_process("tiny", str(tmp_path / "job.yaml"), flags)
    assert modes.report(["tiny"], lambda mode: ModeMeasurement(mode, figures), as_json=False) == 0
    assert f"mode tiny overrides {tmp_path / 'job.yaml'}: block_size 128 instead of 96" in capsys.readouterr().out


def test_as_json(capsys):
    found = {"tiny": ModeMeasurement("tiny", FIGURES), "standard": ModeMeasurement("standard", None, "no")}
    assert modes.report(["tiny", "standard"], found.get, as_json=True) == 2
    assert json.loads(capsys.readouterr().out) == {"tiny": FIGURES, "standard": {"error": "no"}}


def test_each_mode_is_a_fresh_process_and_its_last_words_are_the_reason(monkeypatch):
    asked = []

    def start(command, **options):
        asked.append(command)
        if "standard" in command:
            return modes.subprocess.CompletedProcess(command, 2, "", "a warning\nerror: no such thing\n")
        return modes.subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps(FIGURES)}\n", "")

    monkeypatch.setattr(modes.subprocess, "run", start)
    assert modes.measure_in_new_process("tiny", ["--lora_r", "4"]) == ModeMeasurement("tiny", FIGURES)
    assert modes.measure_in_new_process("standard", []) == ModeMeasurement("standard", None, "no such thing")
    assert asked[0][1:] == ["-m", "scu_trainer.cli.modes", "--measure", "--mode", "tiny", "--lora_r", "4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "tinny"], "did you mean 'tiny'?"),
        (["--mode"], "--mode"),
        (["--x"], "unknown option --x; --help lists the options\n"),
        (["--mod", "tiny"], "unknown option --mod (did you mean '--mode'?)"),
    ],
)
def test_wrong_words_end_with_2(monkeypatch, capsys, words, message):
    monkeypatch.setattr(modes.subprocess, "run", lambda *a, **k: pytest.fail("measured before the words were read"))
    assert modes.main(words) == 2
    assert message in capsys.readouterr().err
