"""The plan of a mixture, and document numbers that are unique across its sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import numpy

from scu_trainer.data.sources import held_out_source
from scu_trainer.data.statistics import DataStatistics, SourceStatistics
from scu_trainer.data.store import digest_of
from scu_trainer.data.text.encode import NOT_LEARNED, Encoder
from scu_trainer.data.text.packing import held_out_schema, training_schema
from scu_trainer.data.text.plan import EncodingPlan, PreparedData
from scu_trainer.data.text.prepare import plan_of
from scu_trainer.settings import DataSettings
from scu_trainer.settings.mixture import SourceSettings, shares_of

if TYPE_CHECKING:
    import datasets
    import pyarrow

MIXTURE_VERSION = 1  # raise it when the same sources would give other rows
ROWS_AT_ONCE = 1024


class MixturePlan(NamedTuple):
    """``plans``: one for each of ``sources``, in order. ``held_out``: the plan of ``eval_dataset``, which replaces all
    held-out documents of the sources; None if there is no eval_dataset."""

    settings: DataSettings
    sources: tuple[SourceSettings, ...]
    plans: tuple[EncodingPlan, ...]
    held_out: Optional[EncodingPlan]

    @property
    def shares(self) -> Optional[list[Fraction]]:
        """The share of each source, or None if the sources have no weights."""
        return None if self.sources[0].weight is None else shares_of(self.sources)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def all_plans(self) -> tuple[EncodingPlan, ...]:
        return self.plans if self.held_out is None else (*self.plans, self.held_out)

    @property
    def fingerprint(self) -> str:
        plans = [plan.fingerprint for plan in self.all_plans]
        sources = [(source.name, source.weight) for source in self.sources]
        return digest_of(MIXTURE_VERSION, plans, sources, self.settings.stopping_strategy, self.plans[0].seed)


def mixture_plan(settings: DataSettings, tokenizer, seed: int, cache_dir: Path, model_name: str) -> MixturePlan:
    """Return the plan of a mixture. Raises DataError if a source cannot be found or read."""
    sources = settings.sources
    plans = [plan_of(settings.settings_of_source(source), tokenizer, seed, cache_dir, model_name) for source in sources]
    if settings.eval_dataset is None:
        return MixturePlan(settings, sources, tuple(plans), None)
    plans = [
        plan._replace(held_out=None, settings=replace(plan.settings, validation_split_percentage=0.0)) for plan in plans
    ]
    # Only its held-out rows are used, so its training rows are kept as few as possible.
    eval_settings = replace(
        settings,
        dataset=settings.eval_dataset,
        stopping_strategy="first_exhausted",
        dataset_size=settings.max_eval_documents,
    )
    source = held_out_source(settings, cache_dir)
    held_out = EncodingPlan(eval_settings, Encoder(settings, tokenizer, model_name), source, source, seed, cache_dir)
    return MixturePlan(settings, sources, tuple(plans), held_out)


def statistics_of(
    mixture: MixturePlan, parts: Sequence[DataStatistics], held_out: Optional[DataStatistics] = None
) -> DataStatistics:
    """Add up what was read, dropped and held out by the sources (``parts``, in order) and by the eval_dataset."""
    total = DataStatistics(streaming=mixture.settings.streaming)
    for name, part in zip(mixture.names, parts, strict=True):
        total.add(part)
        for count in ("documents", "eval_documents", "documents_cut", "eval_rows", "eval_tokens"):
            setattr(total, count, getattr(total, count) + getattr(part, count))
        total.notes += [f"{name}: {note}" for note in part.notes]
    if held_out is not None:
        total.add(held_out)
        for count in ("eval_documents", "eval_rows", "eval_tokens"):
            setattr(total, count, getattr(held_out, count))
        total.notes += dict.fromkeys(held_out.notes)  # its plan has the same source twice, so notes come twice
    return total


def source_statistics(mixture: MixturePlan, parts: Sequence[DataStatistics]) -> list[SourceStatistics]:
    """Return the counts of each source, without those that depend on the rows of an epoch."""
    shares = mixture.shares or [None] * len(mixture.sources)
    return [
        SourceStatistics(
            source.name,
            source.dataset,
            rows_read=part.rows_read,
            rows_dropped=sum(part.rows_dropped.values()),
            documents=part.documents,
            eval_documents=part.eval_documents,
            asked_share=None if share is None else float(share),
        )
        for source, part, share in zip(mixture.sources, parts, shares, strict=True)
    ]


# -- numbers of documents ----------------------------------------------------------------------------------------------


def number_in_mixture(document: int, source: int, count: int) -> int:
    """Return the number in the mixture of the document ``document`` of source ``source``, one of ``count``."""
    return document * count + source


def rows_of_others(held_out: datasets.Dataset, source: int, count: int) -> Optional[datasets.Dataset]:
    """Return the held-out rows of all sources but ``source``; None if there are none."""
    left = numpy.flatnonzero(numpy.asarray(held_out["document"]) % count != source)
    return held_out.select(left) if len(left) else None


def prepared_mixture(
    mixture: MixturePlan,
    train: Union[datasets.Dataset, datasets.IterableDataset],
    statistics: DataStatistics,
    parts: Sequence[PreparedData],
    held_out_rows: Sequence[datasets.Dataset],
    held_out: Optional[PreparedData],
) -> PreparedData:
    """``held_out_rows``: of the sources, renumbered. ``held_out``: of the eval_dataset, which replaces them."""
    import datasets

    if held_out is not None:
        return PreparedData(train, held_out.eval, statistics, mixture.fingerprint, held_out.eval_documents)
    described = tuple(
        item._replace(document=number_in_mixture(item.document, source, len(parts)))
        for source, part in enumerate(parts)
        for item in part.eval_documents
    )
    rows = datasets.concatenate_datasets(list(held_out_rows)) if held_out_rows else None
    return PreparedData(train, rows, statistics, mixture.fingerprint, described, sources=mixture.names)


def number_schema(column: str) -> pyarrow.Schema:
    """Return the schema of only ``documents`` (of training rows) or ``document`` (of held-out rows)."""
    import pyarrow

    rows = training_schema(isolate=False) if column == "documents" else held_out_schema()
    return pyarrow.schema([rows.field(column)])


def renumbered_batches(rows: datasets.Dataset, column: str, source: int, count: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield ``column`` of the rows of one source, with the document numbers of the mixture."""
    import pyarrow
    import pyarrow.compute

    schema = number_schema(column)
    for table in rows.select_columns([column]).with_format("arrow").iter(ROWS_AT_ONCE):
        values = table[column].combine_chunks()
        if column == "documents":
            starts = pyarrow.compute.subtract(values.offsets, values.offsets[0])
            values = pyarrow.ListArray.from_arrays(starts, _numbers_in_mixture(values.flatten(), source, count))
        else:
            values = _numbers_in_mixture(values, source, count)
        yield pyarrow.RecordBatch.from_arrays([values], schema=schema)


def _numbers_in_mixture(values: pyarrow.Array, source: int, count: int) -> pyarrow.Array:
    """Return ``number_in_mixture`` of each value as int32. Arrow raises an error if a number does not fit."""
    import pyarrow
    import pyarrow.compute

    wide = values.cast(pyarrow.int64())
    return pyarrow.compute.add(pyarrow.compute.multiply(wide, count), source).cast(pyarrow.int32())


def renumbered(rows: datasets.Dataset, column: str, new: datasets.Dataset) -> datasets.Dataset:
    """Return the same rows with ``new`` instead of ``column``, without copying them."""
    import datasets

    return datasets.concatenate_datasets([rows.remove_columns([column]), new], axis=1)


def renumbered_in_memory(rows: datasets.Dataset, source: int, count: int) -> datasets.Dataset:
    """Return held-out rows with the document numbers of the mixture."""
    import datasets
    import pyarrow

    table = pyarrow.Table.from_batches(
        list(renumbered_batches(rows, "document", source, count)), number_schema("document")
    )
    return renumbered(rows, "document", datasets.Dataset(table))


def row_tokens(rows: datasets.Dataset) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return how many tokens each row has, and how many are learned; int64 of shape (rows,). No row may be empty."""
    tokens, learned = [numpy.zeros(0, dtype=numpy.int64)], [numpy.zeros(0, dtype=numpy.int64)]
    for table in rows.select_columns(["labels"]).with_format("arrow").iter(ROWS_AT_ONCE):
        labels = table["labels"].combine_chunks()
        borders = numpy.asarray(labels.offsets).astype(numpy.int64)
        is_learned = labels.flatten().to_numpy() != NOT_LEARNED
        tokens.append(numpy.diff(borders))
        learned.append(numpy.add.reduceat(is_learned, borders[:-1] - borders[0], dtype=numpy.int64))
    return numpy.concatenate(tokens), numpy.concatenate(learned)
