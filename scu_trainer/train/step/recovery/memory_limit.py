"""A limit of one's own: what this process may use of its device, however much more there is (``memory_limit_gb``)."""

from __future__ import annotations

from typing import Optional

import torch

from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading, gauge_for


class LimitedGauge(Gauge):
    """``inner`` under a limit on this process's own memory.

    Reports whichever leaves less room: the device with all who use it, or the limit with this process alone.
    """

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
        return MemoryReading(
            limit_bytes=self._limit_bytes,
            used_bytes=reading.own_bytes,
            peak_bytes=reading.own_peak_bytes,
            limit_name="memory_limit_gb",
            allocation_retries=reading.allocation_retries,
            process_bytes=reading.process_bytes,
        )


def limited_gauge(device: torch.device, limit_gb: Optional[float]) -> Gauge:
    """The gauge of a device, under ``limit_gb`` GiB where that is given.

    On CUDA the allocator is held to the limit too: what exceeds it fails in this process, where it can be recovered,
    and not in a neighbour's. Raises RequirementError for a device that cannot be measured.
    """
    gauge = gauge_for(device)
    if limit_gb is None:
        return gauge
    limit_bytes = int(limit_gb * 2**30)
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    return LimitedGauge(gauge, limit_bytes)
