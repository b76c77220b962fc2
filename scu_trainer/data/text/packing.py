"""Cut and pack documents into rows of at most ``block_size`` tokens.

The first label of every row, and of every isolated document, is -100, because no token before it predicts it. So a
causal loss counts exactly the labels other than -100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy

from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.text.encode import NOT_LEARNED, NOTHING_TO_LEARN, batched
from scu_trainer.settings import DataSettings

if TYPE_CHECKING:
    import datasets
    import pyarrow

MOST_ROWS_PER_BATCH, MOST_VALUES_PER_BATCH = 8192, 2**21
"""Limits of an Arrow batch. Values are tokens, labels, and characters of texts. A batch is in memory while it is
written, and its offset while the file is open: short rows need few batches, long rows small ones."""


class NumberedDocument(NamedTuple):
    """A document with ``input_ids`` and ``labels`` of shape (tokens,). ``number``: its index in its source."""

    number: int
    input_ids: numpy.ndarray
    labels: numpy.ndarray


class Row(NamedTuple):
    """One row, with arrays of shape (length,). ``documents``: numbers of the documents in it, in order."""

    input_ids: numpy.ndarray
    labels: numpy.ndarray
    position_ids: numpy.ndarray
    documents: list[int]

    @property
    def learned_tokens(self) -> int:
        return int((self.labels != NOT_LEARNED).sum())


def packed(documents: Iterable[NumberedDocument], block_size: int, isolate: bool) -> Iterator[Row]:
    """Yield rows of exactly ``block_size`` tokens, cut from the concatenated documents. The last may be shorter."""
    segments: list[NumberedDocument] = []
    room = block_size
    for document in documents:
        start = 0
        while start < len(document.input_ids):
            end = min(start + room, len(document.input_ids))
            segments.append(_segment(document, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield _join(segments, isolate)
                segments, room = [], block_size
    if segments:
        yield _join(segments, isolate)


def windows(documents: Iterable[NumberedDocument], block_size: int) -> Iterator[Row]:
    """Yield rows of one document each. They overlap by one token: each token but the first is predicted once."""
    for document in documents:
        for start in range(0, max(1, len(document.input_ids) - 1), block_size - 1):
            yield _join([_segment(document, start, start + block_size)], isolate=True)


def _segment(document: NumberedDocument, start: int, end: int) -> NumberedDocument:
    return NumberedDocument(document.number, document.input_ids[start:end], document.labels[start:end])


def _join(segments: list[NumberedDocument], isolate: bool) -> Row:
    """Concatenate segments, and mask the first label of the row or, with ``isolate``, of every segment."""
    labels = numpy.concatenate([segment.labels for segment in segments])
    lengths = [len(segment.input_ids) for segment in segments]
    starts = numpy.cumsum([0, *lengths[:-1]])
    labels[starts if isolate else 0] = NOT_LEARNED
    positions = numpy.concatenate([numpy.arange(length, dtype=numpy.int32) for length in lengths])
    return Row(
        numpy.concatenate([segment.input_ids for segment in segments]),
        labels,
        positions,
        [segment.number for segment in segments],
    )


def _learnable(rows: Iterable[Row], statistics: DataStatistics) -> Iterator[Row]:
    """Yield the rows that have a token to learn, and count the others as dropped: their mean loss would be NaN."""
    for row in rows:
        if row.learned_tokens:
            yield row
        else:
            statistics.drop(f"row of tokens with {NOTHING_TO_LEARN}", f"document {row.documents[0]}")


class _CutCounter:
    """Counts documents that do not fit into one row and, once each, conversations and other documents with tokens that
    are not learned, if an answer continues in a row without its question. With packing, short ones may do so too."""

    def __init__(self, statistics: DataStatistics) -> None:
        self._statistics = statistics
        self._waiting: set[int] = set()

    def watch_documents(self, documents: Iterable[NumberedDocument], block_size: int) -> Iterator[NumberedDocument]:
        """Yield ``documents``, count those longer than a row, and remember those with tokens that are not learned."""
        for document in documents:
            self._statistics.documents_cut += len(document.input_ids) > block_size
            if (document.labels[1:] == NOT_LEARNED).any():
                self._waiting.add(document.number)
            yield document

    def count_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield ``rows``, and count documents that continue in a row without their question."""
        last = None
        for row in rows:
            first = row.documents[0]
            if first == last and first in self._waiting and row.learned_tokens:
                self._statistics.answers_cut += 1
                self._waiting.discard(first)
            last = row.documents[-1]
            self._waiting &= {last}
            yield row


def training_rows(
    documents: Iterable[NumberedDocument], settings: DataSettings, statistics: DataStatistics
) -> Iterator[dict]:
    """Yield the columns of each training row, and count the rows in ``statistics``."""
    cut = _CutCounter(statistics)
    documents = cut.watch_documents(documents, settings.block_size)
    if settings.packing:
        rows = packed(documents, settings.block_size, settings.isolate_documents)
    else:
        rows = windows(documents, settings.block_size)
    for row in _learnable(cut.count_rows(rows), statistics):
        statistics.blocks += 1
        statistics.train_tokens += len(row.input_ids)
        statistics.supervised_tokens += row.learned_tokens
        columns = {"input_ids": row.input_ids, "labels": row.labels}
        if settings.isolate_documents:
            columns["position_ids"] = row.position_ids
        yield {**columns, "length": len(row.input_ids), "documents": row.documents}


def held_out_rows(
    documents: Iterable[NumberedDocument], settings: DataSettings, statistics: DataStatistics
) -> Iterator[dict]:
    """Yield the columns of each held-out row, and count the rows in ``statistics``."""
    for row in _learnable(windows(documents, settings.block_size), statistics):
        statistics.eval_rows += 1
        statistics.eval_tokens += row.learned_tokens
        columns = {"input_ids": row.input_ids, "labels": row.labels}
        yield {**columns, "length": len(row.input_ids), "document": row.documents[0]}


def training_schema(isolate: bool) -> pyarrow.Schema:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    columns = {"input_ids": tokens, "labels": tokens, **({"position_ids": tokens} if isolate else {})}
    return pyarrow.schema({**columns, "length": pyarrow.int32(), "documents": pyarrow.list_(pyarrow.int32())})


def held_out_schema() -> pyarrow.Schema:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {"input_ids": tokens, "labels": tokens, "length": pyarrow.int32(), "document": pyarrow.int32()}
    )


def record_batches(rows: Iterable[dict], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Yield Arrow batches of some megabytes at most, unless one row is longer, without making lists of the arrays."""
    import pyarrow

    for batch in batched(rows, _count_values, MOST_ROWS_PER_BATCH, MOST_VALUES_PER_BATCH):
        columns = [pyarrow.array([row[name] for row in batch], type=schema.field(name).type) for name in schema.names]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def in_memory(rows: Iterable[dict], schema: pyarrow.Schema) -> datasets.Dataset:
    import datasets
    import pyarrow

    return datasets.Dataset(pyarrow.Table.from_batches(list(record_batches(rows, schema)), schema))


def _count_values(row: dict) -> int:
    return sum(len(value) for value in row.values() if hasattr(value, "__len__"))
