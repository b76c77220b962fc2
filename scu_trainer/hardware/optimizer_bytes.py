"""The memory of optimizers: the state that they keep for the trainable weights, and temporary blocks of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

Apart = Literal["embeddings", "no matrices"]
"""Groups of weights that some optimizers treat differently: embeddings, or everything but the matrices between the
embeddings and the output layer."""

FLOAT32_BYTES = 4

UPDATED_IN_PLACE = "adamw_torch_fused"
"""The optimizer that updates in place: its step allocates nothing, so nothing must be copied before it."""


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory that one optimizer needs.

    Its state is ``copies`` of the trainable weights in their own dtype plus ``bytes_per_weight``. For weights that it
    treats ``apart``, ``apart_copies`` and ``apart_bytes_per_weight`` count instead. While it updates a parameter, it
    needs ``step_copies`` of the largest one, and on a CPU also ``cpu_step_copies`` in float32. On a GPU,
    ``foreach_copies`` (if not 0) of all weights that are updated together count instead.
    """

    copies: float = 0.0
    bytes_per_weight: float = 0.0
    step_copies: float = 0.0
    cpu_step_copies: float = 0.0
    foreach_copies: int = 0
    apart: Optional[Apart] = None
    apart_copies: float = 0.0
    apart_bytes_per_weight: float = 0.0


def _bitsandbytes_8bit(bytes_per_weight: int, cpu_step_copies: int) -> OptimizerMemory:
    """Return the needs of an 8-bit optimizer of bitsandbytes. The Trainer keeps the state of embeddings in 32 bits. On
    a CPU the update is computed from unpacked copies."""
    return OptimizerMemory(
        bytes_per_weight=bytes_per_weight,
        cpu_step_copies=cpu_step_copies,
        apart="embeddings",
        apart_bytes_per_weight=FLOAT32_BYTES * bytes_per_weight,
    )


STATES: tuple[tuple[str, OptimizerMemory], ...] = (
    ("lion_8bit", _bitsandbytes_8bit(1, cpu_step_copies=5)),
    ("rmsprop_bnb_8bit", _bitsandbytes_8bit(1, cpu_step_copies=3)),
    ("ademamix_8bit", _bitsandbytes_8bit(3, cpu_step_copies=9)),
    ("adamw_torch_8bit", OptimizerMemory(bytes_per_weight=2, cpu_step_copies=2)),
    ("muon", OptimizerMemory(copies=1, step_copies=3, apart="no matrices", apart_copies=2)),
    ("schedule_free_sgd", OptimizerMemory(copies=1)),
    ("schedule_free", OptimizerMemory(copies=2, step_copies=1, foreach_copies=1)),
    ("grokadamw", OptimizerMemory(copies=3, step_copies=2)),
    ("8bit", _bitsandbytes_8bit(2, cpu_step_copies=5)),
    ("4bit", OptimizerMemory(bytes_per_weight=1, cpu_step_copies=6)),
    ("anyprecision", OptimizerMemory(bytes_per_weight=8)),
    ("adafactor", OptimizerMemory(step_copies=3)),
    ("sgd", OptimizerMemory()),
    ("lion", OptimizerMemory(bytes_per_weight=4, cpu_step_copies=3)),
    ("adagrad", OptimizerMemory(copies=1, step_copies=1, foreach_copies=2)),
    ("rmsprop_bnb", OptimizerMemory(bytes_per_weight=4, cpu_step_copies=3)),
    ("rmsprop", OptimizerMemory(copies=1, step_copies=1, foreach_copies=1)),
    ("ademamix", OptimizerMemory(bytes_per_weight=12, cpu_step_copies=4)),
    ("adamw_torch_fused", OptimizerMemory(copies=2)),
    ("adamw", OptimizerMemory(copies=2, step_copies=2, foreach_copies=1)),
)
"""Part of an optimizer's name, and its needs. The first match counts; without one they count as 0. Copies on a CPU were
measured with bitsandbytes 0.50 and torchao 0.18, whose updates unpack the state."""

NOT_IN_ONE_PLACE = ("paged", "galore", "apollo", "lomo")


def optimizer_memory_of(optim: str) -> OptimizerMemory:
    """Return the memory that ``optim`` needs, a lower bound: 0 if its state can move elsewhere or is not known."""
    if any(part in optim for part in NOT_IN_ONE_PLACE):
        return OptimizerMemory()
    return next((needs for part, needs in STATES if part in optim), OptimizerMemory())


def uncounted_state(optim: str) -> Optional[str]:
    """Return why the state of ``optim`` is not counted; None if it is known, or is elsewhere by design (paged)."""
    if any(part in optim for part in ("galore", "apollo")):
        return f"the state of optim: {optim}, which depends on its rank"
    known = "paged" in optim or "lomo" in optim or any(part in optim for part, _ in STATES)
    return None if known or not optim else f"the state of optim: {optim}, which is not known"


def state_bytes(optim: str, trained_bytes: int, trained_weights: int, apart_weights: int = 0) -> int:
    """Return the bytes of the optimizer's state for ``trained_weights`` weights that take ``trained_bytes``.
    ``apart_weights`` is how many of these it treats differently."""
    needs, stored_bytes = optimizer_memory_of(optim), trained_bytes / max(1, trained_weights)
    per_weight = needs.copies * stored_bytes + needs.bytes_per_weight
    per_apart_weight = needs.apart_copies * stored_bytes + needs.apart_bytes_per_weight
    return int(per_weight * (trained_weights - apart_weights) + per_apart_weight * apart_weights)


def step_blocks(optim: str, device: str, largest_bytes: int, largest_weights: int, together_bytes: int) -> list[int]:
    """Return the sizes of the temporary blocks while the optimizer updates the largest parameter. On a GPU they are for
    all weights that are updated together. ``device`` is the type of the device."""
    needs = optimizer_memory_of(optim)
    if device in ("cuda", "xpu") and needs.foreach_copies:
        return [together_bytes] * needs.foreach_copies
    on_cpu = int(needs.cpu_step_copies) if device == "cpu" else 0
    return [largest_bytes] * int(needs.step_copies) + [FLOAT32_BYTES * largest_weights] * on_cpu


def part_bytes_on(device: str) -> int:
    """Return how many bytes of weights memory control updates together on a device of type ``device``.

    Copies take about three times this, and the update's working memory takes it once or twice. On a CPU small parts are
    better, because the C library reuses their memory instead of mapping it again (twice as fast); elsewhere the number
    of kernel launches matters.
    """
    return (8 if device == "cpu" else 64) * 2**20


def argument_copies(optim_args: Optional[str]) -> int:
    """Return how many copies of the trainable weights ``optim_args`` adds to the state of torch's SGD and RMSprop."""
    pairs = (pair.partition("=")[::2] for pair in (optim_args or "").replace(" ", "").split(","))
    return sum(name in ("momentum", "centered") and value not in ("0", "0.0", "False") for name, value in pairs)
