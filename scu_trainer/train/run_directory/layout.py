"""The directory that a run writes: its name, its description before the first step, and its status during training."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Optional

import torch
from transformers import TrainerCallback

from scu_trainer.hardware import cgroup
from scu_trainer.hardware.probe import accelerators, installed_version, ram_bytes
from scu_trainer.hardware.profile import cpu as profiled_cpu
from scu_trainer.run_files import RunStatus
from scu_trainer.train.run_directory.console import seconds_left
from scu_trainer.train.run_directory.run_lock import holds_nothing

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "scu-trainer")


def free_name(output_dir: Path) -> Path:
    """Return the first free one of ``output_dir``, output_dir-2, output_dir-3, ...: a run never overwrites another."""
    candidate, number = output_dir, 2
    while candidate.exists() and not holds_nothing(candidate):
        candidate, number = output_dir.with_name(f"{output_dir.name}-{number}"), number + 1
    return candidate


def names_in_use(output_dir: Path) -> list[Path]:
    """Return those of output_dir, output_dir-2, output_dir-3, ... that exist, with or without gaps."""
    pattern = re.compile(re.escape(output_dir.name) + r"(-[1-9]\d*)?")
    siblings = output_dir.parent.iterdir() if output_dir.parent.is_dir() else ()
    return [path for path in siblings if pattern.fullmatch(path.name) and path.is_dir()]


def versions() -> dict[str, Optional[str]]:
    packages = {package: installed_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the hardware of a training, in words and bytes. ``device``: of the weights; ``gpus``: all visible GPUs."""
    cpu = profiled_cpu()
    return {
        "device": device.type,
        "cpu": cpu.name,
        "cores": cpu.usable,
        "threads": torch.get_num_threads(),
        "ram_bytes": min(ram_bytes()[0], cgroup.memory_limit_bytes() or math.inf),
        "gpus": [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in accelerators()],
    }


def git_commit() -> Optional[str]:
    """Return the commit of the checkout that this package runs from; None if it was installed in another way."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


class RunStatusCallback(TrainerCallback):
    """Keeps run.json up to date: step, loss and remaining time, at most once a second."""

    def __init__(self, status: RunStatus) -> None:
        self.status = status
        self._started_s = 0.0
        self._first_step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._started_s, self._first_step = time.monotonic(), state.global_step
        self.status.update(status="running", pid=os.getpid(), step=state.global_step, max_steps=state.max_steps)
        self.status.flush()  # a run that resumes from an earlier step must not show its previous step

    def on_step_end(self, args, state, control, **kwargs):
        eta_s = seconds_left(state, self._first_step, self._started_s)
        self.status.update(step=state.global_step, max_steps=state.max_steps, eta_s=eta_s)

    def on_log(self, args, state, control, logs: Optional[dict[str, Any]] = None, **kwargs):
        if logs and "loss" in logs:
            self.status.update(loss=logs["loss"])
