"""Memory estimates of alternative settings for a job before it starts; for language models without reading weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from scu_trainer.errors import ModelError
from scu_trainer.hardware.estimate import MemoryEstimate, TrainableWeights, estimate_memory
from scu_trainer.hardware.recommend import SettingChoice
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.fit import require_positions
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.loss.rows.model_loss import HALVES
from scu_trainer.train.memory_estimate.events import Events, extrapolated_to_rows
from scu_trainer.train.memory_estimate.layers import (
    deep_events,
    kinds_of,
    layers_of,
    shallow,
    shapes_by_part,
    stand_in_layers,
    with_layers,
)
from scu_trainer.train.memory_estimate.predict import (
    estimate_of,
    held_memory,
    largest_grown_step,
    largest_step,
    largest_step_within,
    loss_kind,
    mixed_precision_of,
    traced_subject,
    trained_sizes,
)
from scu_trainer.train.memory_estimate.shapes import RowShapes, Step
from scu_trainer.train.memory_estimate.skeleton import model_from_configuration
from scu_trainer.train.memory_estimate.step import EstimatedStep, tensors_of, trace
from scu_trainer.train.preflight.optimization import optimizer_name
from scu_trainer.train.step.distributed.deepspeed_rules import zero_stage
from scu_trainer.train.tasks.common import checkpoints_activations
from scu_trainer.train.tasks.packing import Packing

TRACED_WHOLE, TRACED_WHOLE_ON_CPU = 3, 12
"""Most layers of a model that is traced as a whole; on a CPU more, because only that shows how the heap grows."""

MODELS_KEPT = 4
"""Models made from a configuration that are kept: the next estimate is often for the same one, with other rows."""

FEW_ROWS = (2, 3)
"""Rows of the micro-batches that are traced for a deep model; not 1, because operations on one row may copy less."""


def choice_of(job: Job) -> SettingChoice:
    """Return the choice that the job's settings make."""
    training, model = job.training, job.model
    has_length = "block_size" not in job.task.kind.unused
    zero = getattr(training, "hf_deepspeed_config", None)
    return SettingChoice(
        tuning=model.tuning,
        mixed_precision=mixed_precision_of(job),
        checkpoint_every_layer=checkpoints_activations(job),
        optim=optimizer_name(job),
        block_size=job.data.block_size if has_length else None,
        load_in_8bit=model.load_in_8bit,
        dtype=model.dtype,
        offload=zero is not None and zero.is_offload(),
    )


def divided_by_zero3(job: Job) -> Optional[str]:
    """Return what the prediction, for a process with all weights, leaves out under ZeRO-3; None without ZeRO-3."""
    saves = "what ZeRO-3 saves by dividing weights among processes or moving them to main memory"
    return saves if zero_stage(job.training) == 3 else None


def with_choice(job: Job, choice: SettingChoice) -> Job:
    model = replace(
        job.model,
        tuning=choice.tuning,
        load_in_8bit=choice.load_in_8bit,
        dtype=choice.dtype,
        checkpoint_every_layer=choice.checkpoint_every_layer,
    )
    data = job.data if choice.block_size is None else replace(job.data, block_size=choice.block_size)
    return replace(job, model=model, data=data)


class FromConfiguration:
    """A language model that is known only by its ``config``. ``device``: type of the device to plan for."""

    def __init__(self, job: Job, config: PretrainedConfig, device: str) -> None:
        self.job, self.config, self.device = job, config, device
        self.stored_dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
        self.is_quantized = bool(getattr(config, "quantization_config", None))
        self._is_packed = Packing.expected(job.data, config).applied(job.data).packing
        self._kinds = kinds_of(config)
        self._deep = functools.cache(self._trace)
        self._made = functools.lru_cache(maxsize=MODELS_KEPT)(self._make_step)

    def step(self, choice: SettingChoice) -> Step:
        """Return the step with rows of the largest length, because the real lengths are not known before reading."""
        length = choice.block_size
        rows = RowShapes(length, length, is_uneven=not self._is_packed)
        model = self._estimated_step(choice, self._shallow_layers).model if rows.is_uneven else None  # may need padding
        return largest_step(self.job, rows, self.device, model)

    def estimate(self, choice: SettingChoice, step: Step) -> MemoryEstimate:
        held = replace(held_memory(self.job), optim="" if choice.offload else choice.optim)
        alike = replace(choice, optim="", offload=False)
        if len(self._kinds) > (TRACED_WHOLE_ON_CPU if self.device == "cpu" else TRACED_WHOLE):
            deep = self._deep(alike, step.length)
            events = None if deep is None else extrapolated_to_rows(step.rows, deep.few, deep.more)
            if events is not None:
                before = deep.trained.size_bytes if step.micro_batches > 1 else None
                parts = {**events.highest(before), "weights": deep.weights_bytes}
                compiled_bytes = (step.sizes - 1) * deep.compiled_bytes
                return estimate_memory(parts, deep.trained, held, self.device, compiled_bytes=compiled_bytes)
        return estimate_of(self._estimated_step(choice, range(len(self._kinds))), step, held, self.device)

    def _trace(self, choice: SettingChoice, length: int) -> Optional[Deep]:
        """Derive the deep model from a shallow one; None if its layers do not run in order, or none represents it."""
        numbers = self._shallow_layers
        if len(numbers) == len(self._kinds):
            return None
        subject = self._estimated_step(choice, numbers)
        layers = layers_of(subject.model, len(numbers))
        stand_ins, found = stand_in_layers(self._kinds, numbers), []
        for rows in FEW_ROWS:
            traced = trace(subject, rows, length, after_others=False, layers=layers)
            events = deep_events(traced.events, stand_ins)
            if events is None:
                return None
            found.append((rows, events))
        weights_bytes, trained = weights_of(subject.model, layers, [layers[i] for i in stand_ins])
        return Deep(*found, weights_bytes, trained, traced.compiled_bytes)

    @functools.cached_property
    def _shallow_layers(self) -> Sequence[int]:
        """Layer numbers of a shallow model that represents the whole one; all layers if its weights would differ: if a
        layer's number decides what it is (DeepSeek-V3: dense below ``first_k_dense_replace``) or layers share weights.
        """
        numbers, all_numbers, choice = shallow(self._kinds), range(len(self._kinds)), choice_of(self.job)
        whole = shapes_by_part(self._estimated_step(choice, all_numbers).model, len(all_numbers))
        with contextlib.suppress(ModelError):  # without its other layers the model may be invalid
            few = shapes_by_part(self._estimated_step(choice, numbers).model, len(numbers))
            if few and [*(few[i] for i in stand_in_layers(self._kinds, numbers)), few[-1]] == whole:
                return numbers
        return all_numbers

    def _estimated_step(self, choice: SettingChoice, layers: Sequence[int]) -> EstimatedStep:
        return self._made(replace(choice, optim="", offload=False), tuple(layers))

    def _make_step(self, choice: SettingChoice, layers: Sequence[int]) -> EstimatedStep:
        job, half = with_choice(self.job, choice), HALVES[choice.mixed_precision]
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # the code of some models makes tensors of constants
        model = model_from_configuration(
            with_layers(self.config, layers),
            job.model,
            mode,
            compute_dtype=half or torch.float32,
            is_checkpointed=choice.checkpoint_every_layer,
        )
        require_positions(model, job.model.model_name_or_path or "the embedded base", job.data.block_size)
        return EstimatedStep(
            model, mode, _unpadded_rows if self._is_packed else _padded_rows, loss_kind(job, model), half
        )


@dataclass(frozen=True)
class Deep:
    """A deep model as derived from a shallow one. ``few``, ``more``: rows of a micro-batch, and the events of its step.
    ``compiled_bytes``: as in ``Traced``; layers of a kind share their compiled kernels."""

    few: tuple[int, Events]
    more: tuple[int, Events]
    weights_bytes: int
    trained: TrainableWeights
    compiled_bytes: int


def weights_of(
    model: nn.Module, layers: Sequence[nn.Module], all_layers: Sequence[nn.Module]
) -> tuple[int, TrainableWeights]:
    """Return (bytes of weights and buffers, trained weights) of ``model`` with ``all_layers`` instead of ``layers``."""
    inside = {id(tensor) for layer in layers for tensor in tensors_of(layer)}
    outside = [tensor for tensor in tensors_of(model) if id(tensor) not in inside]
    tensors = [*outside, *(tensor for layer in all_layers for tensor in tensors_of(layer))]
    return sum(tensor.nbytes for tensor in tensors), trained_sizes(model, [t for t in tensors if t.requires_grad])


def _unpadded_rows(rows: int, length: int) -> Mapping[str, Any]:
    """Return rows without padding and therefore without a mask; their values are never read."""
    ids = torch.zeros((rows, length), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _padded_rows(rows: int, length: int) -> Mapping[str, Any]:
    found = _unpadded_rows(rows, length)
    return {**found, "attention_mask": found["input_ids"]}


@dataclass(frozen=True)
class FromParts:
    """A loaded job with a small model; only settings that need no other weights are varied."""

    job: Job
    parts: TrainingComponents
    device: str

    @functools.cached_property
    def rows(self) -> RowShapes:
        return RowShapes.of(self.parts.data.train)

    def step(self, choice: SettingChoice) -> Step:
        return largest_step(self.job, self.rows, self.device, self.parts.model)

    def estimate(self, choice: SettingChoice, step: Step) -> MemoryEstimate:
        subject = replace(traced_subject(self.job, self.parts, self.rows), autocast=HALVES[choice.mixed_precision])
        if choice.checkpoint_every_layer and not checkpoints_activations(self.job):
            checkpoint_every_layer(subject.model)
        return estimate_of(subject, step, replace(held_memory(self.job, self.parts), optim=choice.optim), self.device)


Source = FromConfiguration | FromParts
"""A job with settings that can be varied."""


# -- which micro-batch fits --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """The estimate of a choice of settings.

    ``estimate``, ``step``: with the largest micro-batches that fit, or with the smallest ones if none fit. ``whole``,
    ``as_asked``: step and estimate without smaller micro-batches. ``fits``: whether ``estimate`` fits in memory.
    """

    choice: SettingChoice
    estimate: MemoryEstimate
    step: Step
    whole: Step
    as_asked: MemoryEstimate
    fits: bool


def planned(source: Source, choice: SettingChoice, limit_bytes: int, least_rows: int) -> Planned:
    """Estimate ``choice``. ``least_rows``: smallest micro-batch; the rows of a step if steps are not divided."""
    estimate = functools.partial(source.estimate, choice)
    whole, taken = largest_grown_step(source.step(choice), estimate, limit_bytes)
    step, made = largest_step_within((whole, taken), estimate, limit_bytes, least_rows)
    return Planned(choice, made, step, whole, taken, made.fits(limit_bytes))
