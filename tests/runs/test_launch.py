"""Words of a launcher's command; that they start what they say is seen by the tests that launch."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scu_trainer.errors import RequirementError
from scu_trainer.runs import launch
from tests.runs.test_process import until

PATIENCE_S = 120.0
RANK = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
signal.signal(signal.SIGTERM, lambda *_: ((folder / "SIGTERM").touch(), sys.exit(3)))
(folder / "ready").touch()
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("launcher", "gpus", "asked", "count"),
    [("accelerate", 0, None, 2), ("deepspeed", 0, None, 1), ("deepspeed", 4, None, 4), ("accelerate", 4, 2, 2)],
)
def test_processes(launcher, gpus, asked, count):
    assert launch.processes_here(launcher, gpus, asked) == count


def test_more_processes_than_gpus_are_refused():
    said = "3 processes were requested, but the number of GPUs is 2; request 2 or fewer"
    with pytest.raises(RequirementError, match=said):
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


@pytest.mark.parametrize(
    ("visible", "has_gpu", "devices"),
    [("", True, [0, 1]), ("2,3,5", True, ["2", "3"]), ("2,3", False, [0, 1])],
)
def test_deepspeed_takes_the_gpus_that_are_visible(monkeypatch, visible, has_gpu, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = launch.command("deepspeed", [], 2, has_gpu)
    (world,) = (word.partition("=")[2] for word in words if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": devices}
    assert int(words[words.index("--master_port") + 1]) > 0


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_signal_of_a_launcher_reaches_the_ranks(monkeypatch, tmp_path, launcher):
    """As runs stop and a preemption send it; a rank that does not get it trains on without its launcher."""
    pytest.importorskip("torch" if launcher == "torchrun" else launcher)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(RANK)
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    words = launch.command(launcher, [str(tmp_path)], 1, False)
    with subprocess.Popen(words, env=launch.environment(1, False)) as started:
        until((tmp_path / "ready").exists, PATIENCE_S)
        started.terminate()
        until((tmp_path / "SIGTERM").exists, PATIENCE_S)


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
