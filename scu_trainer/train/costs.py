"""What a run costs: seconds of a step and memory, measured while it trains."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, Optional

import torch
from transformers import TrainerCallback

from scu_trainer.hardware.probe import resident_bytes


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, without what happens between steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._begun_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self._begun_s)

    @property
    def typical_s(self) -> Optional[float]:
        """Median of the later half: the first steps also allocate and choose kernels. None before the first step."""
        return median(self.seconds[len(self.seconds) // 2 :]) if self.seconds else None


def bytes_before_model(device: torch.device) -> Optional[int]:
    """Memory that this process has on the training device before there is a model. None where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes(Path("/proc/self")) if device.type == "cpu" else None


def cost_figures(device: torch.device, times: StepTimes, before_bytes: Optional[int], trainer) -> dict[str, Any]:
    """For scu_metrics.json. ``peak_bytes``: the highest that the memory loop saw at a step; None without it."""
    peak = trainer.chunked.loop.books.peak_bytes if trainer.chunked is not None else 0
    return {
        "device": str(device),
        "seconds_per_step": times.typical_s,
        "before_model_bytes": before_bytes,
        "peak_bytes": peak or None,
    }
