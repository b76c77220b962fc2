"""What choices of settings would take, for a job that is not started: of language models without reading weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scu_trainer.hardware.estimate import Footprint, Trained, footprint
from scu_trainer.hardware.recommend import Choice
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.train.footprint.layers import kinds_of, of_all_layers, with_layers
from scu_trainer.train.footprint.predict import footprint_of, held_by, loss_kind, step_of, subject_of, trained_of
from scu_trainer.train.footprint.shapes import Rows, Step
from scu_trainer.train.footprint.skeleton import of_configuration
from scu_trainer.train.footprint.step import Subject, trace
from scu_trainer.train.job import Job
from scu_trainer.train.parts import Parts, checkpoints

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HALVES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}

TRACED_WHOLE = 12
"""Layers up to which a model is traced whole."""


class Source(Protocol):
    """A job whose settings can be varied."""

    def step(self, choice: Choice) -> Step: ...

    def footprint(self, choice: Choice, step: Step) -> Footprint: ...


def choice_of(job: Job) -> Choice:
    """What the job asks for."""
    training, model = job.training, job.model
    has_length = "block_size" not in job.task.kind.unused
    zero = getattr(training, "hf_deepspeed_config", None)
    return Choice(
        tuning=model.tuning,
        mixed_precision="bf16" if training.bf16 else "fp16" if training.fp16 else "no",
        checkpoint_every_layer=checkpoints(job),
        optim=held_by(job).optim,
        block_size=job.data.block_size if has_length else None,
        load_in_8bit=model.load_in_8bit,
        dtype=model.dtype,
        offload=zero is not None and zero.is_offload(),
    )


def with_choice(job: Job, choice: Choice) -> Job:
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
    """A language model of which only ``config`` is read. ``device``: kind of the device that is planned for."""

    def __init__(self, job: Job, config: PretrainedConfig, device: str) -> None:
        self.job, self.config, self.device = job, config, device
        self.stored_dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
        self._kinds = kinds_of(config)
        self._traced = functools.cache(self._trace)

    def step(self, choice: Choice) -> Step:
        """Rows as long as a row may be: which ones there are is not known before they are read."""
        length = choice.block_size
        is_uneven = not self.job.data.packing
        return step_of(self.job, Rows(length, length, is_uneven), self.device)

    def footprint(self, choice: Choice, step: Step) -> Footprint:
        held = replace(held_by(self.job), optim="" if choice.offload else choice.optim)
        if len(self._kinds) <= TRACED_WHOLE:
            return footprint_of(self._subject(choice, range(len(self._kinds))), step, held, self.device)
        traced = self._traced(replace(choice, optim="", offload=False), step.length)
        at = {name: few + (more - few) * (step.rows - 1) for name, (few, more) in _pairs(traced)}
        trained = Trained(at["trained"], at["numbers"], at["largest"])
        if step.chunks > 1:
            at["gradients"] = trained.size_bytes
        return footprint(at, trained, held, self.device)

    def _trace(self, choice: Choice, length: int) -> dict[tuple[str, int], int]:
        """(part, rows) -> bytes, for chunks of one row and of two."""

        def measure(layers: Sequence[int]) -> dict[tuple[str, int], int]:
            subject = self._subject(choice, layers)
            trained = trained_of(subject.trained)
            sizes = {"trained": trained.size_bytes, "numbers": trained.weights, "largest": trained.largest_bytes}
            return {
                (name, rows): value
                for rows in (1, 2)
                for name, value in {**trace(subject, rows, length, after_others=False).passing, **sizes}.items()
            }

        return of_all_layers(self._kinds, measure)

    def _subject(self, choice: Choice, layers: Sequence[int]) -> Subject:
        job, mode, half = with_choice(self.job, choice), FakeTensorMode(), HALVES[choice.mixed_precision]
        model = of_configuration(
            with_layers(self.config, layers),
            job.model,
            mode,
            compute_dtype=half or torch.float32,
            is_checkpointed=choice.checkpoint_every_layer,
        )
        return Subject(model, mode, _tokens, loss_kind(job, model), half)


def _pairs(traced: Mapping[tuple[str, int], int]) -> Iterator[tuple[str, tuple[int, int]]]:
    return ((name, (value, traced[name, 2])) for (name, rows), value in traced.items() if rows == 1)


def _tokens(rows: int, length: int) -> Mapping[str, Any]:
    """Rows without padding; nobody reads what they hold."""
    ids = torch.zeros((rows, length), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "attention_mask": ids}


@dataclass(frozen=True)
class FromParts:
    """A job that is loaded: small models, of which only what does not need other weights is varied."""

    job: Job
    parts: Parts
    device: str

    def step(self, choice: Choice) -> Step:
        return step_of(self.job, Rows.of(self.parts.data.train), self.device)

    def footprint(self, choice: Choice, step: Step) -> Footprint:
        subject = replace(subject_of(self.job, self.parts), autocast=HALVES[choice.mixed_precision])
        if choice.checkpoint_every_layer and not checkpoints(self.job):
            checkpoint_every_layer(subject.model)
        return footprint_of(subject, step, replace(held_by(self.job), optim=choice.optim), self.device)


# -- which chunk fits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A choice, what it would take in the largest chunks that fit, or in the smallest ones, and whether it fits.
    ``whole``, ``as_asked``: its step, and what it takes, where nothing is cut for want of memory."""

    choice: Choice
    footprint: Footprint
    step: Step
    whole: Step
    as_asked: Footprint
    fits: bool


def planned(source: Source, choice: Choice, limit_bytes: int, least_rows: int) -> Planned:
    """``least_rows``: of a chunk; as many as a step has where it is not cut."""
    whole = source.step(choice)
    taken = source.footprint(choice, whole)
    least = min(least_rows, whole.rows)
    if taken.fits(limit_bytes) or whole.rows == least:
        return Planned(choice, taken, whole, whole, taken, taken.fits(limit_bytes))
    smallest = whole.with_rows(least)
    small = source.footprint(choice, smallest)
    best = Planned(choice, small, smallest, whole, taken, small.fits(limit_bytes))
    per_row = (taken.needed_bytes - small.needed_bytes) / (whole.rows - least)
    rows = least + int(max(0, limit_bytes - small.needed_bytes) / max(1.0, per_row))
    if best.fits and least < rows < whole.rows:
        larger = whole.with_rows(rows)
        more = source.footprint(choice, larger)
        best = Planned(choice, more, larger, whole, taken, True) if more.fits(limit_bytes) else best
    return best
