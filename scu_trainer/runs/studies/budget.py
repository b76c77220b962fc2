"""Find the variant that fits a memory limit: try them from the fastest, up to the first whose measured peak fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from scu_trainer.run_files import format_gib
from scu_trainer.runs.studies.variant_table import Variant
from scu_trainer.runs.studies.variants import VariantResult

FLOAT32, HALF, BYTE, NIBBLE = 4.0, 2.0, 1.0, 0.5
BYTE_ADAM = 2 * BYTE


@dataclass(frozen=True)
class WeightCounts:
    """How many weights a model has: all, and those in linear layers, which can be quantized. ``stored_bytes``: per
    weight as stored in its file; ``trained_bytes``: per weight in full fine-tuning."""

    weights: int
    linear_weights: int
    stored_bytes: float = HALF
    trained_bytes: float = FLOAT32


@dataclass(frozen=True)
class Attempt:
    """The result of trying one variant. ``verdict``: fits, too large, skipped (not run because it cannot fit), missing
    (the machine lacks something) or failed. ``reason`` explains it."""

    name: str
    verdict: str
    reason: str
    outcome: Optional[VariantResult] = None


def least_bytes(variant: Variant, sizes: WeightCounts) -> float:
    """Return a lower bound of the memory that ``variant`` needs on its device, in bytes: frozen weights, or trained
    weights with gradients and optimizer state.

    Only memory that no setting can avoid is counted, so that a variant which might fit is never ruled out.
    """
    flags = variant.flags
    if "--device_map" in flags or "--deepspeed" in flags or variant.processes > 1:
        return 0.0  # weights or state may be elsewhere
    if variant.tuning == "full":
        state = {"adamw_bnb_8bit": BYTE_ADAM, "adafactor": 0.0}.get(
            _value_of("--optim", flags), 2 * sizes.trained_bytes
        )
        return sizes.weights * (2 * sizes.trained_bytes + state)  # with a gradient
    stored = min(sizes.stored_bytes, HALF) if _value_of("--dtype", flags) == "bfloat16" else sizes.stored_bytes
    if "qlora" in flags:
        packed = BYTE if "--load_in_8bit" in flags else NIBBLE
        return sizes.linear_weights * packed + (sizes.weights - sizes.linear_weights) * min(stored, HALF)
    return sizes.weights * stored


def _value_of(flag: str, flags: Sequence[str]) -> Optional[str]:
    return flags[flags.index(flag) + 1] if flag in flags else None


def first_that_fits(
    variants: Sequence[Variant],
    limit_bytes: int,
    sizes: WeightCounts,
    run: Callable[[Variant], VariantResult],
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> tuple[Optional[Attempt], list[Attempt]]:
    """Try ``variants`` in their order, fastest first. ``run`` trains one under the limit and measures its peak.

    Returns the attempt that fits, or None, and all attempts.
    """
    attempts: list[Attempt] = []
    for variant in variants:
        attempts.append(_attempt(variant, limit_bytes, sizes, run))
        on_attempt(attempts[-1])
        if attempts[-1].verdict == "fits":
            return attempts[-1], attempts
    return None, attempts


def _attempt(
    variant: Variant, limit_bytes: int, sizes: WeightCounts, run: Callable[[Variant], VariantResult]
) -> Attempt:
    least = least_bytes(variant, sizes)
    if least > limit_bytes:
        return Attempt(variant.name, "skipped", f"its weights and optimizer alone take {format_gib(least)}")
    outcome = run(variant)
    if outcome.status == "missing":
        return Attempt(variant.name, "missing", outcome.message, outcome)
    if outcome.status == "failed":
        verdict = "too large" if "out of memory" in outcome.message.lower() else "failed"
        return Attempt(variant.name, verdict, outcome.message, outcome)
    if outcome.total_bytes is None:
        return Attempt(variant.name, "failed", "its memory cannot be measured on this system", outcome)
    verdict = "fits" if outcome.total_bytes <= limit_bytes else "too large"
    return Attempt(variant.name, verdict, f"measured peak {format_gib(outcome.total_bytes)}", outcome)
