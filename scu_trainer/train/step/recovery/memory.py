"""Live memory: gauges that read how much is used and how much may be used, and a function that frees memory.

docs/memory.md shows a gauge on its own, in your own training loop. ``second_try.py`` shows how a recovery begins.
"""

from __future__ import annotations

import functools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import psutil
import torch
from accelerate.utils.memory import clear_device_cache

from scu_trainer.errors import RequirementError
from scu_trainer.hardware import cgroup
from scu_trainer.hardware.heap import release_freed_memory

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryReading:
    """A reading of a gauge.

    Fields:
        limit_bytes: the most that may be used, by everything that ``used_bytes`` counts.
        used_bytes: in use now. A device allocator's reusable cache does not count as used.
        peak_bytes: the highest ``used_bytes`` since ``reset``.
        limit_name: which limit this is, for messages.
        process_bytes: the part of ``used_bytes`` that is this process's own live memory; None if all of it is.
    """

    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    limit_name: str = ""
    process_bytes: Optional[int] = None

    @property
    def own_bytes(self) -> int:
        """This process's live memory. Differences of it do not include what other processes did meanwhile."""
        return self.used_bytes if self.process_bytes is None else self.process_bytes

    @property
    def own_peak_bytes(self) -> int:
        return self.own_bytes + self.peak_bytes - self.used_bytes

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)

    @property
    def used_fraction(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class Gauge(ABC):
    """Measures one memory. ``read`` changes nothing, so a second thread may read what the first one resets.

    good_for_s: seconds for which a reading stays valid for later steps, as long as memory is not short. The peak covers
    all of these steps, so the next reading misses nothing.
    """

    good_for_s = 0.0

    @abstractmethod
    def reset(self, exact: bool = False) -> None:
        """Start a new peak. ``exact`` first gives freed memory back, so that ``used_bytes`` is only live memory."""

    @abstractmethod
    def read(self) -> MemoryReading:
        """Return the memory in use now and its peak since ``reset``."""


class CudaGauge(Gauge):
    """Memory of one CUDA (or ROCm) device.

    Used memory is what other processes hold on the card, plus this process's context, plus this process's live tensors;
    blocks that torch's allocator has reserved and could hand out again are not used.
    ``set_per_process_memory_fraction`` bounds only what the allocator reserves, so the limit then is that share plus
    what is outside the allocator.

    The peak of the tensors is exact; memory outside the allocator is taken as it is at ``read``. ``reset`` restarts
    ``torch.cuda.max_memory_allocated`` for all code in this process. Nothing here waits for the device.
    ``api``: ``torch.cuda``, or a replacement for it.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda):
        api.init()  # before init, the allocator has no statistics to reset
        self._api = api
        # fixed here: "the current device" is a different one in a monitoring thread
        self._index = api.current_device() if device.index is None else device.index
        self.reset()

    def reset(self, exact: bool = False) -> None:
        self._api.reset_peak_memory_stats(self._index)

    def read(self) -> MemoryReading:
        driver_free_bytes, total_bytes = self._api.mem_get_info(self._index)
        fraction = self._api.get_per_process_memory_fraction(self._index)
        # memory_allocated and similar functions flatten and sort this whole dictionary at every call
        statistics = self._api.memory_stats_as_nested_dict(self._index)
        tensors = statistics["allocated_bytes"]["all"]
        outside_bytes = max(total_bytes - driver_free_bytes - statistics["reserved_bytes"]["all"]["current"], 0)
        capped_bytes = outside_bytes + int(total_bytes * fraction)
        is_capped = capped_bytes < total_bytes
        return MemoryReading(
            limit_bytes=capped_bytes if is_capped else total_bytes,
            used_bytes=outside_bytes + tensors["current"],
            peak_bytes=outside_bytes + tensors["peak"],
            limit_name=f"memory fraction {fraction:g} of cuda:{self._index}" if is_capped else f"cuda:{self._index}",
            process_bytes=tensors["current"],
        )


class MpsGauge(Gauge):
    """Memory of Apple's GPU: the working set that Metal recommends, and what this process holds of it.

    MPS keeps no peak of its tensors, but the memory that the driver has handed out does not shrink while the allocator
    keeps its cache: after ``reset(exact=True)``, which empties the cache, it equals the peak. A plain ``reset`` leaves
    the peak since the last exact one, which is never too low. ``api``: ``torch.mps``, or a replacement for it.
    """

    def __init__(self, api: Any = torch.mps):
        self._api = api
        self.reset(exact=True)

    def reset(self, exact: bool = False) -> None:
        if exact:
            self._api.empty_cache()
            # with the cache empty, the rest belongs to the framework
            self._framework_bytes = self._api.driver_allocated_memory() - self._api.current_allocated_memory()

    def read(self) -> MemoryReading:
        used_bytes = self._api.current_allocated_memory() + self._framework_bytes
        return MemoryReading(
            limit_bytes=self._api.recommended_max_memory(),
            used_bytes=used_bytes,
            peak_bytes=max(self._api.driver_allocated_memory(), used_bytes),
            limit_name="working set recommended by Metal",
        )


class _Limit(NamedTuple):
    name: str
    limit_bytes: int
    used_bytes: int


class CpuGauge(Gauge):
    """Main memory: the machine's RAM, the container's limit, and this process's soft RLIMIT_DATA and RLIMIT_AS.

    The limit with the least room is reported, so it may change from one reading to the next; the difference of peak and
    used memory does not depend on it. The peak is exact on Linux, where the kernel keeps the high-water mark of the
    resident set and lets a process restart it. Elsewhere, and in a sandbox that hides /proc/self/clear_refs, the peak
    is the memory in use at ``read``: a rise and fall before that is lost.

    A container's limit is looked up at construction and at every exact reset. With nested containers ``used_bytes`` is
    the limit minus the room at the tightest level. ``root`` holds ``proc`` and ``sys``; ``system_memory`` returns total
    and available bytes of the machine.
    """

    # A step reads three times, and the kernel takes up to 0.2 ms for each: a tenth of a step of a few milliseconds.
    good_for_s = 0.25

    def __init__(self, root: Path = cgroup.ROOT, system_memory: Optional[Callable[[], Any]] = None):
        self._root = root
        self._system_memory = system_memory or functools.partial(machine_memory, KernelFile(root, "proc/meminfo"))
        self._status = KernelFile(root, "proc/self/status")
        self._clear_refs = KernelFile(root, "proc/self/clear_refs", os.O_WRONLY)
        self._has_status = os.path.exists(self._status.path)
        self._keeps_peak = self._has_status and self._can_restart_peak()
        self._container_limit_bytes = cgroup.memory_limit_bytes(root)

    def reset(self, exact: bool = False) -> None:
        if exact:
            release_freed_memory()
            self._container_limit_bytes = cgroup.memory_limit_bytes(self._root)
        if self._keeps_peak:
            self._restart_peak()

    def read(self) -> MemoryReading:
        process = self._process()
        tightest = min(self._limits(process), key=lambda limit: limit.limit_bytes - limit.used_bytes)
        above_now_bytes = process["VmHWM"] - process["VmRSS"] if self._keeps_peak else 0
        return MemoryReading(
            limit_bytes=tightest.limit_bytes,
            used_bytes=tightest.used_bytes,
            peak_bytes=tightest.used_bytes + above_now_bytes,
            limit_name=tightest.name,
            process_bytes=process["VmRSS"],
        )

    def _limits(self, process: dict[str, int]) -> Iterator[_Limit]:
        machine = self._system_memory()
        yield _Limit("RAM of this machine", machine.total, machine.total - machine.available)
        limit_bytes = self._container_limit_bytes
        room_bytes = None if limit_bytes is None else cgroup.memory_available_bytes(self._root)
        if room_bytes is not None:  # also None if the limit has been lifted since it was looked up
            yield _Limit("memory limit of the container", limit_bytes, max(limit_bytes - room_bytes, 0))
        if self._has_status:
            yield from _resource_limits(process)

    def _process(self) -> dict[str, int]:
        """Return the sizes of this process in bytes, under the names that the kernel uses."""
        if not self._has_status:
            return {"VmRSS": psutil.Process().memory_info().rss}
        status = self._status.read()
        return {name: _kilobytes(status, name) * 1024 for name in ("VmRSS", "VmHWM", "VmData", "VmSize")}

    def _can_restart_peak(self) -> bool:
        try:
            self._restart_peak()
        except OSError:  # macOS has no such file, and a sandbox may forbid it; see the class docstring
            return False
        return True

    def _restart_peak(self) -> None:
        self._clear_refs.write(b"5")


class KernelFile:
    """A file of the kernel, opened once per process: opening takes as long as reading. Raises like ``os.open``."""

    def __init__(self, root: Path, name: str, flags: int = os.O_RDONLY) -> None:
        self.path, self._flags = os.path.join(root, name), flags
        self._process = -1

    def read(self) -> bytes:
        return os.pread(self._descriptor_of_process(), 1 << 16, 0)

    def write(self, content: bytes) -> None:
        os.pwrite(self._descriptor_of_process(), content, 0)

    def _descriptor_of_process(self) -> int:
        if self._process != os.getpid():  # an inherited descriptor describes the parent process
            self._descriptor, self._process = os.open(self.path, self._flags), os.getpid()
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


def machine_memory(meminfo: KernelFile) -> Any:
    """Return ``total`` and ``available`` bytes as psutil does, without the 0.1 ms in which it parses the whole file."""
    try:
        text = b"\n" + meminfo.read()
        total_bytes, available_bytes = (_kilobytes(text, name) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError):  # not Linux, or the file is hidden
        total_bytes = available_bytes = 0
    if 0 < available_bytes <= total_bytes:  # otherwise a container mixes its own values with the machine's
        return SimpleNamespace(total=total_bytes, available=available_bytes)
    return psutil.virtual_memory()


def gauge_for(device: torch.device) -> Gauge:
    """Return the gauge of a device. Raises RequirementError for a device type that cannot be measured."""
    if device.type == "cuda":
        return CudaGauge(device)
    if device.type == "mps":
        return MpsGauge()
    if device.type == "cpu":
        return CpuGauge()
    raise RequirementError(
        f"memory control measures cuda, mps and cpu devices, and this one is {str(device)!r}; set memory_control to "
        "false, or pass your own gauge"
    )


def free_memory(device: torch.device = CPU) -> int:
    """Collect garbage, then give cached memory of all devices and of the C library back to the system. Takes some
    tenths of a second. Returns the bytes of ``device`` that this process no longer holds."""
    before_bytes = _held_bytes(device)
    clear_device_cache(garbage_collection=True)
    release_freed_memory()
    return max(before_bytes - _held_bytes(device), 0)


def _resource_limits(process: dict[str, int]) -> Iterator[_Limit]:
    import resource  # POSIX only, like the file that ``process`` came from

    for name, used_bytes in (("RLIMIT_DATA", process["VmData"]), ("RLIMIT_AS", process["VmSize"])):
        soft_bytes, _ = resource.getrlimit(getattr(resource, name))  # read again: a process may change its soft limit
        if soft_bytes != resource.RLIM_INFINITY:
            yield _Limit(name, soft_bytes, used_bytes)


def _kilobytes(status: bytes, name: str) -> int:
    start = status.index(b"\n" + name.encode() + b":") + len(name) + 2
    return int(status[start : status.index(b"kB", start)])


def _held_bytes(device: torch.device) -> int:
    """Return the memory of a device that this process holds, including caches; main memory for a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return psutil.Process().memory_info().rss
