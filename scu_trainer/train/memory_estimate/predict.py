"""Prediction of the peak memory of the steps of a loaded job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.hardware.estimate import AdditionalMemory, MemoryEstimate, TrainableWeights, estimate_memory
from scu_trainer.hardware.heap import UntouchedHeap
from scu_trainer.hardware.optimizer_bytes import argument_copies
from scu_trainer.models.loading.sizes import weight_counts
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.loss.loss_path import LARGE_VOCABULARY
from scu_trainer.train.loss.rows.kernels import usable_gpu_bytes
from scu_trainer.train.loss.rows.model_loss import (
    HALVES,
    has_causal_loss,
    head_of,
    obstacle_to_headless,
    obstacle_to_padding_free,
    user_forward_of,
    weights_dtype,
)
from scu_trainer.train.memory_estimate.shapes import RowShapes, Step, lengths_of, planned_step
from scu_trainer.train.memory_estimate.skeleton import fake_copy
from scu_trainer.train.memory_estimate.step import EstimatedStep, LossKind, tensors_of, trace
from scu_trainer.train.preflight.optimization import optimizer_name
from scu_trainer.train.step.batches.rows import PADDING, has_time
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed, zero_stage
from scu_trainer.train.step.muon import outer_layers

ROWS_LOOKED_AT = 64
"""Number of rows without a known length that are collated to find their padded length."""


def predict(
    job: Job, parts: TrainingComponents, limit_bytes: Optional[int] = None
) -> tuple[MemoryEstimate, Step, Step]:
    """Return (memory estimate of a loaded job, the step that it is for, the step without ``limit_bytes``). Does not
    change ``parts``. Passes on the exceptions of models that create tensors with data-dependent shapes."""
    device, rows = job.training.device.type, RowShapes.of(parts.data.train)
    subject, held = traced_subject(job, parts, rows), held_memory(job, parts)
    estimate_step = functools.partial(estimate_of, subject, held=held, device=device)
    whole, estimate = largest_grown_step(largest_step(job, rows, device, parts.model), estimate_step, _card_bytes(job))
    step = whole
    if limit_bytes is not None:
        step, estimate = largest_step_within((whole, estimate), estimate_step, limit_bytes, job.memory.min_batch_size)
    return estimate, step, whole


def largest_grown_step(
    step: Step, estimate: Callable[[Step], MemoryEstimate], limit_bytes: Optional[int]
) -> tuple[Step, MemoryEstimate]:
    """Return ``step`` if it fits, else the largest step between the requested one and ``step`` that fits: beyond the
    requested batch, micro-batches grow only as far as memory allows."""
    taken = estimate(step)
    if step.asked is None or limit_bytes is None or taken.fits(limit_bytes):
        return step, taken
    return largest_that_fits((step.asked, estimate(step.asked)), (step, taken), estimate, limit_bytes)


def largest_step_within(
    whole: tuple[Step, MemoryEstimate],
    estimate: Callable[[Step], MemoryEstimate],
    limit_bytes: int,
    least_rows: int,
) -> tuple[Step, MemoryEstimate]:
    """Return ``whole`` with the largest micro-batches that fit, or with the smallest allowed ones if none fit."""
    step, taken = whole
    least = min(least_rows, step.rows)
    if taken.fits(limit_bytes) or step.rows == least:
        return whole
    smallest = step.with_rows(least)
    return largest_that_fits((smallest, estimate(smallest)), whole, estimate, limit_bytes)


def largest_that_fits(
    smallest: tuple[Step, MemoryEstimate],
    whole: tuple[Step, MemoryEstimate],
    estimate: Callable[[Step], MemoryEstimate],
    limit_bytes: int,
) -> tuple[Step, MemoryEstimate]:
    """Return the largest step from ``smallest`` to below ``whole`` that fits; ``smallest`` if none does."""
    (least, small), (most, taken) = smallest, whole
    per_row = (taken.needed_bytes - small.needed_bytes) / max(1, most.rows - least.rows)
    rows = min(most.rows - 1, least.rows + int(max(0, limit_bytes - small.needed_bytes) / max(1.0, per_row)))
    while small.fits(limit_bytes) and rows > least.rows:
        larger = most.with_rows(rows)
        more = estimate(larger)
        if more.fits(limit_bytes):
            return larger, more
        rows = (least.rows + rows) // 2  # memory did not grow linearly, as where gradients dominate
    return smallest


def estimate_of(subject: EstimatedStep, step: Step, held: AdditionalMemory, device: str) -> MemoryEstimate:
    trained = trained_sizes(subject.model, subject.trained)
    looks_at_heap = device == "cpu" and UntouchedHeap.is_known()
    kept = _kept_blocks(held.bytes_of(trained), subject.trained, trained) if looks_at_heap else None
    stepping, after_others = held.step_blocks(trained, device), step.micro_batches > 1
    traced = trace(subject, step.rows, step.length, after_others=after_others, kept=kept, stepping=stepping)
    compiled_bytes = (step.sizes - 1) * traced.compiled_bytes  # the first size is counted with the libraries
    return estimate_memory(traced.parts, trained, held, device, traced.heap_bytes, compiled_bytes)


def _kept_blocks(kept: Mapping[str, int], weights: Sequence[nn.Parameter], trained: TrainableWeights) -> list[int]:
    """Return the sizes of the blocks that are kept for each weight (two moments of a weight are two blocks) from
    ``kept``, the bytes that are kept for all weights together, by part."""
    share = {part: size_bytes / max(1, trained.size_bytes) for part, size_bytes in kept.items()}
    blocks = []
    for weight in weights:
        for copies in share.values():
            while copies > 0:
                blocks.append(int(weight.nbytes * min(1.0, copies)))
                copies -= 1.0
    return blocks


def largest_step(job: Job, rows: RowShapes, device: str, model: Optional[nn.Module] = None) -> Step:
    """Return the largest step of ``job``. ``device``: type of the training device. ``model``: the loaded model."""
    training = job.training
    batch_rows, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if rows.all_rows is not None:
        rank_rows = -(-rows.all_rows // training.world_size)
        batch_rows = max(1, min(batch_rows, rank_rows))
        accumulation = max(1, min(accumulation, -(-rank_rows // batch_rows)))
    return planned_step(
        rows,
        job.memory,
        job.acting_curriculum,
        batch_rows=batch_rows,
        accumulation=accumulation,
        device=device,
        dtype=_compute_dtype(job, device, model),
        steps=job.planned_steps(1 if rows.lengths is None else len(rows.lengths)),
        is_sharded=bool(job.training.fsdp) or zero_stage(job.training) == 3,
        is_padded=job.memory.resolved_padding_free is False
        or (model is not None and obstacle_to_padding_free(_trainer_attributes(job, model)) is not None),
    )


def _compute_dtype(job: Job, device: str, model: Optional[nn.Module]) -> torch.dtype:
    half = HALVES[mixed_precision_of(job)]
    if half is not None and not (half == torch.float16 and device == "cpu"):  # accelerate does not use that autocast
        return half
    if model is not None:
        return weights_dtype(model)
    return getattr(torch, job.model.dtype) if job.model.dtype != "auto" else torch.float32


def held_memory(job: Job, parts: Optional[TrainingComponents] = None) -> AdditionalMemory:
    """Return what the job keeps between steps. Without ``parts``, the teacher's size is read from its configuration."""
    prior, stage = job.regularization, zero_stage(job.training) or 0
    return AdditionalMemory(
        optim=optimizer_name(job),
        holds_start=prior is not None and prior.prior == "init" and stage < 3,  # ZeRO-3: S is not measured
        holds_averages=job.efficiency.ema_decay is not None,
        processes=job.training.world_size,
        zero_stage=stage,
        teacher_bytes=_teacher_bytes(job.model.teacher) if parts is None else _model_bytes(parts.teacher),
        more_copies=argument_copies(job.training.optim_args),
        copies_parts=job.memory.memory_control and not uses_deepspeed(job.training) and not job.training.fsdp,
    )


def _model_bytes(model: Optional[nn.Module]) -> int:
    return 0 if model is None else sum(tensor.nbytes for tensor in tensors_of(model))


@functools.cache
def _teacher_bytes(name: Optional[str]) -> int:
    if name is None:
        return 0
    counts = weight_counts(name)
    return int(counts["weights"] * counts["stored_bytes"])


def trained_sizes(model: nn.Module, weights: Sequence[nn.Parameter]) -> TrainableWeights:
    """Return the sizes of the trained ``weights`` of ``model``."""
    embeddings = {id(p) for layer in model.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    outer = {id(p) for layer in outer_layers(model) for p in layer.parameters()}
    separate_counts = {
        "embeddings": sum(p.numel() for p in weights if id(p) in embeddings),
        "no matrices": sum(p.numel() for p in weights if p.dim() != 2 or id(p) in outer),
    }
    sizes = [p.nbytes for p in weights]
    return TrainableWeights(sum(sizes), sum(p.numel() for p in weights), max(sizes, default=0), separate_counts)


# -- what is traced ----------------------------------------------------------------------------------------------------


def _trainer_attributes(job: Job, model: nn.Module) -> SimpleNamespace:
    """Return the attributes of a Trainer that ``model_loss`` reads, before there is a Trainer."""
    return SimpleNamespace(
        model=model,
        args=job.training,
        is_fsdp_enabled=bool(job.training.fsdp),
        label_smoother=job.training.label_smoothing_factor or None,
        compute_loss_func=job.model.teacher,
    )


def loss_kind(job: Job, model: nn.Module) -> LossKind:
    """Return how the loss of ``model`` will be computed, which ``LossPath`` otherwise finds out at the first batch."""
    attributes = _trainer_attributes(job, model)
    wanted = job.memory.resolved_chunked_loss
    if wanted != "never" and not obstacle_to_headless(attributes):
        is_large = head_of(model).out_features >= LARGE_VOCABULARY and user_forward_of(model) is None
        if wanted == "always" or is_large:
            return "headless"
    return "opened" if job.acting_curriculum is not None and has_causal_loss(attributes) else "returned"


def mixed_precision_of(job: Job) -> str:
    return "bf16" if job.training.bf16 else "fp16" if job.training.fp16 else "no"


def traced_subject(job: Job, parts: TrainingComponents, kind_of_rows: RowShapes) -> EstimatedStep:
    """Return the loaded model with fake weights, and batches made of its longest row."""
    sample, mode = _longest_row(parts), FakeTensorMode(allow_non_fake_inputs=True)
    if not kind_of_rows.is_uneven:
        sample = without_mask(sample)

    def batch(rows: int, length: int) -> Mapping[str, Any]:
        return {name: _with_size(name, value, rows, length) for name, value in sample.items()}

    model, kind = fake_copy(parts.model, mode), loss_kind(job, parts.model)
    return EstimatedStep(model, mode, batch, kind, HALVES[mixed_precision_of(job)], _card_bytes(job))


def _card_bytes(job: Job) -> Optional[int]:
    """Return the bytes that training may use on its GPU, within ``memory_limit_gb``, which is set only later."""
    of_card, limit_gb = usable_gpu_bytes(job.training.device), job.memory.memory_limit_gb
    return of_card if of_card is None or limit_gb is None else min(of_card, int(limit_gb * 2**30))


def _longest_row(parts: TrainingComponents) -> dict[str, Any]:
    """Return the longest row, padded by the collator; if lengths are not known, one of a few rows padded together."""
    data = parts.data.train
    lengths = lengths_of(data)
    if lengths is not None:
        rows = [data[int(lengths.argmax())]]
    else:
        rows = [data[number] for number in range(min(ROWS_LOOKED_AT, len(data)))]
    batch = parts.collator(rows)
    return {
        name: value[:1] if torch.is_tensor(value) and value.dim() and len(value) == len(rows) else value
        for name, value in batch.items()
        if name != SAMPLE_INDEX
    }


def without_mask(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a mask that hides nothing, for rows without padding. With real data a model finds out that the mask hides
    nothing and attends without it; a fake mask has no values to check."""
    mask = sample.get("attention_mask")
    hides = torch.is_tensor(mask) and not bool(mask.all())
    return {name: value for name, value in sample.items() if hides or name != "attention_mask"}


def _with_size(name: str, value: Any, rows: int, length: int) -> Any:
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if name in PADDING and has_time(name, value):
        value = value[:, :length]
    return value.repeat(rows, *[1] * (value.dim() - 1))
