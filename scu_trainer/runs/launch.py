"""The command with which each launcher starts training on this machine, and the environment of that command."""

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
    """Return the command that starts scripts/train.py with the arguments ``words`` in ``processes`` processes of this
    machine. Raises RequirementError if the launcher or a file that it needs is missing."""
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
        # "no": the run itself chooses the precision for its device, because not every GPU supports bf16.
        options = ["--config_file", launch_file, "--num_processes", count, "--mixed_precision", "no"]
        return [str(here / "accelerate"), "launch", *options, *script]
    # Starts the module that the deepspeed command would start on one machine. The command itself leaves the ranks
    # running when it receives SIGTERM, and ignores CUDA_VISIBLE_DEVICES. The port must be fixed: with port 0 each rank
    # would wait at a different one.
    rendezvous = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    start = [sys.executable, "-u", "-m", DEEPSPEED, f"--world_info={_deepspeed_devices(processes, has_gpu)}"]
    return [*start, *rendezvous, *script]


def _deepspeed_devices(processes: int, has_gpu: bool) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if has_gpu else ""
    devices = visible.split(",")[:processes] if visible else list(range(processes))
    return base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()


def environment(processes: int, has_gpu: bool) -> dict[str, str]:
    """Return the environment of this process, plus the variables that launchers do not set correctly themselves."""
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, allowed_cores() // processes)))
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    if not has_gpu:
        variables["DS_ACCELERATOR"] = "cpu"
    return variables


def processes_here(launcher: Launcher, gpus: int, asked: Optional[int] = None) -> int:
    """Return the number of processes to start: ``asked`` if given, else one per GPU. Without a GPU it is two under
    accelerate, which is meant for several processes, and one under the other launchers.

    Raises RequirementError if more processes than GPUs are asked for.
    """
    if asked is not None and gpus and asked > gpus:
        raise RequirementError(
            f"{asked} processes were requested, but the number of GPUs is {gpus}; request {gpus} or fewer"
        )
    return asked or gpus or (2 if launcher == "accelerate" else 1)


def require_files() -> None:
    if not (ROOT / "scripts" / "train.py").is_file() or not (ROOT / "ds_configs").is_dir():
        raise RequirementError(
            f"this command starts scripts/train.py, but {ROOT} does not contain both that file and ds_configs; install "
            "scu-trainer again, or clone the repository and run the command there"
        )
