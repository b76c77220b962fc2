"""Gauges: the real ones of this machine, laid-out /proc and /sys trees, and devices played by an injected API."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scu_trainer.errors import RequirementError
from scu_trainer.train.step.recovery.memory import CpuGauge, CudaGauge, MemoryReading, MpsGauge, free_memory, gauge_for
from tests.faults import touch

MIB = 2**20
GIB = 2**30
CPU = torch.device("cpu")

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is read from /proc")


# --- readings


def test_room_and_fraction():
    reading = MemoryReading(limit_bytes=100, used_bytes=80, peak_bytes=95)
    assert (reading.free_bytes, reading.used_fraction) == (20, 0.8)
    assert (reading.own_bytes, reading.own_peak_bytes) == (80, 95)


def test_own_bytes_leave_out_other_processes():
    reading = MemoryReading(limit_bytes=100, used_bytes=80, peak_bytes=95, process_bytes=30)
    assert (reading.own_bytes, reading.own_peak_bytes) == (30, 45)


@pytest.mark.parametrize("limit_bytes", [70, 0])
def test_a_limit_below_what_is_used_leaves_no_room(limit_bytes):
    reading = MemoryReading(limit_bytes, used_bytes=80, peak_bytes=80)
    assert reading.free_bytes == 0
    assert reading.used_fraction >= 1


# --- main memory, for real


@linux
def test_the_peak_between_reset_and_read_is_exact():
    gauge = CpuGauge()
    gauge.reset()
    before = gauge.read()
    block = touch(96)
    del block
    after = gauge.read()
    assert after.peak_bytes - after.used_bytes == pytest.approx(96 * MIB, abs=4 * MIB)
    assert after.own_peak_bytes - before.own_bytes == pytest.approx(96 * MIB, abs=4 * MIB)
    gauge.reset()
    assert gauge.read().peak_bytes - gauge.read().used_bytes < 4 * MIB


@linux
def test_reading_changes_nothing():
    gauge, watcher = CpuGauge(), CpuGauge()
    gauge.reset()
    block = touch(64)
    del block
    for _ in range(3):
        assert watcher.read().peak_bytes - watcher.read().used_bytes > 60 * MIB
    reading = gauge.read()
    assert reading.peak_bytes - reading.used_bytes > 60 * MIB


@linux
def test_an_exact_reset_gives_freed_heap_back():
    pieces = [bytearray(3000) for _ in range(30_000)]  # below malloc's threshold for giving back at once
    pinned = pieces[-1]
    gauge = CpuGauge()
    del pieces
    gauge.reset()
    kept = gauge.read()
    gauge.reset(exact=True)
    live = gauge.read()
    assert kept.own_bytes - live.own_bytes > 60 * MIB
    assert len(pinned) == 3000


@linux
def test_a_reset_and_a_reading_cost_little():
    gauge = CpuGauge()

    def look() -> None:
        gauge.reset()
        gauge.read()

    def ask_the_kernel() -> None:
        Path("/proc/self/status").read_bytes()
        Path("/proc/meminfo").read_bytes()

    look()
    ours, kernels = (min(timeit.repeat(one, number=20, repeat=20)) for one in (look, ask_the_kernel))
    assert ours < 5 * kernels  # less than once as long on a quiet machine


# --- main memory, laid out


def lay_out(root, files: dict[str, str]):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmSize:\t  800 kB\nVmHWM:\t  500 kB\nVmRSS:\t  300 kB\nVmData:\t  700 kB"


def machine(total: int, available: int):
    return lambda: SimpleNamespace(total=total, available=available)


def container(limit: int, current: int, droppable: int = 0) -> dict[str, str]:
    return {
        "proc/self/status": STATUS,
        "proc/self/clear_refs": "",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": str(limit),
        "sys/fs/cgroup/job/memory.current": str(current),
        "sys/fs/cgroup/job/memory.stat": f"inactive_file {droppable}",
    }


def test_the_machine_where_nothing_else_limits(tmp_path):
    root = lay_out(tmp_path, {"proc/self/status": STATUS, "proc/self/clear_refs": ""})
    reading = CpuGauge(root, machine(8 * GIB, 5 * GIB)).read()
    assert reading == MemoryReading(
        8 * GIB, 3 * GIB, 3 * GIB + 200 * 1024, limit_name="RAM of this machine", process_bytes=300 * 1024
    )


def test_the_container_where_it_is_tighter(tmp_path):
    root = lay_out(tmp_path, container(4 * GIB, 3 * GIB, droppable=GIB))
    reading = CpuGauge(root, machine(8 * GIB, 5 * GIB)).read()
    assert (reading.limit_bytes, reading.used_bytes, reading.free_bytes) == (4 * GIB, 2 * GIB, 2 * GIB)
    assert "container" in reading.limit_name
    assert reading.own_peak_bytes == 500 * 1024


def test_the_least_room_counts_and_not_the_smallest_limit(tmp_path):
    root = lay_out(tmp_path, container(4 * GIB, GIB))
    assert CpuGauge(root, machine(8 * GIB, 2 * GIB)).read().limit_bytes == 8 * GIB


def test_a_container_limit_that_changes(tmp_path):
    root = lay_out(tmp_path, container(4 * GIB, GIB))
    gauge = CpuGauge(root, machine(64 * GIB, 60 * GIB))
    lay_out(tmp_path, container(2 * GIB, GIB))
    assert gauge.read().free_bytes == GIB  # the room is always right
    gauge.reset(exact=True)
    assert gauge.read().limit_bytes == 2 * GIB
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert gauge.read().limit_bytes == 64 * GIB


def test_a_container_limit_that_grew_leaves_no_negative_use(tmp_path):
    root = lay_out(tmp_path, container(GIB, GIB // 2))
    gauge = CpuGauge(root, machine(64 * GIB, 60 * GIB))
    lay_out(tmp_path, container(8 * GIB, GIB))
    assert gauge.read().used_bytes == 0


def test_the_peak_is_restarted_by_writing_5(tmp_path):
    root = lay_out(tmp_path, {"proc/self/status": STATUS, "proc/self/clear_refs": ""})
    gauge = CpuGauge(root)
    (tmp_path / "proc/self/clear_refs").write_text("")
    gauge.reset()
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_without_a_peak_that_can_be_restarted_it_is_what_is_used_now(tmp_path):
    root = lay_out(tmp_path, {"proc/self/status": STATUS})
    gauge = CpuGauge(root, machine(8 * GIB, 5 * GIB))
    gauge.reset()
    reading = gauge.read()
    assert reading.peak_bytes == reading.used_bytes == 3 * GIB
    assert reading.own_bytes == 300 * 1024
    assert not (tmp_path / "proc/self/clear_refs").exists()


def test_a_system_without_proc(tmp_path):
    gauge = CpuGauge(tmp_path, machine(8 * GIB, 5 * GIB))
    gauge.reset(exact=True)
    reading = gauge.read()
    assert reading.peak_bytes == reading.used_bytes == 3 * GIB
    assert reading.own_bytes > 50 * MIB  # this process, with torch loaded


# --- a real limit on a real process

UNDER_A_LIMIT = """
import json, re, resource, sys, torch
from pathlib import Path
from scu_trainer.train.step.recovery.memory import CpuGauge
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory, wanted_bytes

MIB = 2**20
name, size = sys.argv[1:]
gauge = CpuGauge()
torch.ones(MIB)
taken_bytes = int(re.search(size + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
limit_bytes = taken_bytes + 64 * MIB
resource.setrlimit(getattr(resource, name), (limit_bytes, resource.getrlimit(getattr(resource, name))[1]))
gauge.reset()
before = gauge.read()
try:
    torch.empty(256 * MIB, dtype=torch.uint8)
    recognized = wanted = None
except RuntimeError as error:
    recognized, wanted = is_out_of_memory(error), wanted_bytes(error)
block = torch.ones(32 * MIB, dtype=torch.uint8)
during = gauge.read()
del block
after = gauge.read()
print(json.dumps({
    "limit": limit_bytes, "seen_name": before.limit_name, "seen_limit": before.limit_bytes,
    "free": before.free_bytes, "recognized": recognized, "wanted": wanted,
    "taken": before.free_bytes - during.free_bytes, "peak": after.peak_bytes - after.used_bytes,
}))
"""


@linux
@pytest.mark.parametrize(("name", "size"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_real_out_of_memory_under_a_limit(name, size):
    command = [sys.executable, "-c", UNDER_A_LIMIT, name, size]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["recognized"] is True
    assert seen["wanted"] == 256 * MIB
    assert (seen["seen_name"], seen["seen_limit"]) == (name, seen["limit"])
    assert seen["free"] == pytest.approx(64 * MIB, abs=2 * MIB)
    assert seen["taken"] == pytest.approx(32 * MIB, abs=2 * MIB)
    assert seen["peak"] == pytest.approx(32 * MIB, abs=2 * MIB)


# --- devices


class FakeCuda:
    """The functions of torch.cuda that the gauge calls, over numbers that a test sets. One card of 100 bytes."""

    total = 100
    others = 10  # other processes and this one's context
    fraction = 1.0
    reserved = 40
    allocated = 25
    peak = 35
    retries = 3

    def __init__(self, current: int = 1):
        self.calls: list[tuple] = []
        self._current = current

    def init(self) -> None:
        self.calls.append(("init",))

    def current_device(self) -> int:
        return self._current

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.calls.append(("mem_get_info", index))
        return self.total - self.others - self.reserved, self.total

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.fraction

    def memory_stats_as_nested_dict(self, index: int) -> dict:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
        }

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append(("reset", index))
        self.peak = self.allocated


def test_fake_cuda_has_only_what_torch_has():
    names = [name for name in vars(FakeCuda) if callable(getattr(FakeCuda, name)) and not name.startswith("_")]
    assert len(names) == 6
    assert [name for name in names if not hasattr(torch.cuda, name)] == []


def test_cuda_counts_others_and_live_tensors_but_not_the_cache():
    api = FakeCuda()
    gauge = CudaGauge(torch.device("cuda", 0), api)
    api.peak = 35
    assert gauge.read() == MemoryReading(100, 35, 45, limit_name="cuda:0", process_bytes=25)
    assert gauge.read().free_bytes == 50 + 15  # free at the driver, and reserved but reusable


def test_cuda_peak_starts_again():
    api = FakeCuda()
    gauge = CudaGauge(torch.device("cuda", 0), api)
    api.peak = 60
    assert gauge.read().own_peak_bytes == 60
    gauge.reset()
    assert gauge.read().peak_bytes == gauge.read().used_bytes


def test_a_memory_fraction_bounds_what_the_allocator_reserves():
    api = FakeCuda()
    api.fraction = 0.5
    reading = CudaGauge(torch.device("cuda", 0), api).read()
    assert reading.limit_bytes == 60  # 50 of ours on top of 10 of others
    assert reading.free_bytes == 50 - 25
    assert reading.limit_name == "memory fraction 0.5 of cuda:0"


def test_other_tenants_may_leave_less_than_the_fraction():
    api = FakeCuda()
    api.fraction, api.others = 0.5, 55
    reading = CudaGauge(torch.device("cuda", 0), api).read()
    assert reading.limit_bytes == 100
    assert reading.free_bytes == 100 - 55 - 25


def test_a_neighbour_that_comes_leaves_our_own_bytes_alone():
    api = FakeCuda()
    gauge = CudaGauge(torch.device("cuda", 0), api)
    before = gauge.read()
    api.others += 20
    after = gauge.read()
    assert before.free_bytes - after.free_bytes == 20
    assert before.own_peak_bytes == after.own_peak_bytes


def test_cuda_is_initialized_first_and_the_current_device_fixed():
    api = FakeCuda(current=1)
    gauge = CudaGauge(torch.device("cuda"), api)
    assert api.calls == [("init",), ("reset", 1)]
    api._current = 0  # what a monitoring thread would see
    gauge.read()
    assert api.calls[-1] == ("mem_get_info", 1)


class FakeMps:
    """A driver that hands out memory and an allocator that keeps it: 7 bytes of framework, the rest tensors."""

    def __init__(self):
        self.tensors = 20
        self.driver = 50

    def recommended_max_memory(self) -> int:
        return 200

    def current_allocated_memory(self) -> int:
        return self.tensors

    def driver_allocated_memory(self) -> int:
        return self.driver

    def empty_cache(self) -> None:
        self.driver = self.tensors + 7


def test_fake_mps_has_only_what_torch_has():
    names = [name for name in vars(FakeMps) if not name.startswith("_")]
    assert len(names) == 4
    assert [name for name in names if not hasattr(torch.mps, name)] == []


def test_mps_peak_is_what_the_driver_handed_out():
    api = FakeMps()
    gauge = MpsGauge(api)
    assert gauge.read() == MemoryReading(200, 27, 27, limit_name="working set recommended by Metal")
    api.driver, api.tensors = 90, 30
    reading = gauge.read()
    assert (reading.used_bytes, reading.peak_bytes, reading.free_bytes) == (37, 90, 163)
    gauge.reset()
    assert gauge.read().peak_bytes == 90
    gauge.reset(exact=True)
    assert gauge.read().peak_bytes == 37


def test_the_gauge_of_a_device():
    assert isinstance(gauge_for(CPU), CpuGauge)
    with pytest.raises(RequirementError, match=r"cuda, mps and cpu.*'meta'.*memory_control to false"):
        gauge_for(torch.device("meta"))


# --- freeing


@linux
def test_freeing_collects_cycles_and_says_how_much():
    class Knot:
        pass

    gc.collect()
    free_memory(CPU)
    knot = Knot()
    knot.itself, knot.block = knot, touch(96)
    del knot
    assert free_memory(CPU) == pytest.approx(96 * MIB, abs=16 * MIB)


@linux
def test_freeing_that_makes_more_is_no_negative_number():
    kept = []

    class Hoarder:
        def __del__(self):
            kept.append(touch(64))

    hoarder = Hoarder()
    hoarder.itself = hoarder
    del hoarder
    assert free_memory(CPU) == 0
    assert len(kept) == 1


def test_limits_of_this_process_are_read_again(tmp_path):
    """Lowering the soft limit to what is used now and back: seen at once, no cached value."""
    root = lay_out(tmp_path, {"proc/self/status": STATUS, "proc/self/clear_refs": ""})
    gauge = CpuGauge(root, machine(64 * GIB, 60 * GIB))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    far_above_bytes = 50 * GIB if hard == resource.RLIM_INFINITY else hard
    assert gauge.read().limit_name == "RAM of this machine"
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (far_above_bytes, hard))
        reading = gauge.read()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert (reading.limit_name, reading.limit_bytes) == ("RLIMIT_DATA", far_above_bytes)
    assert reading.used_bytes == 700 * 1024
    assert gauge.read().limit_name == "RAM of this machine"
