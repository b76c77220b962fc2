"""What all tasks do to load what training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import set_seed

from scu_trainer.errors import DataError, ModelError
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.adapters import CAUSAL, AdapterPlan, active_config
from scu_trainer.models.loading.load import prepare_for_tuning
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.models.quantize import quantized_line
from scu_trainer.run_files import require_room
from scu_trainer.settings import ModelSettings
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, checkpoint_bytes
from scu_trainer.train.step.costs import bytes_before_model
from scu_trainer.train.step.distributed.sharded import weight_count


def say_reading(console: Console, name: str) -> None:
    """Before something that may take minutes: a person should know what is waited for."""
    console.print(f"reading {name}", soft_wrap=True)


def say_data(console: Console, data: Any) -> None:
    for line in data.statistics.lines():
        console.print(line, soft_wrap=True)


def begin_model(job: Job) -> Optional[int]:
    """Seed what is made at random from here on; the memory in use before there is a model, see costs.py."""
    set_seed(job.training.seed)
    return bytes_before_model(job.training.device)


def finish(
    job: Job,
    console: Console,
    *,
    settings: ModelSettings,
    processor: Any,
    data: Any,
    model: torch.nn.Module,
    collator: Any,
    before_model_bytes: Optional[int],
    adapters: AdapterPlan = CAUSAL,
) -> TrainingComponents:
    """The model with what is trained of it, and room for its checkpoints. Raises a UserError where there is none.

    ``settings``: those of the job, with a name of the model where it had none.
    """
    if data.eval is None and job.training.eval_strategy != "no":
        raise DataError(
            f"eval_strategy is {job.training.eval_strategy.value}, and nothing of {job.data.shown_dataset} is held "
            "out; raise validation_split_percentage, give eval_dataset, or set eval_strategy: no"
        )
    model = _tunable(model, settings, job, console, adapters)
    averaged = job.efficiency.ema_decay is not None
    require_room(job.training.output_dir, checkpoint_bytes(model, job.training, averaged))
    return TrainingComponents(processor, data, model, collator, before_model_bytes)


def teacher_of(job: Job) -> Optional[ModelSettings]:
    """How the job's teacher is loaded; None without one. In the type that it is stored in."""
    if job.model.teacher is None:
        return None
    model = job.model
    return ModelSettings(
        model_name_or_path=model.teacher, trust_remote_code=model.trust_remote_code, allow_pickle=model.allow_pickle
    )


def require_same(teacher: str, of_teacher: Any, of_student: Any, what: str) -> None:
    """Raise ModelError where the teacher would answer another question."""
    if of_teacher != of_student:
        raise ModelError(
            f"the teacher {teacher} does not have the {what} of the student, so its answers do not match; give a "
            f"teacher with the same {what}, or drop teacher"
        )


def checkpoints(job: Job) -> bool:
    """Our name for it or the stock one, which cannot do it for every family."""
    return job.model.checkpoint_every_layer or bool(job.training.activation_checkpointing)


def _tunable(
    model: torch.nn.Module, settings: ModelSettings, job: Job, console: Console, adapters: AdapterPlan
) -> torch.nn.Module:
    """With adapters, if any, and checkpointing; says what is trained and how the rest is stored."""
    stored = quantized_line(model) if settings.tuning == "qlora" else None
    model = prepare_for_tuning(model, settings, adapters)
    if is_adapter(Path(settings.model_name_or_path or "").expanduser()):
        own = active_config(model)
        kind = f"rank {own.r}" if own.peft_type in ("LORA", "VERA") else own.peft_type.value  # IA3 has no rank
        from_where = f"{settings.model_name_or_path}: {kind}, of {own.base_model_name_or_path}"
        console.print(f"continues training the adapter {from_where}", soft_wrap=True)
    trainable = sum(weight_count(p) for p in model.parameters() if p.requires_grad)
    total = sum(weight_count(p) for p in model.parameters())
    console.print(f"model: {total:,} weights, {trainable:,} trained ({settings.tuning})", soft_wrap=True)
    if stored is not None:
        console.print(stored, soft_wrap=True)
    if checkpoints(job):
        console.print(f"activations: kept at the borders of {checkpoint_every_layer(model)} blocks", soft_wrap=True)
        job.training.activation_checkpointing = False  # it is on; the stock Trainer's own way refuses some families
    return model
