"""Every seeded mistake is reported, and nothing is said of a healthy run."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from scu_trainer.cli import configuration
from scu_trainer.errors import PreflightError, UserError
from scu_trainer.models.loading.dispatch import FreeMemory
from scu_trainer.train.preflight import (
    CHECKS,
    MISTAKE_COUNT,
    Finding,
    before_loading,
    before_training,
    report,
    room,
)
from tests.train.seeded_mistakes import MISTAKES, Bench

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
IMAGES = {"dataset_size": 400}
SENSORS = {"sensor_samples": 400, "num_train_epochs": 56}
"""Fewer recordings for more epochs: as many steps as the recipe has."""

WORDS = "a shelf holds many old statistics about birds and trees of all kinds".split()
REPORTED_SHARE = 0.95


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module", autouse=True)
def without_credentials(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        yield


def looked_at(words: list[str], wanted: str = "") -> tuple[list[Finding], str]:
    """Findings of preflight, and the message of what was refused ("" if nothing was). Nothing is loaded any more where
    there is an error, or the finding ``wanted``."""
    findings: list[Finding] = []
    try:
        job = configuration.read_job(None, words)
        job.check()
        findings += before_loading(job)
        if any(finding.level == "error" or finding.check == wanted for finding in findings):
            return findings, ""
        parts = job.kind.load(job, Console(file=io.StringIO()))
        findings += before_training(job, parts, Path(job.training.output_dir))
    except UserError as error:
        return findings, str(error)
    return findings, ""


def alarms(findings: list[Finding]) -> list[str]:
    return [finding.line() for finding in findings if finding.level != "note"]


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(bench) -> dict[str, tuple[bool, str]]:
    """Whether each mistake was reported as expected, and what was said, by its id."""
    found = {}
    for mistake in MISTAKES:
        with pytest.MonkeyPatch.context() as patch:
            if mistake.free is not None:
                patch.setattr(room, "free_memory", lambda training, free=mistake.free: FreeMemory((), free))
                patch.setattr(room, "free_bytes", lambda path, free=mistake.free: free)
            findings, refusal = looked_at(bench.words(mistake.build(bench)), mistake.expected)
        said = "; ".join([*(finding.line() for finding in findings), refusal])
        ids = {finding.check for finding in findings}
        found[mistake.id] = (mistake.expected in (refusal if mistake.refused else ids), said)
    return found


def test_nearly_all_mistakes_are_reported(outcomes):
    table = Table("mistake", "from", "reported as", "")
    for mistake in MISTAKES:
        table.add_row(mistake.id, mistake.source, mistake.expected, "ok" if outcomes[mistake.id][0] else "MISSED")
    Console(width=110).print(table)
    reported = sum(is_reported for is_reported, _ in outcomes.values())
    assert len(outcomes) == len(MISTAKES) >= 30
    assert reported / len(MISTAKES) >= REPORTED_SHARE


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_a_mistake_is_reported(mistake, outcomes):
    is_reported, said = outcomes[mistake.id]
    assert is_reported, said
    assert mistake.refused or mistake.expected in CHECKS


def test_every_finding_of_a_mistake_says_where_and_what_to_do(bench):
    findings, _ = looked_at(bench.words({"learning_rate": 5e-6, "weight_decay": 10, "save_steps": 400}))
    told = [finding for finding in findings if finding.level != "note"]
    assert [finding.check for finding in told] == [
        "weight-decay-above-one",
        "no-checkpoint-before-end",
        "learning-rate-low",
    ]
    assert all(finding.what and finding.where and finding.fix for finding in told)
    assert json.loads(json.dumps([finding.as_dict() for finding in told]))[0]["where"] == "weight_decay"


# -- healthy runs ------------------------------------------------------------------------------------------------------


def test_nothing_is_said_of_a_healthy_run(bench):
    findings, refusal = looked_at(bench.words({"eval_strategy": "steps", "eval_steps": 10}))
    assert (alarms(findings), refusal) == ([], "")
    assert {finding.check for finding in findings} == {"plan-of-steps", "plan-of-rows"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_said_of_a_recipe_before_loading(path, tmp_path):
    job = configuration.read_job(recipe(path, tmp_path), ["--use_cpu", "true", "--output_dir", str(tmp_path / "run")])
    assert alarms(before_loading(job)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_said_of_a_recipe_before_training(path, bench, tmp_path):
    """Text recipes on a tiny model and small documents, the others on a part of their own data."""
    changes = {**of_family(path.stem, bench), "cache_dir": bench.folder / "cache", "output_dir": tmp_path / "run"}
    if path.stem == "device_map":
        changes |= {"cpu_mem": "300KB", "offload_folder": tmp_path / "offload"}
    flags = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    job = configuration.read_job(recipe(path, tmp_path), [*flags, "--use_cpu", "true"])
    job.check()
    parts = job.kind.load(job, Console(file=io.StringIO()))
    assert alarms(before_training(job, parts, tmp_path / "run")) == []


def of_family(name: str, bench: Bench) -> dict[str, Any]:
    """What makes a recipe small."""
    if name in ("resnet", "efficientnet"):
        return IMAGES
    if name in ("cifar10", "imagenet"):  # nothing is downloaded
        return {**IMAGES, "dataset": "digits", "image_size": 32}
    if name == "sensors":
        return SENSORS
    if name == "gru":
        words = random.Random(0)
        rows = ({"text": " ".join(words.choices(WORDS, k=12)), "category": f"room {i % 9}"} for i in range(2400))
        return {"dataset": bench.rows(rows)}
    return {"model_name_or_path": bench.model, "dataset": bench.documents, "block_size": 64}


def recipe(path: Path, folder: Path) -> str:
    """A copy that one process can read by itself: a launcher starts what names a DeepSpeed file."""
    entries = yaml.safe_load(path.read_text())
    entries.pop("deepspeed", None)
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(entries))
    return str(copy)


# -- the report --------------------------------------------------------------------------------------------------------

ERROR = Finding("error", "rate [zero]", "the rate is 0", "learning_rate", "raise it")
WARNING = Finding("warning", "batch-exceeds-rows", "a step takes 512 rows, " + "word " * 30, "batch", "lower it")
NOTE = Finding("note", "plan", "240 steps")


def printed(findings: list[Finding], policy: str) -> str:
    console = Console(file=io.StringIO(), width=80)
    report(findings, console, policy)
    return console.file.getvalue()


def test_the_report_of_nothing_is_one_line():
    assert printed([], "stop").splitlines() == [f"preflight: {MISTAKE_COUNT} checks, nothing found"]
    assert printed([NOTE], "stop").splitlines()[1].split() == ["note", "240", "steps"]
    assert printed([ERROR], "off") == ""


def test_the_report_fits_80_columns_and_shows_the_worst_first():
    lines = printed([NOTE, WARNING, ERROR], "warn").splitlines()
    assert lines[0] == "preflight: 1 error, 1 warning"
    assert max(map(len, lines)) <= 80
    words = " ".join(" ".join(lines).split())
    places = [words.index(part) for part in ("rate [zero]", "fix: raise it", "batch-exceeds-rows", "240 steps")]
    assert places == sorted(places)


def test_errors_stop_the_run_unless_told_otherwise():
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(
        PreflightError, match=r"found 2 errors: rate \[zero\]: the rate is 0; raise it \(1 more above\)"
    ):
        report([WARNING, ERROR, ERROR], console, "stop")
    assert "rate [zero]" in console.file.getvalue()
    report([WARNING, NOTE], console, "stop")
    report([ERROR], console, "warn")


def test_a_finding_is_one_line_and_cannot_be_changed():
    assert ERROR.line() == "error rate [zero]: the rate is 0 (learning_rate); raise it"
    assert NOTE.line() == "note plan: 240 steps"
    with pytest.raises(AttributeError):
        ERROR.level = "note"
