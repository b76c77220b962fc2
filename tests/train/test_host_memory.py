"""Main memory beside a GPU: looked at now and then, and collected where it is full."""

from __future__ import annotations

import logging

import pytest

from scu_trainer.errors import SettingsError
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loops.memory import LOOKS_EVERY_STEPS, HostMemory
from tests.faults import FakeGauge
from tests.tiny import llama, trained

GIB = 2**30


@pytest.mark.parametrize(
    ("threshold_gb", "used_gb", "collects"),
    [(None, 9.1, False), (None, 9.3, True), (5.0, 4.9, False), (5.0, 5.1, True), (20.0, 9.9, False)],
)
def test_it_collects_from_its_threshold_on_and_not_at_every_step(threshold_gb, used_gb, collects, caplog):
    devices = []
    host = HostMemory(
        threshold_gb, FakeGauge(10 * GIB, int(used_gb * GIB)), lambda device: devices.append(device) or GIB
    )
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        for step in range(1, 3 * LOOKS_EVERY_STEPS + 1):
            host.collect_if_full(step)
    assert host.collections == len(devices) == (3 if collects else 0)
    assert ("this run freed 1.0 GiB" in caplog.text) == collects


def test_on_a_cpu_it_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="ram_threshold_gb limits main memory when training on a GPU, but this run"):
        trained(llama(layers=1), tmp_path, memory=MemorySettings(ram_threshold_gb=14.0), max_steps=1)
