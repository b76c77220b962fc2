"""Several seeds of one job: each trained once, whatever happens on the way, then mean and spread."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scu_trainer.cli import train
from scu_trainer.cli.comparison import seeds as command
from tests import processes, tiny

COMMAND = ("-m", "scu_trainer.cli.main")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [{"text": f"Row {i} has the value {i * 7919 % 1000}. " * 5} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.saved_llama(folder / "base")
    options = {
        "model_name_or_path": str(folder / "base"), "dataset": str(folder / "rows.jsonl"), "block_size": 64,
        "validation_split_percentage": 25, "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
        "learning_rate": 0.01, "use_cpu": True, "predict_memory": False, "report_to": "none", "preflight": "off",
        "sample_prompts": 0, "cache_dir": str(folder / "cache"), "mixed_precision": "no", "logging_steps": 1,
    }  # fmt: skip
    (folder / "job.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return folder / "job.yaml"


def kill_while_it_trains(words: list[str], run: Path, log: Path) -> psutil.Process:
    """Start the command, and kill it alone, as an out-of-memory killer does, while the run in ``run`` trains.

    Returns the process of that run, which lives on. It is suspended, so that it cannot finish before the command is
    started again, and no fork, since it is known again by its environment.
    """
    command = processes.Started([*COMMAND, *words], log, os.environ, from_nothing=run.name)
    try:
        _wait_until((run / "run.json").is_file, command, log)
        (left,) = [child for child in command.children() if str(run) in child.cmdline()]
        left.suspend()
    finally:
        command.kill()
        command.wait(60)
    return left


def start_again(words: list[str], left: psutil.Process, log: Path) -> str:
    """What the same command prints. ``left`` goes on as soon as it has been asked to stop."""
    command = processes.Started([*COMMAND, *words], log, os.environ)
    try:
        _wait_until(lambda: _is_asked_to_stop(left), command, log)
        left.resume()
        assert command.wait(200) == 0, log.read_text()[-3000:]
    finally:
        for process in (command, left):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return " ".join(log.read_text().split())


def _wait_until(is_so: Callable[[], bool], command: processes.Started, log: Path) -> None:
    end_s = time.monotonic() + 120
    while not is_so():
        assert command.poll() is None and time.monotonic() < end_s, log.read_text()[-3000:]
        time.sleep(0.02)


def _is_asked_to_stop(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for a suspended process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (waiting,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(waiting, 16) >> (signal.SIGTERM - 1) & 1)


def test_killed_in_the_middle_the_same_command_goes_on(job, tmp_path):
    words = ["train", "--config", str(job), "--seeds", "0", "1", "--output_dir", str(tmp_path / "out")]
    first, second = (tmp_path / "out" / "runs" / f"job-seed{seed}" for seed in (0, 1))
    left = kill_while_it_trains(words, second, tmp_path / "first.log")
    done = (first / "run.json").read_bytes()
    printed = start_again(words, left, tmp_path / "again.log")
    assert (first / "run.json").read_bytes() == done  # not trained again
    assert "its remaining runs write a checkpoint and stop: 1" in printed
    assert "finished runs kept: 1" in printed and "held-out bits over 2 seeds: mean" in printed
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [(run["seed"], run["status"]) for run in record["runs"]] == [(0, "finished"), (1, "finished")]
    assert record["verdict"].startswith("Mean ") and "over 2 seeds" in record["verdict"]


def test_one_that_fails_does_not_lose_the_others():
    metrics = {"held_out_bpt_before": 7.0, "held_out_bpt": 6.0, "best_held_out_bpt": 6.0, "steps": 4}
    runs = [
        {"seed": 0, "status": "finished", "error": None, "folder": "runs/job-seed0", "metrics": metrics},
        {"seed": 1, "status": "failed", "error": "exit code 2: no room", "folder": "-", "metrics": {}},
        {"seed": 2, "status": "finished", "error": None, "folder": "-", "metrics": {**metrics, "held_out_bpt": 8.0}},
    ]
    said = " ".join(command.seed_spread_lines(runs))
    # by hand: mean 7, standard deviation sqrt(2), t(0.975, 1) = 12.706 and sqrt(2) / sqrt(2) = 1
    assert "over 2 seeds: mean 7.000, standard deviation 1.414" in said and "-5.706 to 19.706" in said
    assert "2 seeds are few: the interval reaches 12.7 standard errors" in said
    assert command.seed_spread_lines(runs[1:2]) == ["0 of 1 seeds with a held-out figure: too few for a spread"]


def test_of_classifiers_the_spread_of_the_accuracy_comes_first(tmp_path):
    """By hand: 50 and 60 % have a standard deviation of 7.07 points, and t(0.975, 1) is 12.706."""
    metrics = [{"held_out_bpt": bits, "held_out_accuracy": share} for bits, share in ((6.0, 0.5), (8.0, 0.6))]
    runs = [{"seed": 0, "status": "finished", "error": None, "folder": "-", "metrics": found} for found in metrics]
    accuracy, bits, _ = command.seed_spread_lines(runs)
    assert accuracy.startswith("held-out accuracy over 2 seeds: mean 55.0%, standard deviation 7.1%, 95% t interval of")
    assert accuracy.endswith("the mean -8.5% to 118.5%") and bits.startswith("held-out bits over 2 seeds: mean 7.000")
    shown = command._table(runs)
    assert shown.columns[3].header == "accuracy after" and [*shown.columns[3].cells] == ["50.0%", "60.0%"]


@pytest.mark.parametrize(("documents", "code"), [(0, 0), (4, 1)])
def test_seeds_without_a_held_out_figure(job, tmp_path, monkeypatch, capsys, documents, code):
    """Where nothing is held out there is no spread, no seed holds out its own share, and a run that did what it was
    asked has not failed; a score that is not finite before and after training is another thing."""
    write = (
        "import json, sys; from pathlib import Path; folder = Path(sys.argv[sys.argv.index('--output_dir') + 1]);"
        "folder.mkdir(parents=True); (folder / 'run.json').write_text('{\"status\": \"finished\"}');"
        "(folder / 'training_config.json').write_text('{}');"
        f"(folder / 'scu_metrics.json').write_text('{{\"steps\": 6, \"held_out_documents\": {documents}}}')"
    )
    hands = command.comparison.ComparisonBackend(
        spawn=lambda words, *rest: command.comparison.spawn([sys.executable, "-c", write, *words], *rest)
    )
    monkeypatch.setattr(command.comparison, "ComparisonBackend", lambda: hands)
    words = ["--config", str(job), "--seeds", "0", "1", "--output_dir", str(tmp_path / "out")]
    assert train.main([*words, "--validation_split_percentage", "0"]) == code
    said = " ".join(capsys.readouterr().out.split())
    assert "0 of 2 seeds with a held-out figure" in said and ("holds out its own" in said) == (documents > 0)


def test_seeds_that_hold_out_the_same_rows_are_not_said_to_hold_out_their_own():
    """As recordings whose manifest says which are held out."""
    same, other = ({"status": "finished", "metrics": {"data_fingerprint": name}} for name in ("a", "b"))
    assert command.different_rows_note([same, same, {"status": "failed", "metrics": {}}]) == []
    for runs in ([same, other], [same, {"status": "finished", "metrics": {}}]):
        assert command.different_rows_note(runs)[0].startswith("each seed holds out its own share of the data, unless")


def test_brackets_in_an_error_are_shown_as_they_are(job, tmp_path, monkeypatch, capsys):
    program = [sys.executable, "-c", "print('error: no file data [/b]'); raise SystemExit(2)"]
    hands = command.comparison.ComparisonBackend(spawn=lambda words, *rest: command.comparison.spawn(program, *rest))
    monkeypatch.setattr(command.comparison, "ComparisonBackend", lambda: hands)
    words = ["--config", str(job), "--seeds", "0", "1", "--output_dir", str(tmp_path / "out")]
    assert train.main(words) == 1
    assert capsys.readouterr().out.count("[/b]") == 4  # a line and a row of each


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0", "1", "--seed", "3"], "seed and seeds are both given"),
        (["--seeds", "1", "1"], "give different ones"),
        (["--seeds", "a"], "invalid int value"),
        (["--seeds", "0", "1", "--push_to_hub", "--hub_model_id", "a/b"], "push_to_hub would overwrite each seed"),
    ],
)
def test_what_does_not_go_together_is_refused(job, words, message, capsys, tmp_path):
    assert train.main(["--config", str(job), "--output_dir", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_launcher_has_one_seed(job, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train.main(["--config", str(job), "--seeds", "0", "1"]) == 2
    assert "drop the launcher, or give one seed" in capsys.readouterr().err
