"""Several seeds of one job: each trained once, whatever happens on the way, then mean and spread."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

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
        "cache_dir": str(folder / "cache"), "mixed_precision": "no", "logging_steps": 1,
    }  # fmt: skip
    (folder / "job.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return folder / "job.yaml"


def _kill_when(words: list[str], is_so) -> None:
    """Start the command, and kill it alone, as an out-of-memory killer does: what it started lives on, and is known
    again by its command line, so here nothing is forked."""
    process = subprocess.Popen([sys.executable, *COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.02)
    process.kill()
    process.wait()


def _run(words: list[str]) -> processes.Done:
    return processes.launch([*COMMAND, *words])


def test_killed_in_the_middle_the_same_command_goes_on(job, tmp_path):
    words = ["train", "--config", str(job), "--seeds", "0", "1", "--output_dir", str(tmp_path / "out")]
    first, second = (tmp_path / "out" / "runs" / f"job-seed{seed}" for seed in (0, 1))
    _kill_when(words, lambda: (second / "run.json").is_file())
    done = (first / "run.json").read_bytes()
    ended = _run(words)
    assert ended.returncode == 0, ended.stderr
    assert (first / "run.json").read_bytes() == done  # not trained again
    printed = " ".join(ended.stdout.split())
    assert "finished runs that are kept: 1" in printed and "held-out bits over 2 seeds: mean" in printed
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
    said = " ".join(command.spread(runs))
    # by hand: mean 7, standard deviation sqrt(2), t(0.975, 1) = 12.706 and sqrt(2) / sqrt(2) = 1
    assert "over 2 seeds: mean 7.000, standard deviation 1.414" in said and "-5.706 to 19.706" in said
    assert "2 seeds are few: the interval reaches 12.7 standard errors" in said
    assert command.spread(runs[1:2]) == ["0 of 1 seeds with a held-out figure: too few for a spread"]


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
