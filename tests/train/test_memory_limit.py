"""A limit of one's own on top of the device's, and what a run says that it cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scu_trainer.errors import SettingsError
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.costs import StepTimes, bytes_before_model
from scu_trainer.train.step.recovery import memory_limit
from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading
from scu_trainer.train.step.recovery.memory_limit import LimitedGauge, limited_gauge
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import touch
from tests.tiny import Rows, arguments, llama


class Fixed(Gauge):
    def __init__(self, reading: MemoryReading) -> None:
        self.reading, self.resets = reading, []

    def reset(self, exact: bool = False) -> None:
        self.resets.append(exact)

    def read(self) -> MemoryReading:
        return self.reading


SHARED = MemoryReading(limit_bytes=100, used_bytes=60, peak_bytes=70, limit_name="card", process_bytes=20)


def test_the_limit_counts_this_process_alone():
    reading = LimitedGauge(Fixed(SHARED), 50).read()
    assert (reading.limit_bytes, reading.used_bytes, reading.peak_bytes) == (50, 20, 30)
    assert (reading.limit_name, reading.own_bytes, reading.own_peak_bytes) == ("memory_limit_gb", 20, 30)


def test_the_device_counts_where_it_leaves_less():
    assert LimitedGauge(Fixed(SHARED), 61).read() is SHARED


def test_a_reset_reaches_the_gauge():
    gauge = Fixed(SHARED)
    LimitedGauge(gauge, 50).reset(exact=True)
    assert gauge.resets == [True]


def test_the_limit_of_the_settings_is_in_gib():
    reading = limited_gauge(torch.device("cpu"), 1024.0).read()
    assert reading.limit_name != "memory_limit_gb"  # this machine has less
    resident = limited_gauge(torch.device("cpu"), None).read().own_bytes
    reading = limited_gauge(torch.device("cpu"), (resident + 2**20) / 2**30).read()
    assert reading.limit_name == "memory_limit_gb"


def test_a_card_is_held_to_a_limit_until_a_training_without_one(monkeypatch):
    held = {"fraction": 0.9}
    monkeypatch.setattr(memory_limit, "gauge_for", lambda device: Fixed(SHARED))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: held["fraction"])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: held.update(fraction=share)
    )
    found = []
    for limit_gb in (2.0, 4.0, None, None):
        limited_gauge(torch.device("cuda", 0), limit_gb)
        found.append(held["fraction"])
    assert found == [0.25, 0.5, 0.9, 0.9]


def test_a_training_without_memory_control_is_not_held_to_an_earlier_limit(monkeypatch, tmp_path):
    freed = []
    monkeypatch.setitem(memory_limit._fractions_before, torch.device("cpu"), 0.9)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: freed.append(share))
    for _ in range(2):
        SCUTrainer(llama(), arguments(tmp_path), train_dataset=Rows())
    assert freed == [0.9]


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_is_above_0(limit):
    with pytest.raises(SettingsError, match=r"memory_limit_gb is .*; it must be above 0"):
        MemorySettings(memory_limit_gb=limit)


def test_a_limit_needs_memory_control():
    with pytest.raises(SettingsError, match="set memory_control: true, or drop it"):
        MemorySettings(memory_limit_gb=1.0, memory_control=False)


@pytest.mark.parametrize(("text", "gib"), [("4", 4.0), ("4GiB", 4.0), ("4GB", 4e9 / 2**30), (" 900 mib", 900 / 1024)])
def test_sizes(text, gib):
    assert MemorySettings(max_gpu_mem=text, cpu_mem=text).cpu_mem == pytest.approx(gib)


@pytest.mark.parametrize("text", ["", "4TB", "-1", "GB", "4 4"])
def test_wrong_sizes(text):
    with pytest.raises(SettingsError, match=r"cpu_mem is .*; allowed: GiB such as 3.5, or a size such as 4GB"):
        MemorySettings(cpu_mem=text)


@pytest.mark.parametrize("size", [0, "0", "0.0GB", float("nan")])
def test_a_size_is_above_0(size):
    with pytest.raises(SettingsError, match=r"cpu_mem is .*; it must be above 0 GiB"):
        MemorySettings(cpu_mem=size)


@pytest.mark.parametrize("size", [10**400, "9" * 400, float("inf")], ids=["number", "text", "inf"])
def test_a_size_that_no_float_holds_is_refused_in_one_line(size):
    with pytest.raises(SettingsError, match=r"it must be above 0 GiB, and 1,000,000,000,000,000 or less$") as refused:
        MemorySettings(cpu_mem=size)
    assert len(str(refused.value)) < 200


def test_the_step_that_counts_is_a_later_one():
    times = StepTimes()
    assert times.typical_s is None
    times.seconds = [9.0, 9.0, 1.0, 2.0, 3.0]
    assert times.typical_s == 2.0


def test_memory_before_a_model_is_this_processes_own():
    held = bytes_before_model(torch.device("cpu"))
    block = touch(64)
    assert bytes_before_model(torch.device("cpu")) - held > 0.9 * block.nbytes
