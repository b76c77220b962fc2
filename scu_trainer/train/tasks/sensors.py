"""Classifiers of recordings by several sensors: accuracy and bits per label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from scu_trainer.data import default_cache_dir
from scu_trainer.data.samples import PreparedSamples
from scu_trainer.data.sensors.collate import SensorCollator
from scu_trainer.data.sensors.data import prepare_sensors
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.offload_linears import offload_linears
from scu_trainer.models.quantize import require_quantization
from scu_trainer.models.sensors import TridentForSensorClassification
from scu_trainer.models.sensors.loading import (
    adapter_plan,
    branches_of,
    input_shapes,
    load_scored_trident,
    make_trident,
    require_same_classes,
    stored_config,
    trained_label_names,
)
from scu_trainer.settings.base import require
from scu_trainer.settings.sensors import SYNTHETIC
from scu_trainer.train.evaluation.classification import class_metrics, preprocess_class_logits, score_samples
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.job.source import Source
from scu_trainer.train.tasks.common import begin_model, checkpoints, finish, require_same, say_data, teacher_of

MEBIBYTE = 2**20


class SensorTask:
    """See ``task.Task``."""

    name, item, unit = "sensor-classification", "recording", "label"
    compute_metrics = staticmethod(class_metrics)
    preprocess_logits = staticmethod(preprocess_class_logits)

    def check(self, job: Job) -> None:
        model, own = job.model, job.own
        require(
            not own.synthetic or job.data.dataset == SYNTHETIC,
            f"synthetic: true generates recordings, and dataset is {job.data.dataset!r}; drop one of them",
        )
        require(
            model.tuning == "full" or model.model_name_or_path is not None,
            f"tuning: {model.tuning} adapts a trained model, and there is none; use tuning: full, or give "
            "model_name_or_path",
        )
        require(model.device_map is None, "device_map places language models; for sensors use offload_linears_mb")
        require(
            own.checkpoint_branches is None or not checkpoints(job),
            "checkpoint_every_layer covers all branches, and checkpoint_branches names some; drop one of them",
        )
        self._check_offloading(job)

    def _check_offloading(self, job: Job) -> None:
        if job.own.offload_linears_mb is None:
            return
        require(
            job.model.tuning == "lora",
            f"offload_linears_mb moves frozen layers in full precision, and tuning is {job.model.tuning}; use tuning: "
            "lora, or drop it",
        )
        require(
            job.training.device.type != "cpu" or job.own.offload_linears_folder is not None,
            "offload_linears_mb would put layers into main memory, where training on a CPU has them anyway; give "
            "offload_linears_folder, or drop it",
        )
        require(
            job.training.world_size == 1 and not job.training.deepspeed and not job.training.fsdp,
            "offload_linears_mb is for one process without DeepSpeed or FSDP, which place weights themselves; drop it",
        )

    def load(self, job: Job, console: Console) -> TrainingComponents:
        require_quantization(job.model, job.training.device)
        config = stored_config(job.model)
        own = replace(job.own, branches=branches_of(config, job.own))
        data = prepare_sensors(
            job.data,
            own,
            seed=job.training.seed,
            cache_dir=default_cache_dir(job.data.cache_dir),
            may_lack_branches=config is not None,
        )
        say_data(console, data)
        require_same_classes(job.model, data.label_names)
        teacher = teacher_of(job)
        if teacher is not None:
            require_same(job.model.teacher, trained_label_names(teacher), list(data.label_names), "classes")
            require_same(job.model.teacher, branches_of(stored_config(teacher), own), own.branches, "branches")
        before_model_bytes = begin_model(job)
        shapes = _shapes(data)
        model, lines = make_trident(job.model, own, data.label_names, shapes, job.training.device)
        shapes = input_shapes(model.config, shapes)
        for line in lines:
            console.print(line, soft_wrap=True)
        model.checkpointed = None if own.checkpoint_branches is None else tuple(own.checkpoint_branches)
        self._offload(job, model, console)
        parts = finish(
            job,
            console,
            settings=job.model,
            processor=None,
            data=data,
            model=model,
            collator=SensorCollator(shapes),
            before_model_bytes=before_model_bytes,
            adapters=adapter_plan(model),
        )
        if teacher is not None:
            parts.teacher = load_scored_trident(teacher, data.label_names, shapes)
        if own.checkpoint_branches is not None:
            blocks, where = checkpoint_every_layer(parts.model), ", ".join(own.checkpoint_branches)
            console.print(f"activations: kept at the borders of {blocks} blocks of {where}", soft_wrap=True)
        return parts

    def _offload(self, job: Job, model: TridentForSensorClassification, console: Console) -> None:
        own = job.own
        if own.offload_linears_mb is None:
            return
        moved = offload_linears(
            model,
            model.transformer_linears(),
            own.offload_linears_mb * MEBIBYTE,
            job.training.device,
            own.offload_linears_folder,
        )
        console.print(moved.line(checkpoints(job) or own.checkpoint_branches is not None), soft_wrap=True)

    def load_scored(self, source: Source) -> TrainingComponents:
        config = stored_config(source.model)
        own = replace(source.own, branches=branches_of(config, source.own))
        data = prepare_sensors(
            source.data,
            own,
            seed=source.seed,
            cache_dir=default_cache_dir(source.data.cache_dir),
            label_names=trained_label_names(source.model),
            may_lack_branches=True,
        )
        shapes = _shapes(data)
        model = load_scored_trident(source.model, data.label_names, shapes)
        return TrainingComponents(None, data, model, SensorCollator(input_shapes(config, shapes)))

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        return score_samples(model, parts.data.eval, parts.collator)

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        batch = parts.collator([parts.data.train[0]])
        return {name: value for name, value in batch.items() if name != "labels"}


def _shapes(data: PreparedSamples) -> dict[str, tuple[int, ...]]:
    """Of what is trained on and of what is held out, which may have a branch more."""
    held_out = {} if data.eval is None else data.eval.store.shapes
    return {**held_out, **data.train.store.shapes}
