"""The task image-classification: images, labels, accuracy and bits per label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from scu_trainer.data import default_cache_dir
from scu_trainer.data.images.data import find_images, natural_size, prepare_images
from scu_trainer.data.images.decode import fixed_pixels
from scu_trainer.data.images.store import PixelFormat, collate_images, pixel_statistics
from scu_trainer.data.samples import PreparedSamples
from scu_trainer.errors import SettingsError
from scu_trainer.models.loading.adapters import AdapterPlan
from scu_trainer.models.vision.adapters import fully_trained_modules, inner_targets, save_classes_with_adapter
from scu_trainer.models.vision.inputs import pixel_inputs, require_stock_pixels
from scu_trainer.models.vision.models import (
    attach_pixel_inputs,
    load_scored_classifier,
    make_classifier,
    require_size_from_scratch,
    training_augmentation,
)
from scu_trainer.models.vision.norms import allow_single_images, needs_several_rows
from scu_trainer.models.vision.view import ImageView, known_classes, view_of
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.settings.images import ImageSettings
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.train.evaluation.classification import class_metrics, preprocess_class_logits, score_samples
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.job.components import EvaluationSource, TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.tasks.common import (
    print_data_summary,
    require_same_as_student,
    seed_before_model,
    teacher_settings,
    tuned_components,
)

HEADS = ("classifier", "score", "head", "fc")
"""Names that image classifiers use for their last layer."""

BY_LENGTH = ("token_budget", "length_warmup")
"""Curriculum methods for rows of different lengths."""

FEWEST_ROWS = 4
"""Smallest micro-batch for BatchNorm: with fewer images its gradients differ too much from those of the batch."""


class ImageTask:
    name, item, unit = "image-classification", "image", "label"
    compute_metrics = staticmethod(class_metrics)
    preprocess_logits = staticmethod(preprocess_class_logits)

    def check(self, job: Job) -> None:
        model = job.model
        if model.tuning == "qlora":
            raise SettingsError("tuning: qlora stores language models in 4 bits; for images use tuning: lora or full")
        if model.tuning == "lora" and model.model_name_or_path is None:
            raise SettingsError(
                f"tuning: lora adapts a trained model, but {job.own.architecture} starts from scratch; use tuning: "
                "full, or give model_name_or_path"
            )
        if model.device_map is not None:
            raise SettingsError("device_map places language models; for images drop it")
        if model.model_name_or_path is None and job.own.image_size is not None:
            require_size_from_scratch(job.own.architecture, job.own.image_size)
        by_length = [method for method in job.curriculum.methods if method in BY_LENGTH]
        if by_length:
            raise SettingsError(
                f"curriculum {by_length[0]} acts on the lengths of rows, but all images have the same size; drop it"
            )
        if job.own.augmentation == "strong" and job.own.image_channels == 1:
            raise SettingsError(
                "augmentation: strong changes colours, but image_channels is 1 (gray); use standard or light, or drop "
                "image_channels"
            )

    def load(self, job: Job, console: Console) -> TrainingComponents:
        data, view = _prepared_data(job.model, job.data, job.own, effective_data_seed(job.training))
        teacher = teacher_settings(job)
        if teacher is not None:
            require_same_as_student(job.model.teacher, known_classes(teacher), tuple(data.label_names), "classes")
            _require_same_view(teacher, job.own, view)
        print_data_summary(console, data)
        before_model_bytes = seed_before_model(job)
        model, lines = make_classifier(job.model, job.own, data.label_names, view)
        for line in lines:
            console.print(line, soft_wrap=True)
        if allow_single_images(model):
            _require_rows_for_statistics(model, view, job)
            _raise_min_batch_size(job, console)
        attach_pixel_inputs(model, view.processor, training_augmentation(job.own, view))
        loaded = TrainingComponents(view.processor, data, model, collate_images, before_model_bytes)
        parts = tuned_components(job, console, loaded, job.model, _adapter_plan(model))
        save_classes_with_adapter(parts.model)
        if teacher is not None:
            parts.teacher = load_scored_classifier(teacher, data.label_names, view).float()
        return parts

    def load_scored(self, source: EvaluationSource) -> TrainingComponents:
        classes = known_classes(source.model)
        data, view = _prepared_data(source.model, source.data, source.own, source.seed, classes)
        model = load_scored_classifier(source.model, data.label_names, view)
        return TrainingComponents(view.processor, data, model, collate_images)

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        return score_samples(model, parts.data.eval, parts.collator)

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        """Return two images, because the example runs in training mode, where BatchNorm needs more than one."""
        rows = [parts.data.train[number] for number in range(min(2, len(parts.data.train)))]
        return {"pixel_values": parts.collator(rows)["pixel_values"]}


def _prepared_data(
    model: ModelSettings, data: DataSettings, own: ImageSettings, seed: int, classes: Sequence[str] = ()
) -> tuple[PreparedSamples, ImageView]:
    """Return the prepared images, and how the model sees them. A new image processor gets their mean and standard
    deviation. ``classes``: the classes of a trained model."""
    cache_dir = default_cache_dir(data.cache_dir)
    order = () if classes or model.model_name_or_path is None else known_classes(model)
    source = find_images(data, own, cache_dir, classes, order=order)
    view = view_of(model, own, lambda: natural_size(source))
    pixel_format = PixelFormat(view.processor, view.channels, view.size)
    prepared = prepare_images(source, pixel_format, data, seed=seed, cache_dir=cache_dir)
    if view.is_new:
        view.processor.image_mean, view.processor.image_std = pixel_statistics(prepared.train)
    require_stock_pixels(view.processor, view.channels, partial(fixed_pixels, processor=view.processor))
    return prepared, view


def _require_same_view(teacher: ModelSettings, own: ImageSettings, view: ImageView) -> None:
    """Require that the teacher takes the same images as the student, with the same size and scaling."""
    teacher_view = view_of(teacher, replace(own, image_size=None, image_channels=None), lambda: max(view.size))
    name = teacher.model_name_or_path
    require_same_as_student(
        name, (teacher_view.channels, teacher_view.size), (view.channels, view.size), "sizes or channels of images"
    )
    pixels = [pixel_inputs(each_view.processor, each_view.channels) for each_view in (teacher_view, view)]
    require_same_as_student(name, *([*p.mean, *p.deviation] for p in pixels), "mean and deviation of pixels")


def _adapter_plan(model: torch.nn.Module) -> AdapterPlan:
    """Return the adapter plan. Its task type is None, because peft has none for image classification."""
    heads = [name for name, _ in model.named_children() if name in HEADS]
    return AdapterPlan(
        task_type=None, targets=inner_targets(model, heads), modules_to_save=fully_trained_modules(model, heads)
    )


def _require_rows_for_statistics(model: torch.nn.Module, view: ImageView, job: Job) -> None:
    """Raise SettingsError for batches of one image if BatchNorm acts on maps of 1 x 1: it would learn nothing."""
    training = job.training
    rows_at_once = training.per_device_train_batch_size
    if job.memory.acts:  # a micro-batch can contain rows of several batches of a step
        rows_at_once *= training.gradient_accumulation_steps
    if rows_at_once == 1 and needs_several_rows(model, view):
        raise SettingsError(
            "per_device_train_batch_size is 1, but BatchNorm on feature maps of 1 x 1 needs two images at once; set it "
            f"to 2 or more, or image_size to {2 * max(view.size)}"
        )


def _raise_min_batch_size(job: Job, console: Console) -> None:
    """Raise ``min_batch_size`` for BatchNorm if it has its default value."""
    memory, training = job.memory, job.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    fewest = min(FEWEST_ROWS, rows, memory.max_batch_size or rows)
    if memory.acts and memory.min_batch_size == 1 < fewest:
        job.memory = replace(memory, min_batch_size=fewest)
        console.print(f"min_batch_size: {fewest}, because BatchNorm needs several images at once", soft_wrap=True)
