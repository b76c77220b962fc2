"""Combine several sources into one training set.

    sources ─▶ rows of each (cached, see prepare.py) ─▶ all rows in sequence, or a selection with the given shares

The rows stay in the files of their sources. A mixture adds its own document numbers, and a list of the row numbers in
an epoch. The list depends only on settings and seed, so that a resumed run gets the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy

from scu_trainer.data.statistics import DataStatistics, set_shares
from scu_trainer.data.store import build_once, open_arrow, read_statistics, write_arrow, write_statistics
from scu_trainer.data.text import prepare as one_source
from scu_trainer.data.text.mixture_plan import (
    MixturePlan,
    mixture_plan,
    number_schema,
    prepared_mixture,
    renumbered,
    renumbered_batches,
    renumbered_in_memory,
    row_tokens,
    source_statistics,
    statistics_of,
)
from scu_trainer.data.text.mixture_stream import prepare_mixture_stream
from scu_trainer.data.text.plan import PreparedData
from scu_trainer.data.text.shares import chosen_rows, interleaved, rows_per_epoch
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings

if TYPE_CHECKING:
    import datasets


def prepare(settings: DataSettings, tokenizer, *, seed: int, cache_dir: Path, model_name: str) -> PreparedData:
    """Return the training rows and held-out rows of one dataset or of a mixture, from the cache if nothing changed.

    ``settings.chat_template`` is set as the tokenizer's template, so that it is saved with the model.
    ``model_name`` appears only in messages. Raises DataError if there is nothing to learn from, StorageError if
    ``cache_dir`` cannot be written.
    """
    of_model = (tokenizer, seed, cache_dir, model_name)
    if not settings.is_mixture:
        return one_source.prepare_plan(one_source.plan_of(settings, *of_model))
    mixture = mixture_plan(settings, *of_model)
    parts = [one_source.prepare_plan(plan) for plan in mixture.plans]
    held_out = None if mixture.held_out is None else one_source.prepare_plan(mixture.held_out)
    if settings.streaming:
        return prepare_mixture_stream(mixture, parts, held_out)
    folder = cache_dir / "mixtures" / mixture.fingerprint
    return _open(build_once(folder, lambda new: _write(new, mixture, parts, held_out)), mixture, parts, held_out)


def whole_held_out(
    settings: DataSettings, tokenizer, *, seed: int, cache_dir: Path, model_name: str
) -> Optional[datasets.Dataset]:
    """Return the documents that ``prepare`` holds out, in memory, each in one row however long it is; None if there are
    none. Columns and document numbers are those of ``PreparedData.eval``."""
    import datasets

    settings, of_model = replace(settings, block_size=one_source.WHOLE), (tokenizer, seed, cache_dir, model_name)
    if not settings.is_mixture:
        return one_source.whole_held_out_of(one_source.plan_of(settings, *of_model))
    mixture = mixture_plan(settings, *of_model)
    if mixture.held_out is not None:
        return one_source.whole_held_out_of(mixture.held_out)
    parts = [one_source.whole_held_out_of(plan) for plan in mixture.plans]
    held_out = [renumbered_in_memory(rows, source, len(parts)) for source, rows in enumerate(parts) if rows is not None]
    return datasets.concatenate_datasets(held_out) if held_out else None


# -- the rows of an epoch ----------------------------------------------------------------------------------------------


def _rows_per_source(mixture: MixturePlan, parts: Sequence[PreparedData]) -> list[int]:
    """Return how many rows of each source an epoch has. Raises DataError if a source would have none."""
    rows = [len(part.train) for part in parts]
    if mixture.shares is None:
        return rows
    counts = rows_per_epoch(rows, mixture.shares, mixture.settings.stopping_strategy)
    for name, share, count in zip(mixture.names, mixture.shares, counts, strict=True):
        if not count:
            smallest = mixture.names[rows.index(min(rows))]
            raise DataError(
                f"source {name} has no row in an epoch: {float(share):.3%} of {sum(counts):,} rows is less than one. "
                f"Give it a larger weight, stopping_strategy: all_exhausted, or more data for {smallest}, which has "
                f"{min(rows):,} rows"
            )
    return counts


def _choose_rows(mixture: MixturePlan, parts: Sequence[PreparedData], counts: Sequence[int]) -> list[numpy.ndarray]:
    """Return the row numbers that an epoch uses of each source, int64 of shape (rows of the source in an epoch,)."""
    seed = mixture.plans[0].seed
    return [
        chosen_rows(count, len(part.train), numpy.random.default_rng([seed, source]))
        for source, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]


def _epoch_order(mixture: MixturePlan, parts: Sequence[PreparedData]) -> numpy.ndarray:
    """Return the row numbers of an epoch in order, counted over the concatenated sources; int64 of shape (rows,)."""
    counts = _rows_per_source(mixture, parts)
    sources, order = interleaved(counts), numpy.empty(sum(counts), dtype=numpy.int64)
    start = 0
    for source, (part, chosen) in enumerate(zip(parts, _choose_rows(mixture, parts, counts), strict=True)):
        order[sources == source] = start + chosen
        start += len(part.train)
    return order


# -- the cache ---------------------------------------------------------------------------------------------------------


def _write(folder: Path, mixture: MixturePlan, parts: Sequence[PreparedData], held_out: Optional[PreparedData]) -> None:
    statistics = _statistics(mixture, parts, held_out)
    for source, part in enumerate(parts):
        for side, column in (("train", "documents"), ("eval", "document")):
            rows = getattr(part, side)
            if rows is not None:
                batches = renumbered_batches(rows, column, source, len(parts))
                write_arrow(folder / f"{side}-{source}.arrow", number_schema(column), batches)
    write_statistics(folder, statistics)


def _open(
    folder: Path, mixture: MixturePlan, parts: Sequence[PreparedData], held_out: Optional[PreparedData]
) -> PreparedData:
    import datasets

    train = datasets.concatenate_datasets(
        [
            renumbered(part.train, "documents", open_arrow(folder / f"train-{source}.arrow"))
            for source, part in enumerate(parts)
        ]
    )
    if mixture.shares is not None:
        train = train.select(_epoch_order(mixture, parts))
    statistics = read_statistics(folder, DataStatistics)
    held_out_statistics = None if held_out is None else held_out.statistics
    # Notes are not cached: they also describe files next to the data, as of now.
    statistics.notes = statistics_of(mixture, [part.statistics for part in parts], held_out_statistics).notes
    held_out_rows = [
        renumbered(part.eval, "document", open_arrow(folder / f"eval-{source}.arrow"))
        for source, part in enumerate(parts)
        if part.eval is not None
    ]
    return prepared_mixture(mixture, train, statistics, parts, held_out_rows, held_out)


# -- counts ------------------------------------------------------------------------------------------------------------


def _statistics(
    mixture: MixturePlan, parts: Sequence[PreparedData], held_out: Optional[PreparedData]
) -> DataStatistics:
    of_parts = [part.statistics for part in parts]
    statistics, sources = statistics_of(mixture, of_parts), source_statistics(mixture, of_parts)
    counts = _rows_per_source(mixture, parts)
    for source, part, chosen in zip(sources, parts, _choose_rows(mixture, parts, counts), strict=True):
        source.available_rows, source.rows = len(part.train), len(chosen)
        source.rows_left_out = max(0, source.available_rows - source.rows)
        source.passes = source.rows / source.available_rows
        tokens, source.supervised_tokens = _count_tokens(part, chosen)
        statistics.blocks += source.rows
        statistics.train_tokens += tokens
        statistics.supervised_tokens += source.supervised_tokens
    set_shares(sources)
    statistics.sources = [asdict(source) for source in sources]
    if held_out is not None:
        for name in ("eval_documents", "eval_rows", "eval_tokens"):
            setattr(statistics, name, getattr(held_out.statistics, name))
    statistics.heldout_duplicates = _count_duplicates(mixture, statistics)
    return statistics


def _count_tokens(part: PreparedData, chosen: numpy.ndarray) -> tuple[int, int]:
    """Return the number of tokens in the chosen training rows, and how many of them are learned."""
    if len(chosen) == len(part.train):
        return part.statistics.train_tokens, part.statistics.supervised_tokens
    times = numpy.bincount(chosen, minlength=len(part.train))
    tokens, learned = row_tokens(part.train)
    return int(times @ tokens), int(times @ learned)


def _count_duplicates(mixture: MixturePlan, statistics: DataStatistics) -> int:
    """Return how many held-out documents, of any source, are also a training document of any source. What was read of
    an ``eval_dataset`` is added to ``statistics``, because no source has counted it."""
    trained, held_out = [], []
    for documents, train_order, eval_source, eval_order in map(one_source.both_sides_uncounted, mixture.plans):
        trained.append(documents.digests[train_order])
        held_out.append(eval_source.digests[eval_order])
    if mixture.held_out is not None:
        plan = mixture.held_out
        limit = plan.settings.max_eval_documents
        held_out = [one_source.tokenized(plan, plan.source, limit, statistics).digests]
    return int(numpy.isin(numpy.concatenate(held_out), numpy.concatenate(trained)).sum())
