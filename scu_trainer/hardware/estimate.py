"""What a training process will hold on its device at the highest moment of a step. Arithmetic only.

The step has two moments that can be the highest: a forward and backward pass, whose activations, logits and gradients
were traced from shapes (``train/memory_estimate``), and the optimizer's step, when all gradients are there and no
activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Optional

from scu_trainer.hardware.optimizer_bytes import (
    FLOAT32_BYTES,
    UPDATED_IN_PLACE,
    Apart,
    memory_of,
    part_bytes_on,
    state_bytes,
    step_blocks,
)

MARGIN = 0.15
"""Share of a prediction that must be free beside it before it is said to fit: see docs/plan.md for how far predictions
were off."""

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
    """The weights that are trained: ``size_bytes`` in their own type, their number, and the bytes of the largest.
    ``apart``: how many of them some optimizers treat unlike the others."""

    size_bytes: int
    weights: int
    largest_bytes: int
    apart: Mapping[Apart, int] = field(default_factory=dict)

    @property
    def largest_weights(self) -> int:
        return self.largest_bytes * self.weights // max(1, self.size_bytes)


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
    weights of a model that is learned from. ``more_copies``: that the arguments of ``optim`` add to its state.
    ``copies_parts``: memory control copies what the step of an optimizer will write, a few weights at a time."""

    optim: str
    holds_start: bool
    holds_averages: bool
    processes: int = 1
    zero_stage: int = 0
    teacher_bytes: int = 0
    more_copies: int = 0
    copies_parts: bool = False

    def bytes_of(self, trained: Trained) -> dict[str, int]:
        """By part."""
        apart_weights = trained.apart.get(memory_of(self.optim).apart, 0)
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

    def step_blocks(self, trained: Trained, device: str) -> list[int]:
        """Sizes of what the optimizer's step takes for a moment. ``device``: its kind."""
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
    stepping = sum(held.step_blocks(trained, device))
    if trained.size_bytes + stepping > sum(moment.values()):
        moment = {"gradients": trained.size_bytes, "activations": stepping, "logits": 0}
    found = MemoryEstimate(weights=traced["weights"], overhead=0, libraries=0, **moment, **held.bytes_of(trained))
    beside = OVERHEAD.get(device, OVERHEAD["cpu"])
    unusable = beside.slack * (traced["activations"] + traced["logits"])
    if heap_bytes is not None:
        unusable = max(0, heap_bytes - (found.peak_bytes - found.weights - found.teacher))
    return replace(found, overhead=round(unusable), libraries=beside.fixed_bytes + compiled_bytes)
