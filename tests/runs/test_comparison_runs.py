"""A comparison runs, is killed, goes on: the real command on a training program without torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scu_trainer.runs.process import System, processes_with_token
from scu_trainer.runs.studies import comparison
from tests.runs import comparison_stand_in as stand_in

PATIENCE_S = 120.0


class Screen:
    def __init__(self) -> None:
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=80, highlight=False)

    @property
    def shown(self) -> str:
        return " ".join(self.text.getvalue().split())


def run(made, spawner=None, **more) -> tuple[int, str, list[str]]:
    """Exit code, what was shown, which runs were started."""
    screen, spawner = Screen(), spawner or stand_in.Spawner()
    return stand_in.start(made, screen.console, spawner, **more), screen.shown, spawner.started


def record(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("comparison.json", "comparison.md", "plan.json")}


def wait_until(holds, what: str) -> None:
    begun_s = time.monotonic()
    while not holds():
        assert time.monotonic() - begun_s < PATIENCE_S, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison that is done: its plan, and what was shown."""
    made = stand_in.plan(tmp_path_factory.mktemp("done") / "out")
    code, shown, started = run(made)
    assert code == 0, shown
    assert sorted(started) == sorted(f"{arm}-seed{seed}" for arm in ("none", "model") for seed in (0, 1, 2))
    return made, shown


def test_table_and_files(finished):
    made, shown = finished
    assert "model: lower than none by 0.550 (0.426 to 0.674)" in shown
    found = record(made.folder)
    assert [run["status"] for run in found["runs"]] == ["finished"] * 6
    assert found["budget"] == {"steps": stand_in.STEPS, "tokens": 600}
    assert found["runs"][0]["folder"] == "runs/none-seed0" and (made.folder / "runs" / "none-seed0").is_dir()
    assert "| model | 3/3 |" in (made.folder / "comparison.md").read_text()


def test_a_second_time_runs_nothing_and_says_the_same(finished):
    made, shown = finished
    path = made.folder / "comparison.json"
    path.write_text(path.read_text().replace(record(made.folder)["updated"], "2026-01-01T00:00:00+00:00"))
    before = files(made.folder)
    code, again, started = run(replace(made, threads=4))
    assert (code, started) == (0, [])
    assert "threads per run: 1, as when this comparison started" in again
    assert files(made.folder) == before
    table = "2 arms, seeds 0 1 2"
    assert again.partition(table)[2] == shown.partition(table)[2] != ""


def test_another_folder_gives_the_same_table(finished, tmp_path):
    made, _ = finished
    other = stand_in.plan(tmp_path / "other")
    assert run(other, jobs=3)[0] == 0
    assert record(other.folder)["table"] == record(made.folder)["table"]
    assert (other.folder / "comparison.md").read_bytes() == (made.folder / "comparison.md").read_bytes()


def test_a_failed_run_is_a_row_and_is_tried_again_only_when_asked(tmp_path, capsys):
    arms = {**stand_in.ARMS, "bad": {"lift": 0.0, "behave": "refuse"}}
    made = stand_in.plan(tmp_path / "out", arms, seeds=(0, 1, 2))
    code, shown, _ = run(made)
    assert code == 1
    assert "bad: too few seeds to judge: 0 of at least 3; seed 0 failed: exit code 2: the disk is full" in shown
    assert "Not complete: 6 of 9 runs are finished, 3 failed." in shown
    row = record(made.folder)["table"][2]
    assert (row["arm"], row["finished"], row["asked"], row["held_out_bpt"]) == ("bad", 0, 3, None)
    code, shown, started = run(made)
    assert (code, started) == (1, [])
    assert "runs that failed before: 3; --retry_failed tries them again" in shown
    spawner = stand_in.Spawner()
    assert run(replace(made, threads=4), spawner, retry_failed=True)[0] == 1
    assert spawner.started == ["bad-seed0", "bad-seed1", "bad-seed2"] and spawner.threads == {"1"}


def test_a_run_that_trained_other_tokens_is_left_out(tmp_path):
    arms = {**stand_in.ARMS, "short": {"lift": -1.0, "tokens": 500}}
    made = stand_in.plan(tmp_path / "out", arms, seeds=(0, 1, 2))
    code, shown, _ = run(made)
    assert code == 1
    assert "seed 0 left out: it trained 500 tokens, none 600" in shown
    assert "short" not in record(made.folder)["verdict"].partition("Not judged")[0]


def test_one_comparison_per_folder(tmp_path, capsys):
    made = stand_in.plan(tmp_path / "out")
    holder = f"import sys, time; from scu_trainer.runs.queue import FileLock; FileLock(__import__('pathlib').Path({str(made.folder / comparison.LOCK_FILE)!r})).acquire(); print('held', flush=True); time.sleep(60)"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            code, _, started = run(made)
        finally:
            other.kill()
    assert (code, started) == (2, [])
    assert "another comparison is running in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arms", "seeds", "words"),
    [
        ({**stand_in.ARMS, "model": {"lift": 0.1}}, (0, 1, 2), "lift was 0.0, now 0.1 (arm model)"),
        (stand_in.ARMS, (0, 1), "seeds were 0 1 2, now 0 1"),
        ({**stand_in.ARMS, "more": {"lift": 0.1}}, (0, 1, 2), "arms were none model, now none model more"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(finished, capsys, arms, seeds, words):
    folder = finished[0].folder
    before = files(folder)
    code, _, started = run(stand_in.plan(folder, arms, seeds))
    assert (code, started) == (2, [])
    assert words in capsys.readouterr().err
    assert files(folder) == before


def test_a_run_of_other_settings_is_refused_and_so_is_a_folder_of_others(tmp_path, capsys):
    made = stand_in.plan(tmp_path / "out", seeds=(0,))
    run(made)
    path = made.folder / "runs" / "model-seed0" / "training_config.json"
    content = json.loads(path.read_text())
    content["configuration"]["lift"] = 3.0
    path.write_text(json.dumps(content))
    assert run(made)[0] == 2
    assert "with other settings than arm model: lift was 3.0, now 0.0" in capsys.readouterr().err
    assert run(stand_in.plan(tmp_path))[0] == 2
    assert "holds other files (out); give another --output_dir" in capsys.readouterr().err


# -- interrupted -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(folder: Path):
    """The command in a process of its own, in the middle of its second run."""
    words = [sys.executable, stand_in.__file__, str(folder)]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        second = folder / "runs" / "model-seed0" / "run.json"
        wait_until(lambda: second.is_file() and json.loads(second.read_text())["step"] == 3, "the second run")
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def go_on(folder: Path) -> str:
    """The same command to its end. Returns what it showed."""
    words = [sys.executable, stand_in.__file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def begins(folder: Path, name: str) -> list[int]:
    """At which steps a run began, in order."""
    said = (folder / "console" / f"{name}.log").read_text().splitlines()
    return [int(line.rpartition(" ")[2]) for line in said if line.startswith("begins at")]


def of(folder: Path) -> list:
    return processes_with_token(comparison.comparison_token(folder), System())


def test_killed_in_the_middle_it_goes_on_with_what_was_done(tmp_path):
    folder = tmp_path / "out"
    with command(folder) as process:
        process.kill()
        process.wait()
        assert len(of(folder)) == 1  # the run goes on alone
        shown = go_on(folder)
    assert "its remaining runs write a checkpoint and stop: 1" in shown
    assert "finished runs kept: 1; runs that resume from their checkpoints: 1" in shown
    assert begins(folder, "none-seed0") == [0]
    assert begins(folder, "model-seed0") == [0, 3]
    found = record(folder)
    assert [run["status"] for run in found["runs"]] == ["finished"] * 4
    assert of(folder) == []


def test_stopped_by_request_it_writes_checkpoints_and_goes_on(tmp_path):
    folder = tmp_path / "out"
    with command(folder) as process:
        process.send_signal(signal.SIGTERM)
        shown = " ".join(process.stdout.read().split())
        assert process.wait(PATIENCE_S) == 3
    assert of(folder) == []
    assert "stopped: 3 of 4 runs are not done; run the same command to continue" in shown
    state = json.loads((folder / "runs" / "model-seed0" / "checkpoint.json").read_text())
    assert state == {"step": 3, "signals": 1}
    runs = record(folder)["runs"]
    assert [run["status"] for run in runs] == ["finished", "missing", "missing", "missing"]
    go_on(folder)
    assert begins(folder, "none-seed0") == [0] and begins(folder, "model-seed0") == [0, 3]
