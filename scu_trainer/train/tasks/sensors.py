"""The task sensor-classification: recordings of several sensors, accuracy and bits per label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import set_seed

from scu_trainer.data import default_cache_dir
from scu_trainer.data.samples import PreparedSamples
from scu_trainer.data.sensors.collate import SensorCollator
from scu_trainer.data.sensors.data import prepare_sensors
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.dispatch import check_limits, require_compatible_training
from scu_trainer.models.loading.offload_linears import offload_linears
from scu_trainer.models.quantize import require_quantization
from scu_trainer.models.sensors import TridentConfig, TridentForSensorClassification
from scu_trainer.models.sensors.loading import (
    Heads,
    adapter_plan,
    branches_of,
    input_shapes,
    load_scored_trident,
    make_trident,
    new_trident,
    plan_trident_placement,
    require_same_classes,
    stored_config,
    trained_label_names,
)
from scu_trainer.models.sensors.placing import device_refusal, place_branches
from scu_trainer.settings.base import require
from scu_trainer.settings.sensors import SYNTHETIC, SensorSettings
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.train.evaluation.classification import (
    class_and_report_metrics,
    preprocess_class_and_report,
    score_samples,
)
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.fixtures.random_start import random_start
from scu_trainer.train.job.components import EvaluationSource, TrainingComponents
from scu_trainer.train.job.job import Job, cuda_bytes, free_memory
from scu_trainer.train.tasks.common import (
    checkpoints_activations,
    print_data_summary,
    require_same_as_student,
    seed_before_model,
    teacher_settings,
    tuned_components,
)

MEBIBYTE = 2**20


class SensorTask:
    name, item, unit = "sensor-classification", "recording", "label"
    compute_metrics = staticmethod(class_and_report_metrics)
    preprocess_logits = staticmethod(preprocess_class_and_report)

    def check(self, job: Job) -> None:
        model, own = job.model, job.own
        require(
            not own.synthetic or job.data.dataset == SYNTHETIC,
            f"synthetic: true generates recordings, but dataset is {job.data.dataset!r}; drop one of them",
        )
        require(
            model.tuning != "lora" or model.model_name_or_path is not None,
            "tuning: lora adapts a trained model, but there is none; use tuning: full, give model_name_or_path, or use "
            "tuning: qlora, which quantizes random transformer blocks and trains their adapters and everything else",
        )
        require(
            model.teacher is None or not own.report_head,
            "a teacher teaches only its classes, but report_head also learns words; drop one of them",
        )
        require_compatible_training(model, job.training)
        check_limits(model, job.memory, len(cuda_bytes(job.training)))
        require(
            own.checkpoint_branches is None or not checkpoints_activations(job),
            "checkpoint_every_layer covers all branches, but checkpoint_branches names some; drop one of them",
        )
        if model.model_name_or_path is None:
            own.check_parts()
            require(
                own.report_head or own.report_weight is None,
                f"report_weight is {own.report_weight}, but no report is learned; set report_head: true, or drop it",
            )
        self._check_parts(job)
        self._check_offloading(job)
        self._check_devices(job)

    def _check_devices(self, job: Job) -> None:
        devices, model, training = job.own.branch_devices, job.model, job.training
        if devices is None:
            return
        others = {"device_map": model.device_map, "offload_linears_mb": job.own.offload_linears_mb}
        for name, value in others.items():
            require(value is None, f"branch_devices and {name} both decide where weights are placed; drop one of them")
        require(
            model.tuning != "qlora",
            "branch_devices moves layers in full precision, but tuning: qlora quantizes them on the device that "
            "computes them; use tuning: full or lora, or drop branch_devices",
        )
        require(
            training.world_size == 1 and not training.deepspeed and not training.fsdp,
            "branch_devices is for one process without DeepSpeed or FSDP, which place weights themselves; drop it",
        )
        require(
            not training.torch_compile,
            "branch_devices moves tensors in hooks that torch.compile cannot trace; set torch_compile: false, or drop "
            "branch_devices",
        )
        for branch, device in devices.items():
            refusal = device_refusal(device)
            require(refusal is None, f"branch_devices puts {branch} on {device}: {refusal}")

    def _check_parts(self, job: Job) -> None:
        model, own = job.model, job.own
        require(
            own.frozen_branches is None or model.model_name_or_path is not None,
            "frozen_branches keeps what a trained model knows, but this run starts from scratch, where the branches "
            "are random numbers; drop frozen_branches, or give model_name_or_path",
        )
        require(
            own.frozen_branches is None or model.tuning == "full",
            f"frozen_branches is for tuning: full, and tuning: {model.tuning} already freezes all branches except for "
            "its adapters; drop one of them",
        )
        require(
            own.quantized_branches is None or model.tuning == "qlora",
            f"quantized_branches is for tuning: qlora, but tuning is {model.tuning}; drop one of them",
        )

    def _check_offloading(self, job: Job) -> None:
        if job.own.offload_linears_mb is None:
            return
        require(
            job.model.tuning == "lora",
            f"offload_linears_mb moves frozen layers in full precision, but tuning is {job.model.tuning}; use tuning: "
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
        own = own_of(config, job.own)
        own.check_parts()
        require(
            job.model.tuning == "full" or config is None or not own.report_head or bool(config.report_words),
            f"report_head: true adds a new head to {job.model.model_name_or_path}, but a saved adapter cannot store "
            "its words; use tuning: full, or give a model that was trained with report_head: true",
        )
        data = prepare_sensors(
            job.data,
            own,
            seed=effective_data_seed(job.training),
            cache_dir=default_cache_dir(job.data.cache_dir),
            report_words=known_report_words(config),
            may_lack_branches=config is not None,
        )
        print_data_summary(console, data)
        require_same_classes(job.model, data.label_names)
        teacher = teacher_settings(job)
        if teacher is not None:
            require_same_as_student(job.model.teacher, trained_label_names(teacher), list(data.label_names), "classes")
            require_same_as_student(
                job.model.teacher, branches_of(stored_config(teacher), own), own.branches, "branches"
            )
        shapes = _branch_shapes(data)
        heads = Heads(data.label_names, data.report_words, _report_length(config, data), own.report_weight)
        is_random, settings = config is None, job.model
        if is_random and (settings.tuning == "qlora" or settings.device_map is not None):
            set_seed(job.training.seed)
            start = new_trident(settings, own, heads, shapes)
            folder = random_start(start, job.training.seed, default_cache_dir(job.data.cache_dir))
            console.print(f"random initial weights: {folder}", soft_wrap=True)
            settings = replace(settings, model_name_or_path=str(folder))
        device = job.training.device
        placement = plan_trident_placement(settings, own, job.memory, free_memory(job.training), device)
        if placement is not None:
            saves = checkpoints_activations(job) or own.checkpoint_branches is not None
            console.print(placement.line(saves), soft_wrap=True)
        before_model_bytes = seed_before_model(job)
        model, lines = make_trident(settings, own, heads, shapes, device, placement)
        shapes = input_shapes(model.config, shapes)
        for line in lines:
            console.print(line, soft_wrap=True)
        for name in own.frozen_branches or ():
            model.parts()[name].requires_grad_(False)
        model.checkpointed = None if own.checkpoint_branches is None else tuple(own.checkpoint_branches)
        if own.branch_devices is not None:
            console.print(place_branches(model, own.branch_devices, device), soft_wrap=True)
        self._offload(job, model, console)
        loaded = TrainingComponents(None, data, model, SensorCollator(shapes), before_model_bytes)
        parts = tuned_components(job, console, loaded, settings, adapter_plan(model, is_random))
        if teacher is not None:
            parts.teacher = load_scored_trident(teacher, own, heads, shapes)
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
        console.print(moved.line(checkpoints_activations(job) or own.checkpoint_branches is not None), soft_wrap=True)

    def load_scored(self, source: EvaluationSource) -> TrainingComponents:
        config = stored_config(source.model)
        own = own_of(config, source.own)
        data = prepare_sensors(
            source.data,
            own,
            seed=source.seed,
            cache_dir=default_cache_dir(source.data.cache_dir),
            label_names=trained_label_names(source.model),
            report_words=known_report_words(config),
            may_lack_branches=True,
        )
        shapes = _branch_shapes(data)
        heads = Heads(data.label_names, data.report_words, _report_length(config, data))
        model = load_scored_trident(source.model, own, heads, shapes)
        return TrainingComponents(None, data, model, SensorCollator(input_shapes(config, shapes)))

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        return score_samples(model, parts.data.eval, parts.collator)

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        batch = parts.collator([parts.data.train[0]])
        return {name: value for name, value in batch.items() if name != "labels"}


def own_of(config: Optional[TridentConfig], own: SensorSettings) -> SensorSettings:
    """Return ``own`` with branches and report head of a trained model. Raises ModelError if others are requested."""
    has_reports = own.report_head or known_report_words(config) is not None
    return replace(own, branches=branches_of(config, own), report_head=has_reports)


def known_report_words(config: Optional[TridentConfig]) -> Optional[list[str]]:
    """Return the words of a trained model's report head; None without a model or report head."""
    return list(config.report_words) if config is not None and config.report_words else None


def _report_length(config: Optional[TridentConfig], data: PreparedSamples) -> int:
    """Return the number of words of the longest training report, including the end word."""
    longest = max((len(ids) - 1 for ids in data.train.report_ids or ()), default=0)
    return longest if config is None else max(longest, config.report_length)


def _branch_shapes(data: PreparedSamples) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all branches of training and held-out recordings, which may have an additional branch."""
    held_out = {} if data.eval is None else data.eval.store.shapes
    return {**held_out, **data.train.store.shapes}
