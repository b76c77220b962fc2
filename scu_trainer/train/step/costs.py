"""The cost of a run, measured while it trains: seconds per step and memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any, Optional

import torch
from transformers import TrainerCallback

from scu_trainer.hardware.probe import resident_bytes
from scu_trainer.train.step.micro_batch_sizer import MicroBatchSizer
from scu_trainer.train.step.recovery.memory import Gauge, gauge_for

MEASURED = ("cpu", "cuda", "mps")
"""Device types that ``gauge_for`` supports."""

RESTARTS_PEAK = "/proc/self/clear_refs"


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
        """Median over the later half: early steps also allocate and choose kernels. None before the first step."""
        return median(self.seconds[len(self.seconds) // 2 :]) if self.seconds else None


class StepPeaks(TrainerCallback):
    """The most memory of the training device that this process holds within steps, not in evaluations or saves.

    gauge: None if the device keeps no peak; then nothing is known.
    loop: a memory loop, which resets the peak inside each step, so that this class must not; its statistics hold the
    peak.
    """

    def __init__(self, gauge: Optional[Gauge], loop: Optional[MicroBatchSizer] = None) -> None:
        self._gauge, self._loop = gauge, loop
        self._highest_bytes = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if self._gauge is not None and self._loop is None:
            self._gauge.reset()

    def on_step_end(self, args, state, control, **kwargs):
        if self._gauge is not None:
            self._highest_bytes = max(self._highest_bytes, self._gauge.read().own_peak_bytes)

    @property
    def peak_bytes(self) -> Optional[int]:
        """None before the first step, and where it is unknown."""
        seen_by_loop = 0 if self._loop is None else self._loop.statistics.peak_bytes
        return max(self._highest_bytes, seen_by_loop) or None


def step_peaks(trainer: Any) -> StepPeaks:
    """Return a callback that measures the memory peaks of ``trainer``, an SCUTrainer."""
    sizer = trainer.micro_batches and trainer.micro_batches.loop
    return StepPeaks(_peak_gauge(trainer.args.device), sizer if sizer and sizer.gauge else None)


def _peak_gauge(device: torch.device, restarts_peak: str = RESTARTS_PEAK) -> Optional[Gauge]:
    """Return None for a device that cannot be measured, and for main memory if the kernel cannot reset peaks: the
    memory held at the end of a step says little about its peak."""
    if device.type not in MEASURED or (device.type == "cpu" and not os.access(restarts_peak, os.W_OK)):
        return None
    return gauge_for(device)


def bytes_before_model(device: torch.device) -> Optional[int]:
    """Return the memory that this process holds on the training device before the model is loaded; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes(Path("/proc/self")) if device.type == "cpu" else None


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has finished all queued work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost_figures(
    device: torch.device, times: StepTimes, before_bytes: Optional[int], peaks: StepPeaks
) -> dict[str, Any]:
    """Return the section of scu_metrics.json. ``peak_bytes``: the highest memory seen within a step."""
    return {
        "device": str(device),
        "seconds_per_step": times.typical_s,
        "before_model_bytes": before_bytes,
        "peak_bytes": peaks.peak_bytes,
    }


def above_baseline(costs: dict[str, Any]) -> Optional[int]:
    """Return the bytes of the highest step beyond what was held before the model; None if either is unknown."""
    highest, before = costs["peak_bytes"], costs["before_model_bytes"]
    return None if highest is None or before is None else highest - before
