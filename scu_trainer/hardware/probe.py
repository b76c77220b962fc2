"""Look at this machine: cores, memory, disks, accelerators and packages. Nothing here changes or decides anything.

Only ``accelerators`` and ``has_cuda`` import torch, so only they can take longer than some milliseconds.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from scu_trainer.hardware import cgroup
from scu_trainer.run_files import free_bytes

_FREE = ("--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")

LONGEST_S = 20.0
"""Seconds after which a call of the driver's tool is given up."""


@dataclass(frozen=True)
class Accelerator:
    """One GPU, with its total and free memory; on mps the free memory is what the system has available."""

    kind: str
    index: int
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class GpuUser:
    """A process that holds memory of a GPU; ``used_bytes`` is None if the driver does not report it (in containers)."""

    pid: int
    name: str
    used_bytes: Optional[int]


@dataclass(frozen=True)
class Machine:
    """What a run can use on this machine.

    Fields:
        python: version as (major, minor, micro).
        ram_total_bytes, ram_available_bytes: main memory for this process, which a container may limit.
        ram_limit_bytes: the limit of the container; None without one.
        accelerators: GPUs that torch sees; empty if torch is not installed.
        packages: installed version by package name; None if it is not installed.
        disk_free_bytes: free bytes by requested path.
    """

    python: tuple[int, int, int]
    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit_bytes: Optional[int] = None
    accelerators: tuple[Accelerator, ...] = ()
    packages: dict[str, Optional[str]] = field(default_factory=dict)
    disk_free_bytes: dict[Path, int] = field(default_factory=dict)


def probe(paths: Iterable[Path] = (), packages: Iterable[str] = (), cgroup_root: Path = cgroup.ROOT) -> Machine:
    """Look at this machine. ``paths`` need not exist yet; ``packages`` are distribution names."""
    total_bytes, available_bytes = ram_bytes()
    limit_bytes = cgroup.memory_limit_bytes(cgroup_root)
    below_limit_bytes = cgroup.memory_available_bytes(cgroup_root)
    return Machine(
        python=sys.version_info[:3],
        ram_total_bytes=_smaller(total_bytes, limit_bytes),
        ram_available_bytes=_smaller(available_bytes, below_limit_bytes),
        ram_limit_bytes=limit_bytes,
        accelerators=accelerators(),
        packages={name: installed_version(name) for name in packages},
        disk_free_bytes={path: free_bytes(path) for path in paths},
    )


def allowed_cores() -> int:
    """Return the number of cores in the CPU affinity of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(cgroup_root: Path = cgroup.ROOT) -> float:
    """Return how many cores this process may use: its CPU affinity, limited by the quota of its container."""
    return _smaller(allowed_cores(), cgroup.cpu_quota_cores(cgroup_root))


def accelerators() -> tuple[Accelerator, ...]:
    """Return the GPUs that torch can use; none if torch is not installed. Free memory comes from the driver's tool if
    it is installed. To ask CUDA, this process would have to take some hundred MiB of each GPU, which other processes
    would then lack."""
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    if torch.cuda.is_available():
        free = free_of_gpus()
        return tuple(
            Accelerator("cuda", index, torch.cuda.get_device_name(index), *_memory(index, free))
            for index in range(torch.cuda.device_count())
        )
    if torch.backends.mps.is_available():
        return (Accelerator("mps", 0, platform.processor() or "Apple", *ram_bytes()),)
    return ()


def _memory(index: int, free: dict[str, int]) -> tuple[int, int]:
    """Return (total, free) bytes of a GPU; ``free`` is from ``free_of_gpus``, which lists whole GPUs but not MIG."""
    import torch

    properties = torch.cuda.get_device_properties(index) if free else None
    uuid = "" if properties is None or "MIG" in properties.name else uuid_of(properties)
    if uuid not in free:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        return total_bytes, free_bytes
    return properties.total_memory, free[uuid]


def has_cuda() -> bool:
    """Return whether torch has a CUDA device on this machine."""
    import torch

    return torch.cuda.is_available()


def uuid_of(properties: Any) -> str:
    """Return the uuid in torch's properties of a GPU, without "GPU-"; "" if there is none (old versions, ROCm)."""
    return str(getattr(properties, "uuid", "")).removeprefix("GPU-")


def installed_version(name: str) -> Optional[str]:
    """Return the version of a distribution without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def resident_bytes(process: Path) -> Optional[int]:
    """Return the resident memory of the process with the folder ``process`` in /proc; None without /proc (macOS). It
    includes mapped files, because frozen weights are read from them. Raises OSError if the process has ended."""
    if not process.parent.is_dir():
        return None
    return int((process / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask_driver(words: Sequence[str]) -> Optional[str]:
    """Return the output of nvidia-smi with the arguments ``words``; None if it is not installed or finds no driver. It
    knows the processes of all users, and does not need torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        return subprocess.run([tool, *words], capture_output=True, text=True, timeout=LONGEST_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None


def gpu_users() -> Optional[list[tuple[str, GpuUser]]]:
    """Return (uuid of the GPU without "GPU-", process) for each process on a GPU; None if the driver cannot tell."""
    fields = "gpu_uuid,pid,process_name,used_gpu_memory"
    answer = ask_driver([f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"])
    rows = csv.reader((answer or "").splitlines(), skipinitialspace=True)
    found = [
        (uuid.removeprefix("GPU-"), GpuUser(int(pid), ", ".join(name), int(mib) * 2**20 if mib.isdigit() else None))
        for uuid, pid, *name, mib in (row for row in rows if len(row) >= 4 and row[1].isdigit())
    ]
    return None if answer is None else found


def free_of_gpus() -> dict[str, int]:
    """Return the free bytes of each GPU by its uuid without "GPU-"; {} if the driver does not report them."""
    rows = csv.reader((ask_driver(_FREE) or "").splitlines(), skipinitialspace=True)
    return {row[0].removeprefix("GPU-"): int(row[1]) * 2**20 for row in rows if len(row) == 2 and row[1].isdigit()}


def free_port() -> int:
    """Return a free port of this machine, for the rendezvous of ranks."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def ram_bytes() -> tuple[int, int]:
    """Return (total, available) main memory of the whole system."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _smaller(value: float, limit: Optional[float]) -> float:
    return value if limit is None else min(value, limit)
