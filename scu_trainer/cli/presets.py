"""What of a preset follows from the machine and from the rest of the job, and the reason for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator
from typing import Any

from scu_trainer.settings.tasks import TaskSettings

WORKERS, PERSISTENT, COMPILE_MODE = "dataloader_num_workers", "dataloader_persistent_workers", "torch_compile_mode"


def fitted(
    task: TaskSettings, typed: Namespace, given: Collection[str], *, cores: int, has_cuda: bool
) -> tuple[dict[str, Any], list[str]]:
    """(values that take the place of the preset's, lines for the user).

    typed: every field as it is so far. given: names of those that file or flags gave, which stay as they are. cores: of
    this machine, for each of its training processes. has_cuda: whether training can use a CUDA device.
    """
    preset = task.kind.presets.get(task.preset, {})
    values: dict[str, Any] = {}
    notes: list[str] = []
    most = preset.get(WORKERS, 0)
    if most and WORKERS not in given:
        values[WORKERS] = min(most, cores)
        notes.append(
            f"{WORKERS}: {values[WORKERS]} (preset {task.preset}: one for each of {cores} cores, {most} at most)"
        )
    elif preset.get(PERSISTENT) and getattr(typed, WORKERS) == 0 and PERSISTENT not in given:
        values[PERSISTENT] = False
    if COMPILE_MODE in preset and COMPILE_MODE not in given:
        obstacles = list(obstacles_to_graphs(typed, has_cuda))
        if not typed.torch_compile or obstacles:
            values[COMPILE_MODE] = None
        if typed.torch_compile:
            why = "; ".join(obstacles) or "every step runs the same kernels on the same sizes, as one CUDA graph"
            notes.append(f"{COMPILE_MODE}: {'default' if obstacles else preset[COMPILE_MODE]}, for {why}")
    return values, notes


def obstacles_to_graphs(typed: Namespace, has_cuda: bool) -> Iterator[str]:
    """Why steps cannot be replayed as CUDA graphs (``reduce-overhead``): a graph is of one size of batch, and its next
    run writes over what the last one has returned."""
    if typed.use_cpu or not has_cuda:
        yield "CUDA graphs need a CUDA device"
        return
    if typed.memory_control or typed.token_cap is not None:
        yield "memory control may cut a batch into parts of other sizes (memory_control: false keeps it whole)"
    if typed.gradient_accumulation_steps > 1:
        yield "a batch's run writes over the loss of the one before (gradient_accumulation_steps: 1 keeps one)"
    if not typed.dataloader_drop_last:
        yield "the last batch of an epoch is a smaller one (dataloader_drop_last: true leaves it out)"
