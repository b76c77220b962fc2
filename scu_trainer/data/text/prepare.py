"""Prepare the training rows and held-out rows of one source.

    source ─▶ tokenized documents (cached: source, tokenizer, rules) ─▶ split by document ─▶ rows (cached: all settings)

Tokenized documents and rows are cached separately, so that another seed or block size does not tokenize again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional, TypeVar

import numpy

from scu_trainer.data.sources import Source, held_out_source, training_source
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import build_once, open_arrow, read_statistics, reading_cache, write_arrow, write_statistics
from scu_trainer.data.text.chat import read_chat_template, spelled_markers, unstable_prompt_end
from scu_trainer.data.text.documents import TokenizedDocuments, tokenized_documents
from scu_trainer.data.text.encode import Encoder
from scu_trainer.data.text.packing import (
    held_out_rows,
    held_out_schema,
    in_memory,
    record_batches,
    training_rows,
    training_schema,
)
from scu_trainer.data.text.plan import EncodingPlan, HeldOutDocument, PreparedData
from scu_trainer.data.text.stream import prepare_stream
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.data import CHAT_TEMPLATES

if TYPE_CHECKING:
    import datasets

Documents = TypeVar("Documents")

WHOLE = 2**31 - 1
"""A block size that no document exceeds, so that each document is one row."""


def prepare_plan(plan: EncodingPlan) -> PreparedData:
    """Return the training rows and held-out rows of one source, from the cache if nothing changed. Raises DataError if
    there is nothing to learn from, StorageError if ``cache_dir`` cannot be written."""
    if plan.settings.streaming:
        return prepare_stream(plan)
    folder = build_once(plan.cache_dir / "tokenized" / plan.fingerprint, lambda new: _write(new, plan))
    prepared = _open(folder)
    prepared.statistics.notes[:0] = plan.notes  # not cached: they also describe files next to the data, as of now
    return prepared


def whole_held_out_of(plan: EncodingPlan) -> Optional[datasets.Dataset]:
    """Return the held-out documents of a plan with block_size WHOLE, one per row, in memory; None if there are none."""
    if plan.settings.streaming:
        return prepare_stream(plan).eval
    _, _, documents, order = both_sides_uncounted(plan)
    rows = in_memory(held_out_rows(documents.numbered(order), plan.settings, DataStatistics()), held_out_schema())
    return rows if len(rows) else None


def plan_of(settings: DataSettings, tokenizer, seed: int, cache_dir: Path, model_name: str) -> EncodingPlan:
    """Plan one source, and set the tokenizer's template to ``settings.chat_template``, if given. Raises DataError if
    the source cannot be found or read."""
    source = training_source(settings, cache_dir)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
        source = replace(source, notes=(*source.notes, *_template_notes(tokenizer, settings.chat_template)))
    held_out = held_out_source(settings, cache_dir) if settings.eval_dataset else source.held_out
    return EncodingPlan(settings, Encoder(settings, tokenizer, model_name), source, held_out, seed, cache_dir)


def _template_notes(tokenizer, template: str) -> Iterator[str]:
    if spelled := spelled_markers(tokenizer, template) if template in CHAT_TEMPLATES else []:
        yield (
            f"chat_template {template}: this tokenizer has no token for {', '.join(spelled)} and splits "
            f"{'it' if len(spelled) == 1 else 'them'} into several; that is learned too, but takes more tokens"
        )
    if end := unstable_prompt_end(tokenizer):
        yield (
            f"chat_template {template}: this tokenizer makes different tokens of {end!r} at the end of a prompt than "
            "before an answer, so the prompt at inference differs from the one in training; give a template whose "
            "prompt ends in a marker or a single line break, such as chatml"
        )


def _open(folder: Path) -> PreparedData:
    with reading_cache(folder):
        documents = tuple(HeldOutDocument(*item) for item in json.loads((folder / "eval_documents.json").read_text()))
    held_out = open_arrow(folder / "eval.arrow") if documents else None
    statistics = read_statistics(folder, DataStatistics)
    return PreparedData(open_arrow(folder / "train.arrow"), held_out, statistics, folder.name, documents)


def _write(folder: Path, plan: EncodingPlan) -> None:
    settings = plan.settings
    statistics = DataStatistics()
    read = functools.partial(tokenized, plan, statistics=statistics)
    documents, train_order, eval_source, eval_order = both_sides(plan, read, statistics)
    _write_training_rows(folder, documents, train_order, plan, statistics)
    _write_held_out_rows(folder, eval_source, eval_order, settings, statistics)
    write_statistics(folder, statistics)


def both_sides(
    plan: EncodingPlan, read: Callable[[Source, int | None], Documents], statistics: DataStatistics
) -> tuple[Documents, numpy.ndarray, Documents, numpy.ndarray]:
    """Return (training documents, their order, held-out documents, their order), and count them in ``statistics``.
    ``read(source, limit)``: returns documents with a length and ``digests``. ``plan``: only its settings, source,
    held_out and seed are used."""
    documents = eval_source = read(plan.source, plan.settings.dataset_size)
    train_order, eval_order = split(len(documents), plan, statistics)
    if plan.held_out:
        eval_source = read(plan.held_out, plan.settings.max_eval_documents)
        eval_order = numpy.arange(len(eval_source))
    statistics.documents, statistics.eval_documents = len(train_order), len(eval_order)
    statistics.heldout_duplicates = int(
        numpy.isin(eval_source.digests[eval_order], documents.digests[train_order]).sum()
    )
    return documents, train_order, eval_source, eval_order


def both_sides_uncounted(
    plan: EncodingPlan,
) -> tuple[TokenizedDocuments, numpy.ndarray, TokenizedDocuments, numpy.ndarray]:
    """Return ``both_sides`` again without counting, after ``prepare_plan`` has counted them."""
    uncounted = DataStatistics()
    return both_sides(plan, functools.partial(tokenized, plan, statistics=uncounted), uncounted)


def tokenized(plan: EncodingPlan, source: Source, limit: int | None, statistics: DataStatistics) -> TokenizedDocuments:
    """Return the first ``limit`` documents of ``source``, counted in ``statistics``. Raises DataError if none exist."""
    workers = plan.settings.preprocessing_num_workers
    documents = tokenized_documents(source, plan.encoder, limit, plan.cache_dir, workers)
    statistics.add(documents.statistics)
    if not len(documents):
        raise DataError(
            f"{source.name} has no document to learn from. {documents.statistics.rows_read:,} rows read, dropped: "
            f"{documents.statistics.describe_dropped()}. Check text_column, or completion_only_loss and "
            "assistant_only_loss if the rows hold prompts only"
        )
    column, formats = plan.encoder.columns.system, documents.statistics.formats
    if column is not None and not any(f", {column}," in f"{name},".replace(")", ",") for name in formats):
        rows_read = documents.statistics.rows_read
        statistics.notes.append(
            f"system_column {column!r} was not read in any of the {rows_read:,} rows of {source.name}"
        )
    return documents


def split(count: int, plan: EncodingPlan, statistics: DataStatistics) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the numbers of the training documents, in random order, and of the held-out documents, ascending."""
    order = numpy.random.default_rng(plan.seed).permutation(count)
    percentage = plan.settings.validation_split_percentage
    if plan.held_out or percentage == 0:
        return order, order[:0]
    if count < 2:
        statistics.notes.append(
            "nothing is held out: there is only one document; give an eval_dataset to measure progress"
        )
        return order, order[:0]
    held_out = min(max(1, round(count * percentage / 100)), count - 1, plan.settings.max_eval_documents or count)
    return order[held_out:], numpy.sort(order[:held_out])


def _write_training_rows(
    folder: Path, documents: TokenizedDocuments, order: numpy.ndarray, plan: EncodingPlan, statistics: DataStatistics
) -> None:
    settings = plan.settings
    rows = training_rows(documents.numbered(order), settings, statistics)
    schema = training_schema(settings.isolate_documents)
    write_arrow(folder / "train.arrow", schema, record_batches(rows, schema))
    if not statistics.supervised_tokens:
        raise DataError(
            f"no training row of {plan.source.name} has a token to learn; dropped: {statistics.describe_dropped()}. "
            "Raise block_size, or set completion_only_loss or assistant_only_loss to false"
        )


def _write_held_out_rows(
    folder: Path,
    documents: TokenizedDocuments,
    order: numpy.ndarray,
    settings: DataSettings,
    statistics: DataStatistics,
) -> None:
    if len(order):
        schema = held_out_schema()
        rows = held_out_rows(documents.numbered(order), settings, statistics)
        write_arrow(folder / "eval.arrow", schema, record_batches(rows, schema))
    described = [HeldOutDocument(*item) for item in documents.described(order)]
    (folder / "eval_documents.json").write_text(json.dumps(described))
