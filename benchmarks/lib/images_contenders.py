"""The contenders of images.py, which train the model of the recipe on its data, with different settings.

Every contender except the hand-written loops uses the settings of the real command. Its flags follow those of the
recipe.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.lib.memory_work import Witness
from benchmarks.lib.turns import Contender, Ended, StepSeconds, Turns
from benchmarks.studies.families import CONTENDERS, FLOAT32, read
from scu_trainer.models.vision.inputs import PixelInputs
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.run_directory.logs import run_log

RECIPE = "resnet"
NO_LOOPS = ("--scu", "false", "--memory_control", "false", "--curriculum", "none")
"""The losses of rows are recorded anyway, as the command does with every dataset."""
ONE_WORKER = ("--dataloader_num_workers", "1")


@dataclass(frozen=True)
class Way:
    """How a contender trains. ``kind``: of ``families.CONTENDERS``. ``loader_augments``: a loader worker augments the
    pixels instead of the model's hook."""

    kind: str
    flags: tuple[str, ...] = ()
    loader_augments: bool = False


WAYS = {
    "plain loop": Way("plain", FLOAT32),
    "plain loop, bf16": Way("plain"),
    "stock Trainer": Way("stock", FLOAT32),
    "recipe": Way("ours"),
    "recipe without bf16": Way("ours", FLOAT32),
    "recipe without keep_freed_memory": Way("ours", ("--keep_freed_memory", "false")),
    "recipe without fused AdamW": Way("ours", ("--optim", "adamw_torch")),
    "recipe without the three loops": Way("ours", NO_LOOPS),
    "recipe with channels_last": Way("ours", ("--channels_last", "true")),
    "recipe with a loader worker": Way("ours", ONE_WORKER),
    "recipe with a worker that augments": Way("ours", ONE_WORKER, loader_augments=True),
    "recipe with torch_compile": Way("ours", ("--torch_compile", "true")),
}
"""Contenders by name. The recipe chooses bf16 if the CPU supports it, otherwise float32."""


def contender_of(name: str, steps: int, flags: Sequence[str], compiled: str) -> Contender:
    """Return a contender. ``compiled``: the cache folder of torch.compile, which the first repeat fills."""
    return Contender(name, train, (name, steps, tuple(flags)), (("TORCHINDUCTOR_CACHE_DIR", compiled),))


def train(turns: Turns, name: str, steps: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """Train a contender in its own process. Returns its held-out score, and its peak above the loaded job."""
    way, witness = WAYS[name], Witness("cpu")
    with run_log(), tempfile.TemporaryDirectory() as folder:
        job = read(RECIPE, steps, folder, (*flags, *way.flags))
        parts = job.kind.load(job, Console(quiet=True))
        if way.loader_augments:
            parts = augmented_by_loader(parts)
        loaded_bytes = witness.start()
        given = {"witness": witness} if way.kind == "ours" else {}
        model = CONTENDERS[way.kind](parts, job, turns, **given)
        witness.read()
        peak_bytes = witness.highest_bytes - loaded_bytes
        score = job.kind.score(model, parts)
    return {
        "accuracy": float(score.correct.sum() / score.tokens.sum()),
        "bits_per_label": score.bpt,
        "peak_bytes": peak_bytes,
        "mixed_precision": job.model.mixed_precision,
        "rows_per_step": job.training.per_device_train_batch_size * job.training.gradient_accumulation_steps,
    }


def augmented_by_loader(parts: TrainingComponents) -> TrainingComponents:
    """Move augmentation from the model's hook to the loader."""
    hook = next(hook for hook in parts.model._forward_pre_hooks.values() if isinstance(hook, PixelInputs))
    return replace(parts, collator=_Augments(parts.collator, hook))


@dataclass
class _Augments:
    collator: Callable[[list], dict[str, torch.Tensor]]
    pixels: PixelInputs

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collator(rows)
        ready = self.pixels.ready(batch["pixel_values"], training=True, dtype=torch.float32)
        return {**batch, "pixel_values": ready}


# -- a test run -------------------------------------------------------------------------------------------------------


def tiny(name: str) -> tuple[str, ...]:
    """Return the flags of a contender for a test run, which only shows that it runs. Compilation only traces."""
    flags = ("--dataset_size", "200", "--per_device_train_batch_size", "4")
    return (*flags, "--torch_compile_backend", "eager") if "--torch_compile" in WAYS[name].flags else flags


def tried_out(contenders: Sequence[Contender]) -> dict[str, Ended]:
    """Run all contenders one after the other in this process, which shows that they run, not how fast."""
    found = {}
    for contender in contenders:
        turns = StepSeconds()
        with patch.dict(os.environ, dict(contender.environment)):  # TrainingArguments set variables for accelerate
            found[contender.name] = Ended(turns.seconds, contender.work(turns, *contender.arguments))
    return found
