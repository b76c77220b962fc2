"""Run the rows of a failed step once more, in parts. Random state and buffers stay as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.train.loss.analysis import mixing_modules
from scu_trainer.train.loss.analysis.no_trace import without_logging
from scu_trainer.train.loss.loss_path import without_sample_index
from scu_trainer.train.loss.rows.model_loss import changing_objects_of
from scu_trainer.train.step.batches.rows import pick, rows_of
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers, WindowSnapshot

SHARDED = "the weights are sharded, and the search would need all ranks at once"
"""Reason why rows cannot run again."""

MOST_RUNS = 32
"""Maximum number of parts into which the rows of a step are cut; each runs forward once and backward at most once."""


@dataclass(frozen=True)
class RowSubset:
    """Some rows of an accumulation batch with number ``batch`` and inputs ``whole``. ``rows``: their numbers in it."""

    batch: int
    rows: tuple[int, ...]
    inputs: Any
    whole: Any


def step_parts(trainer: Trainer, batches: Sequence[Any], most: int = MOST_RUNS) -> Iterator[RowSubset]:
    """Yield about ``most`` parts of this rank's ``batches``; a batch with rows that affect each other stays whole."""
    counts = [rows_of(trainer.model, inputs).rows for inputs in batches]
    per_part = max(1, -(-sum(counts) // max(1, most - len(batches))))
    if mixing_modules(trainer.model):
        per_part = max(1, *counts)  # a single row would be another computation
    for number, (inputs, count) in enumerate(zip(batches, counts, strict=True)):
        if not count:
            yield RowSubset(number, (), inputs, inputs)
        for start in range(0, count, per_part):
            rows = tuple(range(start, min(start + per_part, count)))
            yield RowSubset(number, rows, pick(inputs, torch.tensor(rows), count), inputs)


def row_names(trainer: Trainer, inputs: Any, number: int, rows: Sequence[int]) -> tuple[str, ...]:
    """Return how messages name these rows: by sample number; rows that a loop has added have none."""
    samples = inputs.get(SAMPLE_INDEX)
    numbers = [-1 if samples is None else int(samples[row]) for row in rows]
    return tuple(
        f"row {row} of accumulation batch {number}" if sample < 0 else _sample_name(trainer.train_dataset, sample)
        for row, sample in zip(rows, numbers, strict=True)
    )


def _sample_name(dataset: Any, index: int) -> str:
    row = dataset[index]
    documents = row.get("documents") if isinstance(row, Mapping) else None
    if documents is None:
        return f"sample {index}"
    listed = documents.tolist() if torch.is_tensor(documents) else documents
    return f"sample {index} (documents {listed})"


def describe_rerun_failure(error: Exception) -> str:
    """Return a phrase for messages: the model raised ``error`` when rows ran again. Frees what its traceback holds."""
    first_line = str(error).partition("\n")[0]
    forget_traceback(error)
    return f"running its rows again failed ({type(error).__name__}: {first_line})"


@contextlib.contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """Restore random state, changing buffers and counters of the loss on exit, and log nothing inside."""
    model = trainer.model
    devices = list({trainer.args.device, *(p.device for p in model.parameters())})
    snapshot = WindowSnapshot(devices, ChangingBuffers(model), (), changing_objects_of(trainer)())
    try:
        with without_logging(trainer):
            yield
    finally:
        snapshot.restore_surroundings()


def loss_of(trainer: Trainer, part: RowSubset, num_items: Any) -> torch.Tensor:
    """Return the loss as training computes it, but without reporting the losses of rows."""
    inputs = trainer._prepare_inputs(without_sample_index(part.inputs))
    with trainer.compute_loss_context_manager():
        if trainer.loss_path is not None:
            return trainer._stock_loss(trainer.model, inputs, False, num_items)
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=num_items)
