"""Watches main memory while a run trains on an accelerator, and collects garbage before other processes run short."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Optional

import torch

from scu_trainer.run_files import format_bytes
from scu_trainer.train.step.recovery.memory import CpuGauge, Gauge, free_memory

logger = logging.getLogger("scu_trainer")

LOOKS_EVERY_STEPS = 20
"""Collecting takes some tenths of a second, and memory that is still referenced is not worth trying at every step."""

FULL_SHARE = 0.92
"""Default threshold, as a share of main memory or of the container's limit."""


class HostMemory:
    """Collects garbage when main memory is nearly full. ``threshold_gb``: GiB in use, by all processes, from which on
    it collects; None: ``FULL_SHARE`` of the limit."""

    def __init__(
        self,
        threshold_gb: Optional[float],
        gauge: Optional[Gauge] = None,
        collect: Callable[[torch.device], int] = free_memory,
    ) -> None:
        self._threshold_gb, self._gauge, self._collect = threshold_gb, gauge or CpuGauge(), collect
        self.collections = 0

    def collect_if_full(self, step: int) -> None:
        """Collect garbage after optimizer step ``step`` if memory is full; checked every LOOKS_EVERY_STEPS steps."""
        if step % LOOKS_EVERY_STEPS:
            return
        reading = self._gauge.read()
        share = FULL_SHARE * reading.limit_bytes
        threshold_bytes = share if self._threshold_gb is None else self._threshold_gb * 2**30
        if reading.used_bytes < threshold_bytes:
            return
        self.collections += 1
        freed_bytes = self._collect(torch.device("cpu"))
        logger.warning(
            "step %d: %s of main memory are in use, more than the threshold of %s; this run freed %s by garbage "
            "collection",
            step,
            format_bytes(reading.used_bytes),
            format_bytes(threshold_bytes),
            format_bytes(freed_bytes),
        )
