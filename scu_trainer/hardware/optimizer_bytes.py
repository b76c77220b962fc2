"""What an optimizer keeps for the weights that it trains, and what it needs for a moment while it steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class OptimizerMemory:
    """``copies``: of the trained weights in their own type; ``bytes_per_weight``: beside them. ``step_copies``: of the
    largest trained weight, while its step is computed."""

    copies: float = 0.0
    bytes_per_weight: float = 0.0
    step_copies: float = 0.0


STATES: tuple[tuple[str, OptimizerMemory], ...] = (
    ("lion_8bit", OptimizerMemory(bytes_per_weight=1)),
    ("rmsprop_bnb_8bit", OptimizerMemory(bytes_per_weight=1)),
    ("muon", OptimizerMemory(copies=1, step_copies=3)),
    ("schedule_free_sgd", OptimizerMemory(copies=1)),
    ("schedule_free", OptimizerMemory(copies=2, step_copies=1)),
    ("grokadamw", OptimizerMemory(copies=3, step_copies=2)),
    ("8bit", OptimizerMemory(bytes_per_weight=2)),
    ("4bit", OptimizerMemory(bytes_per_weight=1)),
    ("anyprecision", OptimizerMemory(copies=1)),
    ("adafactor", OptimizerMemory(step_copies=3)),
    ("sgd", OptimizerMemory()),
    ("lion", OptimizerMemory(copies=1)),
    ("adagrad", OptimizerMemory(copies=1, step_copies=1)),
    ("rmsprop", OptimizerMemory(copies=1, step_copies=1)),
    ("ademamix", OptimizerMemory(copies=3)),
    ("adamw_torch_fused", OptimizerMemory(copies=2)),
    ("adamw", OptimizerMemory(copies=2, step_copies=2)),
)
"""What a name of an optimizer contains -> what it needs. The first that fits counts; what is in none of the rows counts
as nothing. Muon's are those of matrices; embeddings and the output layer have AdamW's two copies."""

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


def state_bytes(optim: str, trained_bytes: int, trained_weights: int) -> int:
    """Bytes of its state, for ``trained_weights`` numbers that take ``trained_bytes``."""
    needs = memory_of(optim)
    return int(needs.copies * trained_bytes + needs.bytes_per_weight * trained_weights)
