"""Loading steps that all tasks share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import set_seed

from scu_trainer.errors import DataError, ModelError
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.adapters import AdapterPlan, active_config
from scu_trainer.models.loading.load import prepare_for_tuning
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.models.quantize import quantized_line
from scu_trainer.run_files import require_room
from scu_trainer.settings import ModelSettings
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, checkpoint_bytes
from scu_trainer.train.step.costs import bytes_before_model
from scu_trainer.train.step.distributed.sharded import weight_count


def print_data_summary(console: Console, data: Any) -> None:
    for line in data.statistics.lines():
        console.print(line, soft_wrap=True)


def seed_before_model(job: Job) -> Optional[int]:
    """Seed the random numbers for the new model, and return the memory in use before it is loaded (see costs.py)."""
    set_seed(job.training.seed)
    return bytes_before_model(job.training.device)


def tuned_components(
    job: Job, console: Console, loaded: TrainingComponents, settings: ModelSettings, adapters: AdapterPlan
) -> TrainingComponents:
    """Prepare the ``loaded`` model for tuning and check the disk space for its checkpoints. Raises a UserError if there
    is too little, or if evaluations are on without held-out data.

    ``settings``: the model settings of the job, with the name of the model filled in.
    """
    if loaded.data.eval is None and job.training.eval_strategy != "no":
        raise DataError(
            f"eval_strategy is {job.training.eval_strategy.value}, but {job.data.shown_dataset} has no held-out "
            "data; raise validation_split_percentage, give eval_dataset, or set eval_strategy: no"
        )
    model = _prepared_for_tuning(loaded.model, settings, job, console, adapters)
    averaged = job.efficiency.ema_decay is not None
    require_room(job.training.output_dir, checkpoint_bytes(model, job.training, averaged))
    return replace(loaded, model=model)


def teacher_settings(job: Job) -> Optional[ModelSettings]:
    """Return the settings for loading the job's teacher, in its stored type; None without a teacher."""
    if job.model.teacher is None:
        return None
    model = job.model
    return ModelSettings(
        model_name_or_path=model.teacher, trust_remote_code=model.trust_remote_code, allow_pickle=model.allow_pickle
    )


def require_same_as_student(teacher: str, teacher_value: Any, student_value: Any, what: str) -> None:
    """Raise ModelError if the teacher's ``what``, such as its tokens, differ from the student's."""
    if teacher_value != student_value:
        raise ModelError(
            f"the teacher {teacher} does not have the same {what} as the student, so their logits cannot be compared; "
            f"give a teacher with the same {what}, or drop teacher"
        )


def checkpoints_activations(job: Job) -> bool:
    """Whether activation checkpointing is on, by our setting or by the stock one, which fails for some families."""
    return job.model.checkpoint_every_layer or bool(job.training.activation_checkpointing)


def _prepared_for_tuning(
    model: torch.nn.Module, settings: ModelSettings, job: Job, console: Console, adapters: AdapterPlan
) -> torch.nn.Module:
    """Return the model with adapters, if any, and checkpointing; print what is trained and how the rest is stored."""
    storage_line = quantized_line(model) if settings.tuning == "qlora" else None
    model = prepare_for_tuning(model, settings, adapters)
    if is_adapter(Path(settings.model_name_or_path or "").expanduser()):
        adapter = active_config(model)
        # IA3, for example, has no rank.
        kind = f"rank {adapter.r}" if adapter.peft_type in ("LORA", "VERA") else adapter.peft_type.value
        origin = f"{settings.model_name_or_path}: {kind}, of {adapter.base_model_name_or_path}"
        console.print(f"continues training the adapter {origin}", soft_wrap=True)
    trainable = sum(weight_count(p) for p in model.parameters() if p.requires_grad)
    total = sum(weight_count(p) for p in model.parameters())
    console.print(f"model: {total:,} weights, {trainable:,} trained ({settings.tuning})", soft_wrap=True)
    if storage_line is not None:
        console.print(storage_line, soft_wrap=True)
    if checkpoints_activations(job):
        console.print(f"activations: kept at the borders of {checkpoint_every_layer(model)} blocks", soft_wrap=True)
        job.training.activation_checkpointing = False  # it is on already; the stock Trainer raises for some families
    return model
