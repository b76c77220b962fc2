"""A run's prediction of its own memory: said before the first step, written beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.hardware.estimate import PARTS, MemoryEstimate
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.imports import without_collector
from scu_trainer.run_files import readable
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, is_main_process
from scu_trainer.train.memory_estimate.predict import predict
from scu_trainer.train.memory_estimate.shapes import Step
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

WORTH_SAYING = 0.01
"""Share of the peak below which a part is not named."""


@dataclass(frozen=True)
class RunEstimate:
    """``estimate`` in micro-batches of ``step``, or the ``reason`` why there is none."""

    estimate: Optional[MemoryEstimate] = None
    step: Optional[Step] = None
    reason: str = ""
    device: str = "cpu"

    @property
    def line(self) -> str:
        if self.estimate is None:
            return f"memory: not predicted, {self.reason}"
        peak = self.estimate.peak_bytes
        named = {part: getattr(self.estimate, part) for part in PARTS}
        parts = [f"{part} {readable(held)}" for part, held in named.items() if held >= WORTH_SAYING * peak]
        rows = f"{self.step.rows} row{'s' if self.step.rows > 1 else ''}"
        size = rows + (f" of {self.step.length} tokens" if self.step.length > 1 else "")
        return f"memory: a step in micro-batches of {size} should take {readable(peak)} ({', '.join(parts)})"

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
            return RunEstimate(*predict(job, parts), device=job.training.device.type)
    except Exception as error:  # whatever a model's own code says to tensors without content
        if is_out_of_memory(error):
            raise
        forget_traceback(error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return RunEstimate(reason=f"its code cannot run without data: {first}")


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
