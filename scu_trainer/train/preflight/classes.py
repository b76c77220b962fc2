"""Checks of class labels and text categories (out of range, unbalanced, nearly unique), and of constant inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from scu_trainer.data.samples import PreparedSamples
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

LABELS_OUT_OF_RANGE = Check(
    "labels-out-of-range",
    "error",
    "a label is negative or not below the number of classes of the model, so the loss would fail",
    "use a model with as many classes as the data, or data with the classes of the model",
)
LOPSIDED = Check(
    "classes-lopsided",
    "warning",
    "one class makes up nine tenths of the training samples or more: a model that always predicts it has that accuracy",
    "balance the classes, and compare the accuracy with the share of the largest class",
)
ONE_OF_A_KIND = Check(
    "labels-nearly-unique",
    "warning",
    "there are nearly as many classes as training samples: the column is probably an id",
    "set label_column_name or category_column to the column of the classes",
)
CONSTANT_INPUTS = Check(
    "inputs-constant",
    "warning",
    "nearly all inputs of one kind are constant (black images, dead sensors), so there is nothing to learn from",
    "look at the files; images that were scaled to 0..1 and then saved as whole numbers are black",
)

LARGEST_SHARE, UNIQUE_SHARE, CONSTANT_SHARE = 0.9, 0.5, 0.9
FEWEST_SAMPLES = 20
SAMPLES_LOOKED_AT = 64
DARKEST = 2
"""Largest range of values, out of 255, of an image that counts as constant: scaling an image to 0..1 and casting it to
whole numbers leaves values of 0 and 1."""


def before_training(job: Job, parts: TrainingComponents) -> Iterator[Finding]:
    data = parts.data
    if isinstance(data, PreparedSamples):
        yield from _check_label_range(parts)
        yield from _check_balance(data.statistics.per_class, "dataset")
        yield from _check_inputs(data.train)
    else:
        yield from _check_balance(getattr(data.statistics, "per_category", {}), "category_column")


def _check_label_range(parts: TrainingComponents) -> Iterator[Finding]:
    classes = getattr(parts.model.config, "num_labels", None)
    if classes is None:
        return
    for name, rows in (("training", parts.data.train), ("held-out", parts.data.eval)):
        labels = numpy.zeros(0, dtype=int) if rows is None else rows.labels
        wrong = numpy.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            what = f"{len(wrong):,} {name} labels such as {labels[wrong[0]]}; the model has classes 0 to {classes - 1}"
            yield LABELS_OUT_OF_RANGE.found(what, "dataset, model_name_or_path")


def _check_balance(counts: Mapping[str, int], where: str) -> Iterator[Finding]:
    total = sum(counts.values())
    if total < FEWEST_SAMPLES or len(counts) < 2:
        return
    largest = max(counts, key=counts.__getitem__)
    if counts[largest] / total >= LARGEST_SHARE:
        what = f"{counts[largest]:,} of {total:,} training samples are {largest!r} ({percent(counts[largest] / total)})"
        yield LOPSIDED.found(what, where)
    if len(counts) >= UNIQUE_SHARE * total:
        yield ONE_OF_A_KIND.found(f"{len(counts):,} classes in {total:,} training samples", where)


def _check_inputs(rows: Any) -> Iterator[Finding]:
    numbers = numpy.linspace(0, len(rows) - 1, min(len(rows), SAMPLES_LOOKED_AT), dtype=int)
    constant_flags: dict[str, list[bool]] = {}
    for number in numpy.unique(numbers):
        for name, value in rows[int(number)].items():
            if isinstance(value, numpy.ndarray) and value.size:
                constant_flags.setdefault(name, []).append(_is_constant(value))
    for name, flags in constant_flags.items():
        share = sum(flags) / len(flags)
        if len(flags) >= FEWEST_SAMPLES and share >= CONSTANT_SHARE:
            what = f"{percent(share)} of {len(flags)} {name} in a sample are constant"
            yield CONSTANT_INPUTS.found(what, f"dataset, {name}")


def _is_constant(value: numpy.ndarray) -> bool:
    if value.dtype == numpy.uint8:
        return int(value.max()) - int(value.min()) <= DARKEST
    return bool(value.min() == value.max())
