"""The line of a device: one at a time, first come first served, and the dead hold nobody up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scu_trainer.errors import StorageError
from scu_trainer.runs import queue as subject
from scu_trainer.runs import room
from scu_trainer.runs.process import Identity, ProcessInfo, System
from scu_trainer.runs.queue import DeviceQueue, FileLock, wait_for_turn
from tests.runs.test_process import until


class Laid(System):
    def __init__(self, *living: int) -> None:
        self.living = set(living)

    def process(self, pid):
        return ProcessInfo(1.0, "running") if pid in self.living else None


def process(pid: int) -> Identity:
    return Identity(pid, 1.0, System().boot(), System().host())


def joined(folder: Path, machine: System, *pids: int):
    lines = [DeviceQueue("gpu-0", folder, machine) for _ in pids]
    return [(line, line.join(process(pid), folder / str(pid))) for line, pid in zip(lines, pids, strict=True)]


def test_first_come_first_served_and_each_device_has_its_own_line(tmp_path):
    machine = Laid(1, 2, 3)
    (one, first), (two, second), (three, third) = joined(tmp_path, machine, 1, 2, 3)
    assert not two.take_turn(second) and one.take_turn(first) and one.take_turn(first)
    assert [place.process.pid for place in three.waiting()] == [1, 2, 3]
    other = DeviceQueue("gpu-1", tmp_path, machine)
    assert other.take_turn(other.join(process(3), tmp_path))
    machine.living.remove(1)
    assert not three.take_turn(third) and two.take_turn(second)


def test_the_dead_count_for_nothing_and_go_when_the_next_joins(tmp_path):
    machine = Laid(1, 2)
    (_, _), (two, second) = joined(tmp_path, machine, 1, 2)
    machine.living = {2, 3}
    assert two.take_turn(second) and [place.process.pid for place in two.waiting()] == [2]
    assert len(list((tmp_path / "gpu-0").glob("*.json"))) == 2
    ((three, third),) = joined(tmp_path, machine, 3)
    assert third.number == 3 and len(list((tmp_path / "gpu-0").glob("*.json"))) == 2
    assert not three.take_turn(third)


@pytest.mark.parametrize("content", ["[]", "{}", '{"number": 1, "process": {"pid": 1}, "run": "a"}', "[" * 5000])
def test_a_damaged_place_is_one_message(tmp_path, content):
    ((line, place),) = joined(tmp_path, Laid(1), 1)
    (tmp_path / "gpu-0" / "00000001.json").write_text(content)
    with pytest.raises(StorageError, match=r"00000001\.json"):
        line.take_turn(place)


def test_a_place_that_goes_while_it_is_read_is_passed_over(tmp_path, monkeypatch):
    machine = Laid(1, 2)
    _, (two, _) = joined(tmp_path, machine, 1, 2)
    read = subject.read_json

    def read_late(path):
        if path.name == "00000001.json":
            path.unlink()
        return read(path)

    monkeypatch.setattr(subject, "read_json", read_late)
    assert [place.process.pid for place in two.waiting()] == [2]


HOLDER = """
import os, sys, time
from pathlib import Path
from scu_trainer.runs.queue import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire()
lock.keep_through_exec()
os.execvp("sleep", ["sleep", "600"])
"""


def test_a_turn_lives_through_exec_and_ends_with_the_process_however_it_ends(tmp_path):
    path = tmp_path / "gpu-0" / "turn.lock"
    machine = Laid(5)
    line = DeviceQueue("gpu-0", tmp_path, machine)
    place = line.join(process(5), tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)])
    try:
        until(lambda: Path(f"/proc/{holder.pid}/comm").read_text().strip() == "sleep")
        assert not line.take_turn(place)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert line.take_turn(place)
    finally:
        holder.kill()
        holder.wait()


def test_waiting_tells_once_what_for_and_goes_when_there_is_room(tmp_path):
    machine, told, slept = Laid(1, 2), [], []
    (one, first), (two, second) = joined(tmp_path, machine, 1, 2)
    assert one.take_turn(first)
    room_left = iter(["for memory", "for memory", None])

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            machine.living.remove(1)

    wait_for_turn(two, second, lambda: next(room_left), told.append, sleep)
    assert told == ["for gpu-0", "for memory"]
    assert slept == [subject.LOOK_EVERY_S] * 3 + [subject.ROOM_EVERY_S] * 2


def test_a_lock_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(subject.StorageError, match="cannot open"):
        FileLock(tmp_path / "file" / "lock")


# -- room --------------------------------------------------------------------------------------------------------------

TWO = "GPU 0: Card (UUID: GPU-a)\nGPU 1: Card (UUID: GPU-b)\n"


@pytest.mark.parametrize(
    ("environment", "answer", "found"),
    [
        ({}, TWO, ["gpu-0", "gpu-1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, TWO, ["gpu-1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, TWO, ["cpu"]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, TWO, ["cpu"]),
        ({}, "No devices were found\n", ["cpu"]),
    ],
)
def test_devices(environment, answer, found):
    assert room.devices(environment, lambda words: answer) == found


def test_without_a_gpu_it_is_the_cpu_or_that_of_a_mac(monkeypatch):
    assert room.devices({}, lambda words: None) == ["cpu"]
    monkeypatch.setattr(room.sys, "platform", "darwin")
    monkeypatch.setattr(room.platform, "machine", lambda: "arm64")
    assert room.devices({}, lambda words: None) == ["mps"]


def test_the_device_with_the_shortest_line(tmp_path):
    lengths = {"gpu-0": 2, "gpu-1": 1, "cpu": 5}
    assert room.choose_device("auto", ["gpu-0", "gpu-1"], lengths.get) == "gpu-1"
    assert room.choose_device("cpu", ["gpu-0"], lengths.get) == "cpu"
    with pytest.raises(room.RequirementError, match="no device 'gpu-7' here; devices: gpu-0, cpu"):
        room.choose_device("gpu-7", ["gpu-0"], lengths.get)
    only = {"CUDA_VISIBLE_DEVICES": "0,3"}
    assert room.visible_devices(["gpu-0", "gpu-3"], {}) == {**only, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert room.visible_devices(["gpu-0", "gpu-3"], only) == only, "numbers of somebody's own, in an order of their own"
    assert room.visible_devices(["cpu"]) == {}


def test_a_run_does_not_begin_above_the_thresholds():
    def ask(words):
        assert words[:2] == ["-i", "1"]
        return "72000, 81920\n"

    assert room.missing_memory("gpu-1", 90, 90, ram=lambda: 50.0, ask=ask) is None
    assert "88 % of it is used, and a run starts at 80 % or less" in room.missing_memory(
        "gpu-1", 90, 80, lambda: 50.0, ask
    )
    assert room.missing_memory("cpu", 90, 90, lambda: 91.0, ask).startswith("for memory: 91 % of it is used")
    assert room.gpu_used_percent("gpu-1", lambda words: None) is None
    assert 0 < room.ram_used_percent() <= 100
    assert room.default_threads() >= 1
