"""What an optimizer keeps for the weights that it trains, and what it needs for a moment while it steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

Apart = Literal["embeddings", "no matrices"]
"""Weights that some optimizers treat unlike the others: of embeddings; all but matrices between these and the output
layer."""

FLOAT32_BYTES = 4

UPDATED_IN_PLACE = "adamw_torch_fused"
"""Whose step takes nothing, so that nothing has to be copied before it."""


@dataclass(frozen=True)
class OptimizerMemory:
    """``copies``: of the trained weights in their own type; ``bytes_per_weight``: beside them. ``apart_copies`` and
    ``apart_bytes_per_weight``: in their place, of the weights that it treats ``apart``. ``step_copies``: of the largest
    trained weight, while its step is computed; ``cpu_step_copies``: on a CPU, in float32; ``foreach_copies``: in their
    place on a card, of all weights that are updated together."""

    copies: float = 0.0
    bytes_per_weight: float = 0.0
    step_copies: float = 0.0
    cpu_step_copies: float = 0.0
    foreach_copies: int = 0
    apart: Optional[Apart] = None
    apart_copies: float = 0.0
    apart_bytes_per_weight: float = 0.0


def _bitsandbytes_8bit(bytes_per_weight: int, cpu_step_copies: int) -> OptimizerMemory:
    """The Trainer leaves the state of embeddings in 32 bits. On a CPU the update is computed from unpacked copies."""
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
"""What a name of an optimizer contains -> what it needs. The first that fits counts; what is in none of the rows counts
as nothing. Copies on a CPU: measured with bitsandbytes 0.50 and torchao 0.18, whose updates unpack the state."""

NOT_IN_ONE_PLACE = ("paged", "galore", "apollo", "lomo")


def memory_of(optim: str) -> OptimizerMemory:
    """Of the optimizer with that name in ``optim``: a lower bound, nothing where its state can move or is not known."""
    if any(part in optim for part in NOT_IN_ONE_PLACE):
        return OptimizerMemory()
    return next((needs for part, needs in STATES if part in optim), OptimizerMemory())


def uncounted(optim: str) -> Optional[str]:
    """Why nothing is known of its state; None where it is known, or is elsewhere by design (paged)."""
    if any(part in optim for part in ("galore", "apollo")):
        return f"the state of optim: {optim}, which depends on its rank"
    known = "paged" in optim or "lomo" in optim or any(part in optim for part, _ in STATES)
    return None if known or not optim else f"the state of optim: {optim}, which is not known"


def state_bytes(optim: str, trained_bytes: int, trained_weights: int, apart_weights: int = 0) -> int:
    """Bytes of its state, for ``trained_weights`` numbers that take ``trained_bytes``. ``apart_weights``: how many of
    these it treats apart."""
    needs, stored_bytes = memory_of(optim), trained_bytes / max(1, trained_weights)
    each = needs.copies * stored_bytes + needs.bytes_per_weight
    each_apart = needs.apart_copies * stored_bytes + needs.apart_bytes_per_weight
    return int(each * (trained_weights - apart_weights) + each_apart * apart_weights)


def step_blocks(optim: str, device: str, largest_bytes: int, largest_weights: int, together_bytes: int) -> list[int]:
    """Sizes of what it makes for a moment while it updates the largest trained weight, or on a card all weights that
    are updated together. ``device``: its kind."""
    needs = memory_of(optim)
    if device in ("cuda", "xpu") and needs.foreach_copies:
        return [together_bytes] * needs.foreach_copies
    on_cpu = int(needs.cpu_step_copies) if device == "cpu" else 0
    return [largest_bytes] * int(needs.step_copies) + [FLOAT32_BYTES * largest_weights] * on_cpu


def part_bytes_on(device: str) -> int:
    """Weights that memory control updates together. Copies take about three times this, the update's own working
    memory once or twice. On a CPU small parts are reused by the C library instead of being mapped again (2 times as
    fast), elsewhere launches count. ``device``: its kind."""
    return (8 if device == "cpu" else 64) * 2**20


def argument_copies(optim_args: Optional[str]) -> int:
    """Copies of what is trained that arguments of torch's SGD and RMSprop add to their state."""
    pairs = (pair.partition("=")[::2] for pair in (optim_args or "").replace(" ", "").split(","))
    return sum(name in ("momentum", "centered") and value not in ("0", "0.0", "False") for name, value in pairs)
