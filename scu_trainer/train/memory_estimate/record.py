"""The memory prediction of a run: logged before the first step, and saved together with the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.hardware.estimate import PARTS, MemoryEstimate
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.hardware.probe import resident_bytes
from scu_trainer.imports import without_collector
from scu_trainer.run_files import format_bytes
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, free_memory, is_main_process
from scu_trainer.train.memory_estimate.predict import predict
from scu_trainer.train.memory_estimate.shapes import Step
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

WORTH_SAYING = 0.01
"""Parts below this share of the peak are not listed."""


@dataclass(frozen=True)
class RunEstimate:
    """The prediction, or the reason why there is none.

    ``estimate``: for micro-batches of ``step``. ``whole``: the step if memory is not short. ``reason``: why there is no
    estimate. ``limit_bytes``: available main memory, if the system kills a process that takes more.
    """

    estimate: Optional[MemoryEstimate] = None
    step: Optional[Step] = None
    whole: Optional[Step] = None
    reason: str = ""
    device: str = "cpu"
    limit_bytes: Optional[int] = None

    @property
    def first_tokens(self) -> Optional[int]:
        """Tokens of the micro-batches to start with; None if memory is not short."""
        return None if self.step == self.whole else self.step.tokens

    @property
    def line(self) -> str:
        if self.estimate is None:
            return f"memory: not predicted, {self.reason}"
        peak = self.estimate.peak_bytes
        sizes_by_part = {part: getattr(self.estimate, part) for part in PARTS}
        parts = [f"{part} {format_bytes(held)}" for part, held in sizes_by_part.items() if held >= WORTH_SAYING * peak]
        rows = f"{self.step.rows} row{'s' if self.step.rows > 1 else ''}"
        size = rows + (f" of {self.step.length} tokens" if self.step.length > 1 else "")
        line = f"memory: a step in micro-batches of {size} should take {format_bytes(peak)} ({', '.join(parts)})"
        if self.limit_bytes is None or (self.first_tokens is None and self.estimate.fits(self.limit_bytes)):
            return line
        with_limit = f"{line}; {format_bytes(self.limit_bytes)} of main memory are available"
        if self.estimate.fits(self.limit_bytes):
            return f"{with_limit}, and larger micro-batches would not fit"
        return f"{with_limit}, and the system kills what takes more: scu-trainer plan suggests settings that take less"

    def as_dict(self, measured_bytes: Optional[int]) -> dict[str, Any]:
        """Return the record for scu_metrics.json. ``measured_bytes``: peak above the memory in use before the model."""
        if self.estimate is None:
            return {"reason": self.reason, "measured_peak_bytes": measured_bytes}
        not_counted = self.estimate.libraries if self.device != "cpu" else 0  # measured is torch's allocator
        return {
            "predicted_peak_bytes": self.estimate.peak_bytes - not_counted,
            "measured_peak_bytes": measured_bytes,
            "predicted_parts": self.estimate.as_dict()["parts"],
            "rows_per_chunk": self.step.rows,
            "tokens_per_row": self.step.length,
        }


def predict_run(job: Job, parts: TrainingComponents) -> RunEstimate:
    """Predict the memory of a loaded job without changing ``parts``. A failure gives a reason; training continues."""
    reason = _reason_against_prediction(job)
    if reason is not None:
        return RunEstimate(reason=reason)
    if job.efficiency.keep_freed_memory and job.training.device.type == "cpu":
        keep_freed()  # as training will do
    try:
        with without_collector():
            limit_bytes = _available_main_memory(job, parts)
            found = predict(job, parts, limit_bytes if job.memory.memory_control else None)
            return RunEstimate(*found, device=job.training.device.type, limit_bytes=limit_bytes)
    except Exception as error:  # a model's code can raise anything on fake tensors
        if is_out_of_memory(error):
            raise
        forget_traceback(error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return RunEstimate(reason=f"its code cannot run without data: {first}")


def _available_main_memory(job: Job, parts: TrainingComponents) -> Optional[int]:
    """Return the main memory, of the machine or its container, for the model and everything that training adds.

    An allocation beyond it does not fail but ends the process, so the first step cannot be used to learn from. Returns
    None on a GPU, which has its own limit, and if several processes share the memory.
    """
    training, before, now = job.training, parts.before_model_bytes, resident_bytes(Path("/proc/self"))
    if training.device.type != "cpu" or training.world_size > 1 or before is None or now is None:
        return None
    return free_memory(training).main_bytes + now - before


def _reason_against_prediction(job: Job) -> Optional[str]:
    if not job.efficiency.predict_memory:
        return "predict_memory is false"
    if job.data.streaming:
        return "the rows of a stream are not known in advance"
    zero = getattr(job.training, "hf_deepspeed_config", None)
    if zero is not None and (zero.is_zero3() or zero.is_offload()):
        return "ZeRO-3 and offloading move parts at times of their choice"
    if job.training.fsdp or job.model.device_map is not None:
        return "FSDP and device_map place each part themselves"
    return None if is_main_process() else "only the main process predicts it"
