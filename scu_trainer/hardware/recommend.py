"""Which settings of a job to change so that it fits a machine, and in which order to try them. Arithmetic only.

A choice that leaves the result as it is comes before one that rounds differently, and that before one that trains
something else; among equals the faster one comes first. Times are rough and relative: they put choices in an order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

FORWARD = INPUT_GRADIENTS = WEIGHT_GRADIENTS = 1.0
"""Matrix products of a step, in units of a forward pass."""

ADAPTERS = 0.1
"""Products of low-rank adapters, in the same unit."""

UNPACKING = {4: 0.3, 8: 0.2}
"""Time to unpack weights of 4 or 8 bits at each use, as a share of the products with them
(benchmarks/results/variants.json)."""

HALF_GAIN = {"cuda": 3.0, "cpu": 1.5}
"""How much faster a step in half precision is where the device has it: below the 4 to 8 of the products alone, see
``presets/*.yaml``; on a CPU see ``precision.py``."""

OPTIMIZER_TIME = {"adafactor": 0.1, "adamw_bnb_8bit": 0.1}
"""Beside a fused AdamW, as a share of a step."""

OFFLOADING = 1.0
"""Gradients down and weights up at every step, as a share of the step itself."""

SMALL_OPTIMIZERS = ("adamw_bnb_8bit", "adafactor")
SHORTEST_BLOCK = 256

NOTHING, ROUNDING, OPTIMIZER, WEIGHTS, ROWS = range(5)
CHANGES = ("nothing", "rounding", "the optimizer", "what is trained", "what a row holds")
"""By how much a choice changes the result, in words."""


@dataclass(frozen=True)
class SettingChoice:
    """Values of the settings that decide memory and speed, under their own names.

    ``mixed_precision``: no, bf16 or fp16. ``dtype``: of frozen weights. ``offload``: the optimizer's state lies in main
    memory (DeepSpeed). ``block_size``: None where rows have no length.
    """

    tuning: str
    mixed_precision: str
    checkpoint_every_layer: bool
    optim: str
    block_size: Optional[int] = None
    load_in_8bit: bool = False
    dtype: str = "auto"
    offload: bool = False

    def settings(self, asked: SettingChoice) -> dict[str, Any]:
        """What has to be set to get it from ``asked``."""
        names = ("tuning", "load_in_8bit", "dtype", "mixed_precision", "checkpoint_every_layer", "optim", "block_size")
        found = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(asked, name)}
        return {**found, "deepspeed": "zero2_offload"} if self.offload and not asked.offload else found

    def change(self, asked: SettingChoice) -> int:
        """NOTHING to ROWS: an index of CHANGES."""
        if self.block_size != asked.block_size:
            return ROWS
        if (self.tuning == "full") != (asked.tuning == "full"):
            return WEIGHTS
        if self.optim != asked.optim:
            return OPTIMIZER
        stored = ("tuning", "load_in_8bit", "dtype", "mixed_precision")
        return NOTHING if all(getattr(self, name) == getattr(asked, name) for name in stored) else ROUNDING

    def time(self, device: str) -> float:
        """Of a step, in forward passes of full precision."""
        products = FORWARD + INPUT_GRADIENTS
        products += WEIGHT_GRADIENTS if self.tuning == "full" else ADAPTERS
        products += FORWARD * self.checkpoint_every_layer
        if self.mixed_precision != "no":
            products /= HALF_GAIN.get(device, 1.0)
        if self.tuning == "qlora":
            products *= 1 + UNPACKING[8 if self.load_in_8bit else 4]
        return products * (1 + OPTIMIZER_TIME.get(self.optim, 0.0)) * (1 + OFFLOADING * self.offload)


@dataclass(frozen=True)
class Means:
    """What may be changed. ``half``: the half precision that the device computes in, if any. ``stored_half``: weights
    come in half precision anyway. ``adapters``: LoRA and QLoRA are for this model. ``bitsandbytes``: is there.
    ``offloading``: DeepSpeed and a GPU are."""

    half: Optional[str]
    stored_half: bool
    adapters: bool
    bitsandbytes: bool
    offloading: bool


def choices(asked: SettingChoice, means: Means, device: str) -> list[SettingChoice]:
    """``asked`` and all that may stand in for it, those that change the result least first, then the faster ones; with
    less and less in a row at the end."""
    found = set(_of_one_length(asked, means))
    block = asked.block_size
    while block is not None and block // 2 >= SHORTEST_BLOCK:
        block //= 2
        found |= {replace(choice, block_size=block) for choice in found if choice.checkpoint_every_layer}
    return sorted(
        found, key=lambda one: (one != asked, one.change(asked), -(one.block_size or 0), one.time(device), repr(one))
    )


def _of_one_length(asked: SettingChoice, means: Means) -> Iterator[SettingChoice]:
    halves = {asked.mixed_precision} | ({means.half} if means.half and asked.mixed_precision == "no" else set())
    for (tuning, in_8bit), half in itertools.product(_tunings(asked, means), sorted(halves)):
        base = replace(asked, tuning=tuning, load_in_8bit=in_8bit, mixed_precision=half)
        can_halve = tuning == "lora" and means.half == "bf16" and not means.stored_half
        types = {asked.dtype} | ({"bfloat16"} if can_halve else set())
        if tuning == "qlora" and half == "fp16" and asked.dtype == "auto":
            types.add("float16")  # fp16 autocast refuses the bfloat16 that auto may leave beside packed weights
        for dtype, is_checkpointed in itertools.product(sorted(types), {asked.checkpoint_every_layer, True}):
            choice = replace(base, dtype=dtype, checkpoint_every_layer=is_checkpointed)
            yield choice
            if tuning == "full":
                yield from _of_full(choice, means)


def _of_full(choice: SettingChoice, means: Means) -> Iterator[SettingChoice]:
    # Trained weights in bfloat16 are refused with these, and have an 8-bit state as it is.
    for optim in SMALL_OPTIMIZERS if choice.dtype != "bfloat16" else ():
        if means.bitsandbytes or "bnb" not in optim:
            yield replace(choice, optim=optim)
    if means.offloading:
        yield replace(choice, offload=True)


def _tunings(asked: SettingChoice, means: Means) -> Iterator[tuple[str, bool]]:
    """(tuning, load_in_8bit)"""
    yield asked.tuning, asked.load_in_8bit
    if not means.adapters:
        return
    if asked.tuning == "full":
        yield "lora", False
    if means.bitsandbytes:
        if asked.tuning != "qlora":
            yield "qlora", True
        yield "qlora", False
