"""A run's prediction of its own memory: said before the first step, written beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.hardware.estimate import PARTS, MemoryEstimate
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.hardware.probe import resident_bytes
from scu_trainer.imports import without_collector
from scu_trainer.run_files import readable
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, free_memory, is_main_process
from scu_trainer.train.memory_estimate.predict import predict
from scu_trainer.train.memory_estimate.shapes import Step
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

WORTH_SAYING = 0.01
"""Share of the peak below which a part is not named."""


@dataclass(frozen=True)
class RunEstimate:
    """``estimate`` in micro-batches of ``step``, or the ``reason`` why there is none. ``whole``: the step where no
    memory is short. ``limit_bytes``: main memory that is there for it, where what takes more is killed."""

    estimate: Optional[MemoryEstimate] = None
    step: Optional[Step] = None
    whole: Optional[Step] = None
    reason: str = ""
    device: str = "cpu"
    limit_bytes: Optional[int] = None

    @property
    def first_tokens(self) -> Optional[int]:
        """Of the micro-batches to begin with; None: as large as they are where memory is not short."""
        return None if self.step == self.whole else self.step.tokens

    @property
    def line(self) -> str:
        if self.estimate is None:
            return f"memory: not predicted, {self.reason}"
        peak = self.estimate.peak_bytes
        named = {part: getattr(self.estimate, part) for part in PARTS}
        parts = [f"{part} {readable(held)}" for part, held in named.items() if held >= WORTH_SAYING * peak]
        rows = f"{self.step.rows} row{'s' if self.step.rows > 1 else ''}"
        size = rows + (f" of {self.step.length} tokens" if self.step.length > 1 else "")
        line = f"memory: a step in micro-batches of {size} should take {readable(peak)} ({', '.join(parts)})"
        if self.limit_bytes is None or (self.first_tokens is None and self.estimate.fits(self.limit_bytes)):
            return line
        there = f"{line}; {readable(self.limit_bytes)} of main memory are there for it"
        if self.estimate.fits(self.limit_bytes):
            return f"{there}, and larger ones would not fit"
        return f"{there}, and the system kills what takes more: scu-trainer plan names settings that take less"

    def as_dict(self, measured_bytes: Optional[int]) -> dict[str, Any]:
        """For scu_metrics.json. ``measured_bytes``: of the run's steps, beyond what was there before the model."""
        if self.estimate is None:
            return {"reason": self.reason, "measured_peak_bytes": measured_bytes}
        not_counted = self.estimate.libraries if self.device != "cpu" else 0  # torch measures its allocator there
        return {
            "predicted_peak_bytes": self.estimate.peak_bytes - not_counted,
            "measured_peak_bytes": measured_bytes,
            "predicted_parts": self.estimate.as_dict()["parts"],
            "rows_per_chunk": self.step.rows,
            "tokens_per_row": self.step.length,
        }


def prediction(job: Job, parts: TrainingComponents) -> RunEstimate:
    """Of a job that is loaded; ``parts`` stay as they are. A model that cannot be predicted is trained all the same."""
    reason = _obstacle(job)
    if reason is not None:
        return RunEstimate(reason=reason)
    if job.efficiency.keep_freed_memory and job.training.device.type == "cpu":
        keep_freed()  # as training will have it
    try:
        with without_collector():
            limit_bytes = _killing_limit(job, parts)
            found = predict(job, parts, limit_bytes if job.memory.memory_control else None)
            return RunEstimate(*found, device=job.training.device.type, limit_bytes=limit_bytes)
    except Exception as error:  # whatever a model's own code says to tensors without content
        if is_out_of_memory(error):
            raise
        forget_traceback(error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return RunEstimate(reason=f"its code cannot run without data: {first}")


def _killing_limit(job: Job, parts: TrainingComponents) -> Optional[int]:
    """Main memory for the model and all that training adds, of this machine or its container: an allocation beyond it
    does not fail but ends the process, so nothing can be learned from the first step. None where the limit is another
    one (a GPU's), or several processes share it."""
    training, before, now = job.training, parts.before_model_bytes, resident_bytes(Path("/proc/self"))
    if training.device.type != "cpu" or training.world_size > 1 or before is None or now is None:
        return None
    return free_memory(training).main_bytes + now - before


def _obstacle(job: Job) -> Optional[str]:
    if not job.efficiency.predict_memory:
        return "predict_memory is false"
    if job.data.streaming:
        return "the rows of a stream are not known in advance"
    zero = getattr(job.training, "hf_deepspeed_config", None)
    if zero is not None and (zero.is_zero3() or zero.is_offload()):
        return "ZeRO-3 and offloading decide when to move each part"
    if job.training.fsdp or job.model.device_map is not None:
        return "FSDP and device_map place each part themselves"
    return None if is_main_process() else "the first process says it"
