"""The variants of training that a user can choose: what each is for, how it is started, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Optional

from scu_trainer.runs.launch import Launcher

LOOPS = ("regularization", "memory", "curriculum")

LORA = ("--tuning", "lora")
CHECKPOINTED = ("--checkpoint_every_layer", "true")
FULL = ("--tuning", "full")
QLORA = ("--tuning", "qlora")
SHARDED = {"regularization": "the regularization loop works under ZeRO stage 1 and 2"}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Fields:
        saves: in a few words, what it saves or is for.
        flags: flags of the training command, added to those of the recipe.
        launcher, processes: how it is started.
        needs: "gpu", "processes" (more than one), or an extra of this package.
        peak_at_most: another variant, and the largest allowed ratio to its peak memory (both without that of an empty
            process).
        measured_on: the devices on which ``peak_at_most`` is checked: "any", or "gpu" if it cannot hold on a CPU,
            because main memory and device memory are the same there.
        refused: the loops that this variant does not support, each with part of its error message. They are turned off
            when the variant is measured.
    """

    name: str
    saves: str
    flags: tuple[str, ...] = ()
    launcher: Launcher = "python"
    processes: int = 1
    needs: tuple[str, ...] = ()
    peak_at_most: Optional[tuple[str, float]] = None
    measured_on: Literal["any", "gpu"] = "any"
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def tuning(self) -> str:
        return "full" if FULL == self.flags[:2] else "lora"

    @property
    def gpu_check(self) -> str:
        """What a run of it must show, in words."""
        bound = self.peak_at_most
        memory = "" if bound is None else f", its peak is at most {bound[1]:g} of {bound[0]}'s"
        return f"the loss falls{memory}, all loops act"


def _zero(stage: str, *flags: str) -> tuple[str, ...]:
    return (*flags, "--deepspeed", f"ds_configs/{stage}.json")


VARIANTS = (
    Variant("lora", "the default: adapters on frozen weights as they are stored", LORA),
    Variant("lora_bf16", "autocast: arithmetic in half precision", (*LORA, "--mixed_precision", "bf16")),
    Variant(
        "lora_bf16_weights",
        "frozen weights in half the bytes",
        (*LORA, "--dtype", "bfloat16", "--mixed_precision", "bf16"),
        peak_at_most=("lora_bf16", 0.9),
    ),
    Variant(
        "lora_checkpointing", "activations of one layer at a time", (*LORA, *CHECKPOINTED), peak_at_most=("lora", 0.9)
    ),
    Variant(
        "qlora_8bit",
        "frozen weights in 8 bits",
        (*QLORA, "--load_in_8bit", "true"),
        needs=("qlora",),
        peak_at_most=("lora", 1.0),
    ),
    Variant("qlora", "frozen weights in 4 bits", QLORA, needs=("qlora",), peak_at_most=("lora", 0.9)),
    Variant(
        "qlora_checkpointing",
        "4 bits and activations of one layer",
        (*QLORA, *CHECKPOINTED),
        needs=("qlora",),
        peak_at_most=("qlora", 0.9),
    ),
    Variant(
        "device_map_disk",
        "frozen weights on disk, read layer by layer",
        (*LORA, "--device_map", "auto", "--cpu_mem", "30MB", "--offload_folder", "{scratch}/offload", *CHECKPOINTED),
        peak_at_most=("lora_checkpointing", 0.97),
    ),
    Variant("full", "all weights are trained", FULL),
    Variant(
        "full_8bit_adam",
        "optimizer state in 8 bits",
        (*FULL, "--optim", "adamw_bnb_8bit"),
        needs=("qlora",),
        peak_at_most=("full", 0.9),
    ),
    Variant("full_adafactor", "optimizer state of rows and columns", (*FULL, "--optim", "adafactor")),
    Variant("full_checkpointing", "activations of one layer; pays where they fill the memory", (*FULL, *CHECKPOINTED)),
    Variant("ddp_2", "two processes, each with the whole model", FULL, "torchrun", 2, needs=("processes",)),
    Variant("accelerate_2", "two processes, started by accelerate", FULL, "accelerate", 2, needs=("processes",)),
    Variant(
        "zero2", "gradients and optimizer state shared out", _zero("zero2", *FULL), "deepspeed", needs=("deepspeed",)
    ),
    Variant(
        "zero2_2", "ZeRO-2 over two processes", _zero("zero2", *FULL), "deepspeed", 2, needs=("deepspeed", "processes")
    ),
    Variant(
        "zero2_offload",
        "optimizer state in main memory",
        _zero("zero2_offload", *FULL),
        "deepspeed",
        needs=("deepspeed",),
        peak_at_most=("zero2", 0.8),
        measured_on="gpu",
    ),
    Variant(
        "zero2_qlora", "4-bit weights under ZeRO-2", _zero("zero2", *QLORA), "deepspeed", needs=("deepspeed", "qlora")
    ),
    Variant(
        "zero3_2",
        "weights shared out too, over two processes",
        _zero("zero3", *FULL),
        "deepspeed",
        2,
        needs=("deepspeed", "processes"),
        refused=SHARDED,
    ),
    Variant(
        "zero3_offload",
        "weights and optimizer state in main memory",
        _zero("zero3_offload", *FULL),
        "deepspeed",
        needs=("deepspeed",),
        peak_at_most=("zero2_offload", 0.8),
        measured_on="gpu",
        refused=SHARDED,
    ),
    Variant(
        "full_paged_8bit_adam",
        "8-bit optimizer state that moves to main memory under pressure",
        (*FULL, "--optim", "paged_adamw_8bit"),
        needs=("gpu", "qlora"),
        peak_at_most=("full", 0.9),
    ),
    Variant(
        "lora_fp16",
        "autocast on GPUs older than Ampere",
        (*LORA, "--mixed_precision", "fp16"),
        needs=("gpu",),
        peak_at_most=("lora", 1.05),
    ),
    Variant(
        "device_map_gpu_cpu",
        "frozen weights partly in main memory, the GPU computes",
        (*LORA, "--device_map", "auto", "--max_gpu_mem", "60MB", "--cpu_mem", "4GB", *CHECKPOINTED),
        needs=("gpu",),
        peak_at_most=("lora_checkpointing", 0.8),
    ),
)
"""Among those that train the same weights the fastest comes first, as measured in benchmarks/results/variants.json."""

BY_NAME = {variant.name: variant for variant in VARIANTS}
BASELINE = "lora"
