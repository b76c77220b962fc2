"""Words of a launcher's command; that they start what they say is seen by the tests that launch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scu_trainer.errors import RequirementError
from scu_trainer.runs import launch


@pytest.mark.parametrize(
    ("launcher", "gpus", "asked", "count"),
    [("accelerate", 0, None, 2), ("deepspeed", 0, None, 1), ("deepspeed", 4, None, 4), ("accelerate", 4, 2, 2)],
)
def test_processes(launcher, gpus, asked, count):
    assert launch.processes_here(launcher, gpus, asked) == count


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(RequirementError, match="3 processes were asked for, and there are 2 GPUs; ask for 2 or less"):
        launch.processes_here("deepspeed", 2, 3)


def test_commands():
    script = str(launch.ROOT / "scripts" / "train.py")
    assert launch.command("python", ["--x", "1"], 1, False) == [sys.executable, script, "--x", "1"]
    words = launch.command("torchrun", ["--x", "1"], 2, False)
    assert Path(words[0]).name == "torchrun" and words[1:] == [
        "--standalone",
        "--nproc_per_node",
        "2",
        script,
        "--x",
        "1",
    ]
    assert any(word.endswith("cpu_2_processes.yaml") for word in launch.command("accelerate", [], 2, False))
    assert any(word.endswith("multi_gpu_bf16.yaml") for word in launch.command("accelerate", [], 2, True))
    words = launch.command("deepspeed", [], 2, True)
    assert words[1:4] == ["--num_gpus", "2", "--master_port"] and int(words[4]) > 0


def test_a_launcher_that_is_missing(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequirementError, match=r"deepspeed is not installed; pip install 'scu-trainer\[deepspeed\]'"):
        launch.command("deepspeed", [], 1, False)


def test_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    with pytest.raises(RequirementError, match="clone the repository"):
        launch.command("python", [], 1, False)


def test_environment(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    found = launch.environment(10_000, has_gpu=False)
    assert (found["OMP_NUM_THREADS"], found["DS_ACCELERATOR"]) == ("1", "cpu")
    assert "DS_ACCELERATOR" not in launch.environment(1, has_gpu=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.environment(1, has_gpu=False)["OMP_NUM_THREADS"] == "7"
