"""The probe of the machine that runs the tests, and of one in a container."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
import torch

from scu_trainer.hardware import probe as probe_module
from scu_trainer.hardware.probe import accelerators, installed_version, probe, usable_cores


def test_this_machine(tmp_path):
    absent = tmp_path / "not" / "there"
    machine = probe(paths=[tmp_path, absent], packages=["torch", "no-such-distribution"])
    assert machine.python == sys.version_info[:3]
    assert 0 < usable_cores() <= os.cpu_count()
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes <= psutil.virtual_memory().total
    assert machine.packages == {"torch": torch.__version__, "no-such-distribution": None}
    assert set(machine.disk_free_bytes) == {tmp_path, absent}
    assert all(free > 0 for free in machine.disk_free_bytes.values())
    assert not absent.exists()


def test_a_container_limits_cores_and_memory(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    mount = tmp_path / "sys/fs/cgroup"
    mount.mkdir(parents=True)
    (mount / "memory.max").write_text("1000\n")
    (mount / "memory.current").write_text("300\n")
    (mount / "cpu.max").write_text("50000 100000\n")
    machine = probe(cgroup_root=tmp_path)
    assert (machine.ram_total_bytes, machine.ram_available_bytes, machine.ram_limit_bytes) == (1000, 700, 1000)
    assert usable_cores(tmp_path) == 0.5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_affinity_limits_cores(tmp_path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    found = [(item.kind, item.index, item.name, item.free_bytes, item.total_bytes) for item in accelerators()]
    assert found == [("cuda", 0, "card 0", 10, 100), ("cuda", 1, "card 1", 11, 100)]


def test_without_torch_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(probe_module.importlib.util, "find_spec", lambda name: None)
    assert accelerators() == ()


def test_installed_version_of_a_distribution_that_is_absent():
    assert installed_version("no-such-distribution") is None
    assert installed_version("pytest") == pytest.__version__
