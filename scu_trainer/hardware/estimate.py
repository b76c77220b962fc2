"""Estimate the peak memory of a training process on its device. Arithmetic only.

The peak of a step is either in a forward and backward pass, with activations, logits and gradients that were traced
from shapes (``train/memory_estimate``), or in the optimizer's step, with all gradients and no activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Optional

from scu_trainer.hardware.optimizer_bytes import (
    FLOAT32_BYTES,
    UPDATED_IN_PLACE,
    Apart,
    optimizer_memory_of,
    part_bytes_on,
    state_bytes,
    step_blocks,
)

MARGIN = 0.15
"""Share of the predicted bytes that must be free in addition; docs/plan.md says how far predictions were off."""

LOGITS_WITH_TEACHER = 3
"""Factor for the memory of a step's logits with a teacher: its logits, and the learned and softened ones of both."""


@dataclass(frozen=True)
class Overhead:
    """Memory in addition to tensors: ``fixed_bytes`` for code and buffers of libraries, from the first step on;
    ``slack`` is the share of the memory allocated and freed in a step that the allocator cannot reuse."""

    fixed_bytes: int
    slack: float


OVERHEAD = {
    "cpu": Overhead(fixed_bytes=80 * 2**20, slack=0.30),
    "cuda": Overhead(fixed_bytes=550 * 2**20, slack=0.06),
}
"""Overhead by device type; other types count as a CPU."""


@dataclass(frozen=True)
class TrainableWeights:
    """The trainable weights: ``size_bytes`` in their own dtype, their number, and the bytes of the largest parameter.
    ``apart`` is the number of weights in each group that some optimizers treat differently."""

    size_bytes: int
    weights: int
    largest_bytes: int
    apart: Mapping[Apart, int] = field(default_factory=dict)

    @property
    def largest_weights(self) -> int:
        return self.largest_bytes * self.weights // max(1, self.size_bytes)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a step, by purpose.

    Fields:
        regularization: the initial weights, toward which lambda decays.
        averages: the moving averages of weights.
        teacher: the weights of a larger model that is distilled.
        exchange: buffers of processes that exchange gradients.
        overhead: memory that the allocator cannot reuse.
        libraries: their code, buffers and compiled kernels, and the context of a GPU, which no allocator counts.
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
        """Bytes that a smaller micro-batch does not reduce."""
        extra = self.regularization + self.averages + self.teacher + self.exchange + self.libraries
        return self.weights + self.optimizer + extra

    @property
    def needed_bytes(self) -> int:
        """Peak bytes with a margin for errors of the prediction."""
        return round(self.peak_bytes * (1 + MARGIN))

    def fits(self, limit_bytes: int) -> bool:
        return self.needed_bytes <= limit_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-compatible values."""
        return {"peak_bytes": self.peak_bytes, "parts": asdict(self)}


PARTS = tuple(item.name for item in fields(MemoryEstimate))


@dataclass(frozen=True)
class AdditionalMemory:
    """What a run keeps in memory in addition to its trainable weights.

    Fields:
        holds_start, holds_averages: whether it keeps the initial weights, and moving averages of the weights.
        processes: number of processes that train together.
        zero_stage: 1 or 2 with DeepSpeed, which shards float32 weights and optimizer state; 0 without it.
        teacher_bytes: the weights of a teacher model.
        more_copies: copies of the weights that the arguments of ``optim`` add to its state.
        copies_parts: whether memory control copies what the optimizer's step will write, a few weights at a time.
    """

    optim: str
    holds_start: bool
    holds_averages: bool
    processes: int = 1
    zero_stage: int = 0
    teacher_bytes: int = 0
    more_copies: int = 0
    copies_parts: bool = False

    def bytes_of(self, trained: TrainableWeights) -> dict[str, int]:
        """Return the bytes by part of MemoryEstimate."""
        apart_weights = trained.apart.get(optimizer_memory_of(self.optim).apart, 0)
        state, exchange = state_bytes(self.optim, trained.size_bytes, trained.weights, apart_weights), 0
        state += self.more_copies * trained.size_bytes
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

    def step_blocks(self, trained: TrainableWeights, device: str) -> list[int]:
        """Return the sizes of the temporary blocks in an optimizer's step on a device of type ``device``."""
        part_bytes = min(trained.size_bytes, max(trained.largest_bytes, part_bytes_on(device)))
        own_bytes = trained.size_bytes // (self.processes if self.zero_stage else 1)
        together_bytes = part_bytes if self.copies_parts else own_bytes
        blocks = step_blocks(self.optim, device, trained.largest_bytes, trained.largest_weights, together_bytes)
        if self.copies_parts and self.optim not in ("", UPDATED_IN_PLACE):
            state_bytes = self.bytes_of(trained)["optimizer"]
            blocks.append(part_bytes + part_bytes * state_bytes // max(1, trained.size_bytes))
        return blocks


def estimate_memory(
    traced: Mapping[str, int],
    trained: TrainableWeights,
    held: AdditionalMemory,
    device: str,
    heap_bytes: Optional[int] = None,
    compiled_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate the bytes at the peak of a step on a device of type ``device``. ``traced`` has the bytes of weights,
    gradients, activations and logits at the peak of a forward and backward pass; ``heap_bytes`` is the size to which
    the heap grows for everything but weights, if known; ``compiled_bytes`` is for kernels of more shapes than one step
    has."""
    if held.teacher_bytes:
        traced = {**traced, "logits": LOGITS_WITH_TEACHER * traced["logits"]}
    peak = {part: traced[part] for part in ("gradients", "activations", "logits")}
    optimizer_step_bytes = sum(held.step_blocks(trained, device))
    if trained.size_bytes + optimizer_step_bytes > sum(peak.values()):
        peak = {"gradients": trained.size_bytes, "activations": optimizer_step_bytes, "logits": 0}
    estimate = MemoryEstimate(weights=traced["weights"], overhead=0, libraries=0, **peak, **held.bytes_of(trained))
    extra = OVERHEAD.get(device, OVERHEAD["cpu"])
    unusable = extra.slack * (traced["activations"] + traced["logits"])
    if heap_bytes is not None:
        unusable = max(0, heap_bytes - (estimate.peak_bytes - estimate.weights - estimate.teacher))
    return replace(estimate, overhead=round(unusable), libraries=extra.fixed_bytes + compiled_bytes)
