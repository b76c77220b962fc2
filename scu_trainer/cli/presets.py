"""Values of a preset that depend on the machine and on the rest of the job, with a reason for each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator
from typing import Any

from scu_trainer.settings.tasks import TaskSettings

WORKERS, PERSISTENT, COMPILE_MODE = "dataloader_num_workers", "dataloader_persistent_workers", "torch_compile_mode"


def preset_values(
    task: TaskSettings, typed: Namespace, given: Collection[str], *, cores: int, has_cuda: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the values that replace those of the preset, and notes for the user.

    typed: all fields as they are so far. given: names of the fields that file or flags set, which stay as they are.
    cores: CPU cores for each training process. has_cuda: whether training can use a CUDA device.
    """
    preset = task.kind.presets.get(task.preset, {})
    values: dict[str, Any] = {}
    notes: list[str] = []
    limit = preset.get(WORKERS, 0)
    if limit and WORKERS not in given:
        values[WORKERS] = min(limit, cores)
        notes.append(
            f"{WORKERS}: {values[WORKERS]} (preset {task.preset}: one for each of {cores} cores, {limit} at most)"
        )
    elif preset.get(PERSISTENT) and getattr(typed, WORKERS) == 0 and PERSISTENT not in given:
        values[PERSISTENT] = False
    if COMPILE_MODE in preset and COMPILE_MODE not in given:
        obstacles = list(obstacles_to_graphs(typed, has_cuda))
        if not typed.torch_compile or obstacles:
            values[COMPILE_MODE] = None
        if typed.torch_compile:
            reason = "; ".join(obstacles) or "every step runs the same kernels on the same sizes, as one CUDA graph"
            notes.append(f"{COMPILE_MODE}: {'default' if obstacles else preset[COMPILE_MODE]}, because {reason}")
    return values, notes


def obstacles_to_graphs(typed: Namespace, has_cuda: bool) -> Iterator[str]:
    """Yield the reasons why steps cannot be replayed as CUDA graphs (``reduce-overhead``). A graph works for one batch
    size only, and each run of it overwrites what the previous run returned."""
    if typed.use_cpu or not has_cuda:
        yield "CUDA graphs need a CUDA device"
        return
    if typed.memory_control or typed.token_cap is not None:
        yield "memory control may split a batch into parts of other sizes (memory_control: false keeps it whole)"
    if typed.gradient_accumulation_steps > 1:
        yield "each micro-batch would overwrite the loss of the previous one (gradient_accumulation_steps: 1 avoids it)"
    if not typed.dataloader_drop_last:
        yield "the last batch of an epoch may be smaller (dataloader_drop_last: true drops it)"
