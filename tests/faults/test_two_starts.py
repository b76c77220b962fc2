"""Several starts on one directory: at once, one after the other, and with settings that have changed since."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from scu_trainer.run_files import read_json
from tests.faults import campaign
from tests.faults.campaign import Child, Ended, until
from tests.faults.test_kills import same_result


def started(words: list[str], log: Path) -> Ended:
    return Child(lambda: campaign.train(words), log).wait()


def begun(words: list[str], log: Path, text: str) -> str:
    """What a start had said when ``text`` stood there; it is killed then."""
    child = Child(lambda: campaign.train(words), log)
    with campaign.never_left_behind([child]):
        until(child, text)
    return log.read_text()


def waiting(words: list[str], log: Path, for_file: Path) -> Child:
    """A start that stands still in step 8 until ``for_file`` is there, or something kills it."""

    def stand_still() -> None:
        print("standing still", flush=True)
        while not for_file.exists():
            time.sleep(0.005)

    def act() -> int:
        campaign.at_step(8, stand_still)
        return campaign.train(words)

    return Child(act, log)


@pytest.fixture(scope="module")
def stopped(site, tmp_path_factory) -> Path:
    """A run that was killed in step 8."""
    folder = tmp_path_factory.mktemp("stopped")
    child = waiting(site.flags(folder / "run"), folder / "log", folder / "never")
    with campaign.never_left_behind([child]):
        until(child, "standing still")
    return folder / "run"


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# -- at once -----------------------------------------------------------------------------------------------------------


def test_the_second_is_refused_and_the_first_goes_on(site, tmp_path):
    run, words = tmp_path / "run", site.flags(tmp_path / "run")
    first = waiting(words, tmp_path / "first", tmp_path / "go")
    with campaign.never_left_behind([first]):
        until(first, "standing still")
        before = contents(run)
        second = started(words, tmp_path / "second")
        assert second.code == 2 and f"{run} is being written by process {first.pid}" in second.said, second.said
        beside = begun([*words, "--no_resume"], tmp_path / "third", "documents:")
        assert f"{run} already holds a run; this one goes to {tmp_path / 'run-2'}" in beside
        assert contents(run) == before
        (tmp_path / "go").touch()
        ended = first.wait()
    assert ended.code == 0, ended.said
    same_result(site, run)


def test_a_dead_process_and_its_workers_keep_nobody_out(site, tmp_path):
    run, words = tmp_path / "run", site.flags(tmp_path / "run", dataloader_num_workers=1)
    first = waiting(words, tmp_path / "first", tmp_path / "never")
    with campaign.never_left_behind([first]):
        until(first, "standing still")
        (worker,) = psutil.Process(first.pid).children(recursive=True)
        worker.suspend()  # it lives until the second start is over
        first.kill(signal.SIGKILL)
        first.wait()
    try:
        assert (run / "_run.lock").read_text().strip() == str(first.pid)
        ended = started(site.flags(run), tmp_path / "second")
        assert worker.is_running()
    finally:
        worker.kill()
    assert ended.code == 0 and f"resuming from {run / 'checkpoint-6'} (--no_resume starts over)" in ended.said, (
        ended.said
    )
    same_result(site, run)


# -- one after the other -----------------------------------------------------------------------------------------------


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_finished_run_is_never_overwritten(site, tmp_path):
    run = Path(shutil.copytree(site.whole, tmp_path / "run"))
    said = begun(site.flags(run), tmp_path / "log", "documents:")
    assert f"{run} already holds a run; this one goes to {tmp_path / 'run-2'}" in said
    assert contents(run) == contents(site.whole)


def test_other_settings_go_beside_and_are_named(site, run, tmp_path):
    before = contents(run)
    said = begun(site.flags(run, lora_r=4, seed=1), tmp_path / "log", "documents:")
    line = next(line for line in said.splitlines() if str(run) in line)
    assert "lora_r 32, now 4" in line and "seed 42, now 1" in line and f"this one goes to {tmp_path / 'run-2'}" in line
    assert contents(run) == before


def test_settings_that_change_no_weight_do_not_matter(site, run, tmp_path):
    ended = started(site.flags(run, logging_steps=3, save_steps=6, grace_period_s=30), tmp_path / "log")
    assert ended.code == 0 and f"resuming from {run / 'checkpoint-6'}" in ended.said, ended.said
    assert "changed since" not in ended.said
    same_result(site, run)


def test_what_the_checkpoint_carries_is_said_and_true(site, run, tmp_path):
    changed = {"learning_rate": 0.02, "weight_decay": 0.1, "resume_from_checkpoint": "auto"}
    ended = started(site.flags(run, **changed), tmp_path / "log")
    for change in ("learning_rate was 0.01, now 0.02", "weight_decay was 0.0, now 0.1"):
        assert f"changed since checkpoint-6: {change}: no effect" in ended.said, ended.said
    assert ended.code == 0
    assert read_json(run / "training_config.json")["configuration"]["learning_rate"] == 0.01
    same_result(site, run)


def test_taken_back_to_an_earlier_checkpoint_it_comes_to_the_same_end(site, run, tmp_path):
    words = site.flags(run, resume_from_checkpoint=run / "checkpoint-3")
    ended = started(words, tmp_path / "log")
    assert ended.code == 0 and "step  4/12" in ended.said and "checkpoint-6" in ended.said, ended.said
    assert (run / "superseded-checkpoint-6" / "manifest.json").is_file()
    same_result(site, run)


@pytest.mark.parametrize("wanted", ["auto", "checkpoint-3"])
def test_another_shape_is_refused_and_nothing_is_touched(site, run, tmp_path, wanted):
    before = read_json(run / "training_config.json")
    wanted = wanted if wanted == "auto" else run / wanted
    ended = started(site.flags(run, lora_r=4, resume_from_checkpoint=wanted), tmp_path / "log")
    assert ended.code == 2 and "lora_r was 32, now 4" in ended.said and "Traceback" not in ended.said, ended.said
    assert read_json(run / "training_config.json") == before
    assert (run / "checkpoint-6").is_dir()


def test_other_data_under_the_same_name_are_found(site, run, tmp_path):
    """Also by the run that goes on unasked: no setting has changed."""
    documents = tmp_path / "documents.jsonl"
    lines = site.documents.read_text().splitlines(keepends=True)
    documents.write_text("".join(lines[::-1]))
    settings = read_json(run / "training_config.json")["configuration"]
    for path in run.rglob("*.json"):
        path.write_text(path.read_text().replace(settings["dataset"], str(documents)))
    for folder in run.glob("checkpoint-*"):
        assert (folder / "manifest.json").is_file()
    said = begun(site.flags(run, dataset=documents), tmp_path / "log", "changed since checkpoint-6: data was ")
    assert "rows may be seen twice or not at all" in said and f"resuming from {run}" in said


def test_killed_before_anything_was_saved_it_starts_again_there(site, tmp_path):
    run, words = tmp_path / "run", site.flags(tmp_path / "run", save_steps=100)

    def act() -> int:
        campaign.at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return campaign.train(words)

    assert Child(act, tmp_path / "log").wait().code == -signal.SIGKILL
    said = begun(words, tmp_path / "log", "documents:")
    assert f"{run} holds a run without a usable checkpoint; it starts over there" in said
    assert not (tmp_path / "run-2").exists()
