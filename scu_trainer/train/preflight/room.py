"""Checks of memory and disk by what is known exactly: weights, gradients and optimizer states. Activations come on
top, so these checks find only jobs that certainly do not fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from torch import nn

from scu_trainer.hardware import optimizer_bytes
from scu_trainer.run_files import format_bytes, free_bytes
from scu_trainer.train.job.job import Job, free_memory
from scu_trainer.train.preflight.finding import Check, Finding, percent
from scu_trainer.train.preflight.length import interval
from scu_trainer.train.preflight.optimization import optimizer_name
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed
from scu_trainer.train.step.distributed.sharded import weight_bytes, weight_count

MEMORY_SHORT = Check(
    "memory-too-small",
    "error",
    "gradients and optimizer states alone (on a GPU also the weights) exceed the free memory",
    "use tuning: lora or qlora, optim: adamw_8bit or adafactor, or a smaller model",
)
MEMORY_NEAR = Check(
    "memory-nearly-full",
    "warning",
    "gradients and optimizer states leave less than a tenth of the free memory for activations",
    "use tuning: lora, optim: adamw_8bit, or checkpoint_every_layer: true with small batches",
)
DISK_FILLS = Check(
    "checkpoints-fill-disk",
    "error",
    "save_total_limit keeps every checkpoint, and together they exceed the free disk space",
    "set save_total_limit, such as 3, or raise save_steps",
)

NEARLY = 0.9


def before_training(
    job: Job, model: nn.Module, output_dir: Path, steps: Optional[int], rows: Optional[int] = None
) -> Iterator[Finding]:
    """Check memory and disk. ``rows``: rows of an epoch, None if not known."""
    yield from _check_memory(job, model)
    yield from _check_disk(job, model, output_dir, steps, rows)


def state_bytes(job: Job, model: nn.Module) -> int:
    """Return the bytes of the optimizer state, as a lower bound; 0 if unknown or if it can move elsewhere."""
    weights = sum(weight_count(p) for p in model.parameters() if p.requires_grad)
    return optimizer_bytes.state_bytes(optimizer_name(job), weight_bytes(model), weights)


def _check_memory(job: Job, model: nn.Module) -> Iterator[Finding]:
    training = job.training
    if uses_deepspeed(training) or training.fsdp or job.model.device_map is not None:
        return  # they decide where each part is stored
    parts = {"gradients": weight_bytes(model), "optimizer states": state_bytes(job, model)}
    free = free_memory(training)
    if training.device.type == "cuda":
        parts["weights"] = sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
        available = min(free.gpu_bytes)
    else:  # every rank needs its own share, and the weights are already in memory
        available = free.main_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = sum(parts.values())
    parts_text = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    what = f"{parts_text}: {format_bytes(needed)} of {format_bytes(available)} free memory"
    if needed > available:
        yield MEMORY_SHORT.found(what, "tuning, optim")
    elif needed > NEARLY * available:
        yield MEMORY_NEAR.found(what, "tuning, optim")


def _check_disk(
    job: Job, model: nn.Module, output_dir: Path, steps: Optional[int], rows: Optional[int]
) -> Iterator[Finding]:
    training = job.training
    if (training.save_total_limit or 0) > 0 or not steps:  # with a limit, the disk was checked before
        return
    saves = _checkpoint_count(job, steps, rows)
    each = weight_bytes(model) + (0 if training.save_only_model else state_bytes(job, model))
    free = free_bytes(output_dir)
    if saves * each > free:
        what = (
            f"{saves:,} checkpoints of {format_bytes(each)} or more take {format_bytes(saves * each)} of "
            f"{format_bytes(free)} free space; the disk is full after {percent(free / (saves * each))} of the run"
        )
        yield DISK_FILLS.found(what, "save_total_limit, save_steps")


def _checkpoint_count(job: Job, steps: int, rows: Optional[int]) -> int:
    """Return a lower bound on the number of checkpoints of the run."""
    training = job.training
    if training.save_strategy == "steps":
        return math.ceil(steps / interval(training.save_steps, steps))
    epochs = math.ceil(steps / job.steps_of_epoch(rows)) if rows else 1  # max_steps may end the run in an epoch
    return epochs if training.save_strategy == "epoch" else 0
