"""``memory_limit_gb``: a limit on what this process may use of its device, however much more is free."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

import torch

from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading, gauge_for

_fractions_before: dict[torch.device, float] = {}
"""Device -> the fraction that torch's allocator was limited to before ``memory_limit_gb`` changed it."""


class LimitedGauge(Gauge):
    """Reports the tighter of two limits: the device of ``inner``, shared with others, or a limit on this process."""

    def __init__(self, inner: Gauge, limit_bytes: int) -> None:
        self._inner = inner
        self.good_for_s = inner.good_for_s
        self._limit_bytes = limit_bytes

    def reset(self, exact: bool = False) -> None:
        self._inner.reset(exact)

    def read(self) -> MemoryReading:
        reading = self._inner.read()
        if reading.free_bytes < self._limit_bytes - reading.own_bytes:
            return reading
        own = {"used_bytes": reading.own_bytes, "peak_bytes": reading.own_peak_bytes}
        return replace(reading, limit_bytes=self._limit_bytes, limit_name="memory_limit_gb", **own)


def release_limit(device: torch.device) -> None:
    """Remove the limit that an earlier training in this process has set."""
    if device in _fractions_before:
        torch.cuda.set_per_process_memory_fraction(_fractions_before.pop(device), device)


def limited_gauge(device: torch.device, limit_gb: Optional[float]) -> Gauge:
    """Return the gauge of a device, limited to ``limit_gb`` GiB if given; on CUDA the allocator is limited too, so that
    an excess fails here and not in another process. Raises RequirementError for a device that cannot be measured."""
    release_limit(device)
    gauge = gauge_for(device)
    if limit_gb is None:
        return gauge
    limit_bytes = int(limit_gb * 2**30)
    if device.type == "cuda":
        _fractions_before[device] = torch.cuda.get_per_process_memory_fraction(device)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    return LimitedGauge(gauge, limit_bytes)
