"""Choose which settings of a job to change so that it fits a machine, and in which order to try them. Arithmetic only.

Choices that do not change the result come first, then those that round differently, then those that train something
else; among equals, faster ones come first. Times are rough and relative, and only used for this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

FORWARD = INPUT_GRADIENTS = WEIGHT_GRADIENTS = 1.0
"""Cost of the matrix products of a step, in units of a forward pass."""

ADAPTERS = 0.1
"""Cost of the products of low-rank adapters, in the same unit."""

UNPACKING = {4: 0.3, 8: 0.2}
"""Time to unpack weights of 4 or 8 bits at each use, as a share of the products with them
(benchmarks/results/variants.json)."""

HALF_GAIN = {"cuda": 3.0, "cpu": 1.5}
"""How much faster a step is in half precision, if the device has it. This is less than the 4 to 8 of the products only,
see ``presets/*.yaml``; for a CPU see ``precision.py``."""

OPTIMIZER_TIME = {"adafactor": 0.1, "adamw_bnb_8bit": 0.1}
"""Additional time compared with a fused AdamW, as a share of a step."""

OFFLOADING = 1.0
"""Time to copy gradients to main memory and weights back in every step, as a share of the step itself."""

SMALL_OPTIMIZERS = ("adamw_bnb_8bit", "adafactor")
SHORTEST_BLOCK = 256

NOTHING, ROUNDING, OPTIMIZER, WEIGHTS, ROWS = range(5)
CHANGES = ("nothing", "rounding", "the optimizer", "what is trained", "what a row holds")
"""What a choice changes in the result, in words; the index is the degree of the change."""


@dataclass(frozen=True)
class SettingChoice:
    """Values of the settings that decide memory and speed, under their own names. ``mixed_precision`` is no, bf16 or
    fp16, and ``dtype`` that of frozen weights. ``offload`` keeps the optimizer's state in main memory (DeepSpeed).
    ``block_size`` is None if rows have no length."""

    tuning: str
    mixed_precision: str
    checkpoint_every_layer: bool
    optim: str
    block_size: Optional[int] = None
    load_in_8bit: bool = False
    dtype: str = "auto"
    offload: bool = False

    def settings(self, asked: SettingChoice) -> dict[str, Any]:
        """Return the settings that differ from ``asked``."""
        names = ("tuning", "load_in_8bit", "dtype", "mixed_precision", "checkpoint_every_layer", "optim", "block_size")
        found = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(asked, name)}
        return {**found, "deepspeed": "zero2_offload"} if self.offload and not asked.offload else found

    def change(self, asked: SettingChoice) -> int:
        """Return how much this changes the result of ``asked``, from NOTHING to ROWS: an index of CHANGES."""
        if self.block_size != asked.block_size:
            return ROWS
        if (self.tuning == "full") != (asked.tuning == "full"):
            return WEIGHTS
        if self.optim != asked.optim:
            return OPTIMIZER
        stored = ("tuning", "load_in_8bit", "dtype", "mixed_precision")
        return NOTHING if all(getattr(self, name) == getattr(asked, name) for name in stored) else ROUNDING

    def time(self, device: str) -> float:
        """Return the relative time of a step, in units of a forward pass in full precision."""
        products = FORWARD + INPUT_GRADIENTS
        products += WEIGHT_GRADIENTS if self.tuning == "full" else ADAPTERS
        products += FORWARD * self.checkpoint_every_layer
        if self.mixed_precision != "no":
            products /= HALF_GAIN.get(device, 1.0)
        if self.tuning == "qlora":
            products *= 1 + UNPACKING[8 if self.load_in_8bit else 4]
        return products * (1 + OPTIMIZER_TIME.get(self.optim, 0.0)) * (1 + OFFLOADING * self.offload)


@dataclass(frozen=True)
class AvailableChanges:
    """What can be changed for a model on a machine.

    Fields:
        half: the half precision that the device computes in, if any.
        stored_half: whether the weights are stored in half precision anyway.
        adapters: whether the model supports LoRA and QLoRA.
        bitsandbytes: whether it is installed.
        offloading: whether DeepSpeed and a GPU are available.
    """

    half: Optional[str]
    stored_half: bool
    adapters: bool
    bitsandbytes: bool
    offloading: bool


def choices(asked: SettingChoice, available: AvailableChanges, device: str) -> list[SettingChoice]:
    """Return ``asked`` and alternatives, by how much they change the result, then by speed; shorter rows come last."""
    options = set(_same_length_choices(asked, available))
    block = asked.block_size
    while block is not None and block // 2 >= SHORTEST_BLOCK:
        block //= 2
        options |= {replace(choice, block_size=block) for choice in options if choice.checkpoint_every_layer}
    return sorted(options, key=lambda c: (c != asked, c.change(asked), -(c.block_size or 0), c.time(device), repr(c)))


def _same_length_choices(asked: SettingChoice, available: AvailableChanges) -> Iterator[SettingChoice]:
    """Yield ``asked`` and all alternatives with the same block size."""
    halves = {asked.mixed_precision} | ({available.half} if available.half and asked.mixed_precision == "no" else set())
    for (tuning, in_8bit), half in itertools.product(_tunings(asked, available), sorted(halves)):
        base = replace(asked, tuning=tuning, load_in_8bit=in_8bit, mixed_precision=half)
        can_halve = tuning == "lora" and available.half == "bf16" and not available.stored_half
        types = {asked.dtype} | ({"bfloat16"} if can_halve else set())
        if tuning == "qlora" and half == "fp16" and asked.dtype == "auto":
            types.add("float16")  # fp16 autocast refuses bfloat16, which auto may leave for unpacked weights
        for dtype, is_checkpointed in itertools.product(sorted(types), {asked.checkpoint_every_layer, True}):
            choice = replace(base, dtype=dtype, checkpoint_every_layer=is_checkpointed)
            yield choice
            if tuning == "full":
                yield from _full_tuning_choices(choice, available)


def _full_tuning_choices(choice: SettingChoice, available: AvailableChanges) -> Iterator[SettingChoice]:
    """Yield the alternatives to ``choice`` that only full tuning has: smaller optimizers and offloading."""
    # These optimizers are refused for trainable bfloat16 weights, which already have an 8-bit state by default.
    for optim in SMALL_OPTIMIZERS if choice.dtype != "bfloat16" else ():
        if available.bitsandbytes or "bnb" not in optim:
            yield replace(choice, optim=optim)
    if available.offloading:
        yield replace(choice, offload=True)


def _tunings(asked: SettingChoice, available: AvailableChanges) -> Iterator[tuple[str, bool]]:
    """Yield the possible (tuning, load_in_8bit)."""
    yield asked.tuning, asked.load_in_8bit
    if not available.adapters:
        return
    if asked.tuning == "full":
        yield "lora", False
    if available.bitsandbytes:
        if asked.tuning != "qlora":
            yield "qlora", True
        yield "qlora", False
