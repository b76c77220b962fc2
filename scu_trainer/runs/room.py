"""Find the devices of this machine, and check whether enough of its memory and of a GPU's memory is free to start."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from scu_trainer.errors import RequirementError
from scu_trainer.hardware import cgroup
from scu_trainer.hardware.probe import ask_driver, ram_bytes, usable_cores

CPU = "cpu"
GPU = "gpu-"

Ask = Callable[[Sequence[str]], Optional[str]]
"""Takes the arguments of nvidia-smi and returns its output, or None if there is none."""


def devices(environment: Mapping[str, str] = os.environ, ask: Ask = ask_driver) -> list[str]:
    """Return the names of the devices: GPUs as "gpu-0", or with their name in CUDA_VISIBLE_DEVICES; otherwise "mps" on
    a Mac with an Apple GPU, else "cpu"."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    listed = [line for line in (ask(["-L"]) or "").splitlines() if re.match(r"GPU \d+:", line)]
    if listed:
        names = visible.split(",") if visible is not None else [str(index) for index in range(len(listed))]
        found = [f"{GPU}{name.strip()}" for name in names if name.strip() not in ("", "-1")]
        return found or [CPU]
    return ["mps"] if sys.platform == "darwin" and platform.machine() == "arm64" else [CPU]


def visible_devices(chosen: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that restrict a run to the devices ``chosen``."""
    names = [name.removeprefix(GPU) for name in chosen if name.startswith(GPU)]
    if not names:
        return {}
    # The numbers are those of the driver, in bus order. By default CUDA would number the fastest GPU first.
    order = {} if "CUDA_VISIBLE_DEVICES" in environment else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), **order}


def choose_device(asked: str, found: Sequence[str], length_of: Callable[[str], int]) -> str:
    """Return the requested device, or for "auto" that with the shortest queue. Raises RequirementError without one."""
    if asked == "auto":
        return min(found, key=length_of)
    if asked != CPU and asked not in found:
        raise RequirementError(f"there is no device {asked!r} here; devices: {', '.join(dict.fromkeys([*found, CPU]))}")
    return asked


def default_threads() -> int:
    """Return the number of usable cores minus one, so that the computer stays responsive."""
    return max(1, int(usable_cores()) - 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def missing_memory(
    device: str,
    max_ram_percent: float,
    max_gpu_percent: float,
    ram: Callable[[], float] | None = None,
    ask: Ask = ask_driver,
) -> Optional[str]:
    """Return what a run must wait for before it may begin, or None if enough memory is free."""
    used = (ram or ram_used_percent)()
    if used > max_ram_percent:
        return f"for memory: {used:.0f} % of it is used, and a run starts at {max_ram_percent:g} % or less"
    gpu = gpu_used_percent(device, ask)
    if gpu is not None and gpu > max_gpu_percent:
        return f"for memory of {device}: {gpu:.0f} % of it is used, and a run starts at {max_gpu_percent:g} % or less"
    return None


def ram_used_percent() -> float:
    """Return the percentage of main memory in use, of the machine or of its container, whichever is fuller."""
    total, available = ram_bytes()
    shares = [1 - available / total]
    limit, room = cgroup.memory_limit_bytes(), cgroup.memory_available_bytes()
    if limit and room is not None:
        shares.append(1 - room / limit)
    return 100 * max(shares)


def gpu_used_percent(device: str, ask: Ask = ask_driver) -> Optional[float]:
    """Return the percentage of a GPU's memory in use; None for other devices, or if the driver does not report it."""
    if not device.startswith(GPU):
        return None
    index = device.removeprefix(GPU)
    answer = ask(["-i", index, "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"])
    found = re.match(r"\s*(\d+),\s*(\d+)", answer or "")
    return None if found is None or int(found[2]) == 0 else 100 * int(found[1]) / int(found[2])
