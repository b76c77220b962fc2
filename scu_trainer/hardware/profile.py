"""Describe everything about this machine that limits the speed and size of trainings, measured where possible.

It writes only a temporary file to measure the speed of a disk, and decides nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.hardware import cgroup
from scu_trainer.hardware.probe import (
    Accelerator,
    GpuUser,
    accelerators,
    gpu_users,
    installed_version,
    ram_bytes,
    usable_cores,
    uuid_of,
)
from scu_trainer.run_files import free_bytes, nearest_existing

CPU_FEATURES = (
    "avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_bf16 amx_int8 asimd asimddp bf16 "
    "i8mm sve sve2"
).split()
"""Instruction sets by which torch and oneDNN choose kernels, with their names in /proc/cpuinfo (x86 and ARM)."""

PACKAGES = (
    "torch transformers accelerate peft datasets tokenizers safetensors bitsandbytes torchao deepspeed flash-attn "
    "liger-kernel scu-trainer"
).split()

SPEED_TEST_BYTES = 256 * 2**20
BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Gpu(Accelerator):
    """A GPU with its ``compute_capability`` ("9.0" on CUDA, else None) and the processes on it (None if not known)."""

    compute_capability: Optional[str] = None
    users: Optional[tuple[GpuUser, ...]] = None


@dataclass(frozen=True)
class Cpu:
    """Numbers of physical ``cores`` (None if not known) and logical ``threads``; ``usable`` by affinity and quota."""

    name: str
    architecture: str
    cores: Optional[int]
    threads: int
    usable: float
    features: tuple[str, ...]


@dataclass(frozen=True)
class Ram:
    """Main memory in bytes; ``limit_bytes`` is that of the container, None without a limit."""

    total_bytes: int
    available_bytes: int
    swap_bytes: int
    limit_bytes: Optional[int]


@dataclass(frozen=True)
class Disk:
    """A disk, with the speed of writing one large file until it is on the disk. The speed is None if it was not
    measured; ``note`` says why. Reading is not measured, because the file would come from the page cache."""

    path: str
    total_bytes: int
    free_bytes: int
    write_bytes_per_s: Optional[float] = None
    note: str = ""


@dataclass(frozen=True)
class HardwareProfile:
    system: str
    python: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu
    ram: Ram
    disks: tuple[Disk, ...]
    packages: dict[str, Optional[str]]


def profile(paths: Iterable[Path], measure_disks: bool = True, root: Path = cgroup.ROOT) -> HardwareProfile:
    """Describe this machine, with the disks of ``paths``, which need not exist; ``root`` holds proc and sys."""
    total_bytes, available_bytes = ram_bytes()
    import psutil

    return HardwareProfile(
        system=platform.platform(),
        python=platform.python_version(),
        gpus=tuple(_gpu(item) for item in accelerators()),
        cpu=cpu(root),
        ram=Ram(total_bytes, available_bytes, psutil.swap_memory().total, cgroup.memory_limit_bytes(root)),
        disks=tuple(_disk(path, measure_disks) for path in _one_per_disk(paths)),
        packages={name: installed_version(name) for name in PACKAGES},
    )


# -- processors --------------------------------------------------------------------------------------------------------


def cpu(root: Path = cgroup.ROOT) -> Cpu:
    import psutil

    words = cpuinfo(root)
    flags = (words.get("flags") or words.get("Features") or "").split()
    return Cpu(
        name=words.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=psutil.cpu_count(logical=False),
        threads=os.cpu_count() or 1,
        usable=usable_cores(root),
        features=tuple(name for name in CPU_FEATURES if name in flags),
    )


def cpuinfo(root: Path = cgroup.ROOT) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; {} if the system has no such file."""
    path = root / "proc" / "cpuinfo"
    if not path.is_file():
        return {}
    lines = path.read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpu(item: Accelerator) -> Gpu:
    if item.kind != "cuda":
        return Gpu(**vars(item))
    import torch

    properties = torch.cuda.get_device_properties(item.index)
    uuid = uuid_of(properties)
    found = gpu_users() if uuid else None
    users = None if found is None else tuple(user for gpu, user in found if gpu == uuid)
    return Gpu(**vars(item), compute_capability=f"{properties.major}.{properties.minor}", users=users)


# -- disks -------------------------------------------------------------------------------------------------------------


def _one_per_disk(paths: Iterable[Path]) -> Sequence[Path]:
    """Return the first path on each file system."""
    by_device: dict[int, Path] = {}
    for path in paths:
        by_device.setdefault(nearest_existing(path.expanduser()).stat().st_dev, path)
    return list(by_device.values())


def _disk(path: Path, measure: bool) -> Disk:
    folder = nearest_existing(path.expanduser())
    sizes = (str(path), shutil.disk_usage(folder).total, free_bytes(folder))
    if not measure:
        return Disk(*sizes, note="not measured")
    if sizes[2] < 4 * SPEED_TEST_BYTES:
        return Disk(*sizes, note=f"not measured: less than {4 * SPEED_TEST_BYTES >> 20} MiB free")
    try:
        return Disk(*sizes, write_bytes_per_s=write_speed(folder))
    except StorageError as error:
        return Disk(*sizes, note=f"not measured: {error}")


def write_speed(folder: Path, size_bytes: int = SPEED_TEST_BYTES) -> float:
    """Return bytes per second of writing a temporary file to the disk of ``folder``. Raises StorageError if that
    fails."""
    block = os.urandom(BLOCK_BYTES)  # random, because some disks compress
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began_s = time.perf_counter()
            for _ in range(max(1, size_bytes // BLOCK_BYTES)):
                file.write(block)
            os.fsync(file.fileno())
            return max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES / (time.perf_counter() - began_s)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
