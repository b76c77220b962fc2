"""What a training process will hold on its device at the highest moment of a step. Arithmetic only.

The step has two moments that can be the highest: a forward and backward pass, whose activations, logits and gradients
were traced from shapes (``train/memory_estimate``), and the optimizer's step, when all gradients are there and no
activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Optional

from scu_trainer.hardware.optimizer_bytes import memory_of, state_bytes

MARGIN = 0.15
"""Share of a prediction that must be free beside it before it is said to fit: see docs/plan.md for how far predictions
were off."""


FLOAT32_BYTES = 4

LOGITS_WITH_TEACHER = 3
"""What the logits of a step take beside those of a teacher, in place of alone: its own, both softened, both learned."""


@dataclass(frozen=True)
class Overhead:
    """What a process needs beside its tensors. ``fixed_bytes``: code and buffers of libraries, from the first step on.
    ``slack``: share of what a step makes and frees that the allocator cannot use again."""

    fixed_bytes: int
    slack: float


OVERHEAD = {
    "cpu": Overhead(fixed_bytes=80 * 2**20, slack=0.30),
    "cuda": Overhead(fixed_bytes=550 * 2**20, slack=0.06),
}
"""By kind of device; others count as a CPU."""


@dataclass(frozen=True)
class Trained:
    """The weights that are trained: ``size_bytes`` in their own type, their number, and the bytes of the largest."""

    size_bytes: int
    weights: int
    largest_bytes: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the highest moment, by what they are for.

    Fields:
        regularization: the weights where training began, toward which lambda decays.
        averages: the moving averages of weights.
        teacher: the weights of a larger model that is learned from.
        exchange: what processes keep to exchange gradients.
        overhead: what the allocator cannot use again.
        libraries: their code, buffers and compiled kernels; on a GPU its context, which no allocator counts.
    """

    weights: int
    gradients: int
    optimizer: int
    regularization: int
    averages: int
    teacher: int
    exchange: int
    activations: int
    logits: int
    overhead: int
    libraries: int

    @property
    def peak_bytes(self) -> int:
        return sum(asdict(self).values())

    @property
    def lasting_bytes(self) -> int:
        """What no smaller micro-batch saves."""
        beside = self.regularization + self.averages + self.teacher + self.exchange + self.libraries
        return self.weights + self.optimizer + beside

    @property
    def needed_bytes(self) -> int:
        """With a margin for what the prediction does not know."""
        return round(self.peak_bytes * (1 + MARGIN))

    def fits(self, limit_bytes: int) -> bool:
        return self.needed_bytes <= limit_bytes

    def as_dict(self) -> dict[str, Any]:
        """JSON-like."""
        return {"peak_bytes": self.peak_bytes, "parts": asdict(self)}


PARTS = tuple(item.name for item in fields(MemoryEstimate))


@dataclass(frozen=True)
class Held:
    """What a run keeps of its trained weights beside them. ``processes``: that train together. ``zero_stage``: 1 or 2
    of DeepSpeed, whose float32 weights and optimizer state are shared out; 0 without it. ``teacher_bytes``: of the
    weights of a model that is learned from."""

    optim: str
    holds_start: bool
    holds_averages: bool
    processes: int = 1
    zero_stage: int = 0
    teacher_bytes: int = 0

    def bytes_of(self, trained: Trained) -> dict[str, int]:
        """By part."""
        state, exchange = state_bytes(self.optim, trained.size_bytes, trained.weights), 0
        if self.zero_stage:
            state = (state + FLOAT32_BYTES * trained.weights) // self.processes
            exchange = trained.size_bytes // self.processes  # this process's share of the reduced gradients
        elif self.processes > 1:
            exchange = trained.size_bytes  # the buckets of DistributedDataParallel
        return {
            "optimizer": state,
            "regularization": trained.size_bytes if self.holds_start else 0,
            "averages": trained.size_bytes if self.holds_averages else 0,
            "teacher": self.teacher_bytes,
            "exchange": exchange,
        }


def estimate_memory(
    traced: Mapping[str, int],
    trained: Trained,
    held: Held,
    device: str,
    heap_bytes: Optional[int] = None,
    compiled_bytes: int = 0,
) -> MemoryEstimate:
    """``traced``: bytes by part at the highest moment of a forward and backward pass: weights, gradients, activations
    and logits. ``device``: kind of the training device. ``heap_bytes``: to which the heap grows for all but weights, if
    that is known. ``compiled_bytes``: kernels for more shapes than those of one step."""
    if held.teacher_bytes:
        traced = {**traced, "logits": LOGITS_WITH_TEACHER * traced["logits"]}
    moment = {part: traced[part] for part in ("gradients", "activations", "logits")}
    stepping = int(memory_of(held.optim).step_copies * trained.largest_bytes)
    if trained.size_bytes + stepping > sum(moment.values()):
        moment = {"gradients": trained.size_bytes, "activations": stepping, "logits": 0}
    found = MemoryEstimate(weights=traced["weights"], overhead=0, libraries=0, **moment, **held.bytes_of(trained))
    beside = OVERHEAD.get(device, OVERHEAD["cpu"])
    unusable = beside.slack * (traced["activations"] + traced["logits"])
    if heap_bytes is not None:
        unusable = max(0, heap_bytes - (found.peak_bytes - found.weights - found.teacher))
    return replace(found, overhead=round(unusable), libraries=beside.fixed_bytes + compiled_bytes)
