"""How a launcher is called on this machine: the command that a person would type, and its environment."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from scu_trainer.errors import RequirementError
from scu_trainer.hardware.probe import allowed_cores, free_port
from scu_trainer.shipped import ROOT

Launcher = Literal["python", "torchrun", "accelerate", "deepspeed"]
ON_CPU, ON_GPUS = "accelerate_configs/cpu_2_processes.yaml", "accelerate_configs/multi_gpu_bf16.yaml"
DEEPSPEED = "deepspeed.launcher.launch"


def command(launcher: Launcher, words: Sequence[str], processes: int, has_gpu: bool) -> list[str]:
    """Words to start scripts/train.py with ``words``, in ``processes`` processes of this machine. Raises
    RequirementError."""
    require_files()
    script, here = [str(ROOT / "scripts" / "train.py"), *words], Path(sys.executable).parent
    if launcher == "python":
        return [sys.executable, *script]
    if importlib.util.find_spec("torch" if launcher == "torchrun" else launcher) is None:
        raise RequirementError(f"{launcher} is not installed; pip install 'scu-trainer[{launcher}]'")
    count = str(processes)
    if launcher == "torchrun":
        return [str(here / "torchrun"), "--standalone", "--nproc_per_node", count, *script]
    if launcher == "accelerate":
        launch_file = str(ROOT / (ON_GPUS if has_gpu else ON_CPU))
        # "no": the run chooses the precision of this device itself, not every card has bf16.
        options = ["--config_file", launch_file, "--num_processes", count, "--mixed_precision", "no"]
        return [str(here / "accelerate"), "launch", *options, *script]
    # What the command deepspeed starts on one machine. That command dies of a SIGTERM and leaves the ranks training,
    # and takes the first GPUs whatever CUDA_VISIBLE_DEVICES says. Port 0: each rank would wait at another place.
    meeting = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    start = [sys.executable, "-u", "-m", DEEPSPEED, f"--world_info={_deepspeed_devices(processes, has_gpu)}"]
    return [*start, *meeting, *script]


def _deepspeed_devices(processes: int, has_gpu: bool) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if has_gpu else ""
    devices = visible.split(",")[:processes] if visible else list(range(processes))
    return base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()


def environment(processes: int, has_gpu: bool) -> dict[str, str]:
    """This process's own, with what launchers do not find out by themselves on a machine without a GPU."""
    found = dict(os.environ)
    found.setdefault("OMP_NUM_THREADS", str(max(1, allowed_cores() // processes)))
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', '')}"
    if not has_gpu:
        found["DS_ACCELERATOR"] = "cpu"
    return found


def processes_here(launcher: Launcher, gpus: int, asked: Optional[int] = None) -> int:
    """One per GPU; without one two under accelerate, which is there for several, and one under the others.

    Raises RequirementError for more processes than GPUs.
    """
    if asked is not None and gpus and asked > gpus:
        raise RequirementError(f"{asked} processes were asked for, and there are {gpus} GPUs; ask for {gpus} or less")
    return asked or gpus or (2 if launcher == "accelerate" else 1)


def require_files() -> None:
    if not (ROOT / "scripts" / "train.py").is_file() or not (ROOT / "ds_configs").is_dir():
        raise RequirementError(
            f"this starts scripts/train.py, which is missing beside ds_configs in {ROOT}; install scu-trainer "
            "again, or clone the repository and run it there"
        )
