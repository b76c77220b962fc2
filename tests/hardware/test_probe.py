"""The probe of the machine that runs the tests, and of one in a container."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
import torch

from scu_trainer.hardware import presets
from scu_trainer.hardware import probe as probe_module
from scu_trainer.hardware.precision import DeviceFacts
from scu_trainer.hardware.probe import accelerators, installed_version, probe, usable_cores


def test_this_machine(tmp_path):
    absent = tmp_path / "not" / "there"
    machine = probe(paths=[tmp_path, absent], packages=["torch", "no-such-distribution"])
    assert machine.python == sys.version_info[:3]
    assert 0 < usable_cores() <= os.cpu_count()
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes <= psutil.virtual_memory().total
    packages = {"torch": metadata.version("torch"), "no-such-distribution": None}  # torch itself names its build
    assert machine.packages == packages
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
    with_cards(monkeypatch, 2)
    found = [(item.kind, item.index, item.name, item.free_bytes, item.total_bytes) for item in accelerators()]
    assert found == [("cuda", 0, "card 0", 10, 100), ("cuda", 1, "card 1", 11, 100)]


def with_cards(monkeypatch, count: int, answer: str | None = None) -> list[int]:
    """``answer``: of the driver's tool. Returns the cards that CUDA is asked about, which takes memory of them."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: asked.append(index) or (10 + index, 100))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name="A100 MIG 1g" if index == 2 else "A100", uuid=f"u{index}", total_memory=99),
    )
    monkeypatch.setattr(probe_module, "ask_driver", lambda words: answer)
    return asked


def test_looking_at_a_card_takes_none_of_its_memory(monkeypatch):
    """The process that leads several ranks would hold memory of every card for as long as it trains."""
    asked = with_cards(monkeypatch, 4, "GPU-u1, 24000\nGPU-u0, 7\nGPU-u2, 5\nGPU-u3, [N/A]\nwarning\n")
    found = [(item.free_bytes, item.total_bytes) for item in accelerators()]
    assert found == [(7 * 2**20, 99), (24000 * 2**20, 99), (12, 100), (13, 100)]
    assert asked == [2, 3], "a part of a card, and one of which the driver says nothing"


def test_a_plan_for_this_card_has_what_was_free_before_cuda_took_its_part(monkeypatch):
    """Which an estimate counts among the libraries."""
    with_cards(monkeypatch, 1, "GPU-u0, 7\n")
    monkeypatch.setattr(presets, "device_facts", lambda use_cpu: DeviceFacts("cuda"))
    assert presets.here(use_cpu=False).limit_bytes == 7 * 2**20


def test_without_torch_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(probe_module.importlib.util, "find_spec", lambda name: None)
    assert accelerators() == ()


def test_installed_version_of_a_distribution_that_is_absent():
    assert installed_version("no-such-distribution") is None
    assert installed_version("pytest") == pytest.__version__
