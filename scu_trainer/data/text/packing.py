"""Documents -> rows of at most ``block_size`` tokens.

The first label of every row, and of every isolated document, is -100: nothing before it predicts it. So the labels
other than -100 are exactly what a causal loss counts.
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
"""Values: tokens and labels, characters of texts. A batch is held in memory while it is written, and its place in the
file whenever the file is open: few batches where rows are short, small ones where they are long."""


class NumberedDocument(NamedTuple):
    """``input_ids`` and ``labels`` of shape (tokens,); ``number`` is its place among the documents of its source."""

    number: int
    input_ids: numpy.ndarray
    labels: numpy.ndarray


class Row(NamedTuple):
    """One row; arrays of shape (length,). ``documents`` are the numbers of those inside, in order."""

    input_ids: numpy.ndarray
    labels: numpy.ndarray
    position_ids: numpy.ndarray
    documents: list[int]

    @property
    def learned_tokens(self) -> int:
        return int((self.labels != NOT_LEARNED).sum())


def packed(documents: Iterable[NumberedDocument], block_size: int, isolate: bool) -> Iterator[Row]:
    """Rows of exactly ``block_size`` tokens over all documents, one after the other; the last one may be shorter."""
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
                yield _joined(segments, isolate)
                segments, room = [], block_size
    if segments:
        yield _joined(segments, isolate)


def windows(documents: Iterable[NumberedDocument], block_size: int) -> Iterator[Row]:
    """Rows of one document each. They overlap by one token: all but a document's first are predicted once."""
    for document in documents:
        for start in range(0, max(1, len(document.input_ids) - 1), block_size - 1):
            yield _joined([_segment(document, start, start + block_size)], isolate=True)


def _segment(document: NumberedDocument, start: int, end: int) -> NumberedDocument:
    return NumberedDocument(document.number, document.input_ids[start:end], document.labels[start:end])


def _joined(segments: list[NumberedDocument], isolate: bool) -> Row:
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
    """Rows with a token to learn; the others are counted. A mean loss over a row without one is not a number."""
    for row in rows:
        if row.learned_tokens:
            yield row
        else:
            statistics.drop(f"row of tokens with {NOTHING_TO_LEARN}", f"document {row.documents[0]}")


class _Cut:
    """Counts documents that do not fit into one row, and, once each, conversations and other documents of which a part
    is not learned that go on in a further row, where the answer stands without its question. Where rows are packed,
    short ones go on too."""

    def __init__(self, statistics: DataStatistics) -> None:
        self._statistics = statistics
        self._waiting: set[int] = set()

    def watched(self, documents: Iterable[NumberedDocument], block_size: int) -> Iterator[NumberedDocument]:
        for document in documents:
            self._statistics.documents_cut += len(document.input_ids) > block_size
            if (document.labels[1:] == NOT_LEARNED).any():
                self._waiting.add(document.number)
            yield document

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
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
    """Columns of the training rows, counted in ``statistics``."""
    cut = _Cut(statistics)
    documents = cut.watched(documents, settings.block_size)
    if settings.packing:
        rows = packed(documents, settings.block_size, settings.isolate_documents)
    else:
        rows = windows(documents, settings.block_size)
    for row in _learnable(cut.counted(rows), statistics):
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
    """Columns of the held-out rows, counted in ``statistics``."""
    for row in _learnable(windows(documents, settings.block_size), statistics):
        statistics.eval_rows += 1
        statistics.eval_tokens += row.learned_tokens
        columns = {"input_ids": row.input_ids, "labels": row.labels}
        yield {**columns, "length": len(row.input_ids), "document": row.documents[0]}


def training_schema(isolate: bool) -> pyarrow.Schema:
    """Arrow types of ``training_rows``."""
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    columns = {"input_ids": tokens, "labels": tokens, **({"position_ids": tokens} if isolate else {})}
    return pyarrow.schema({**columns, "length": pyarrow.int32(), "documents": pyarrow.list_(pyarrow.int32())})


def held_out_schema() -> pyarrow.Schema:
    """Arrow types of ``held_out_rows``."""
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {"input_ids": tokens, "labels": tokens, "length": pyarrow.int32(), "document": pyarrow.int32()}
    )


def record_batches(rows: Iterable[dict], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Arrow batches, of some megabytes at most unless one row is longer; arrays of integers go in without becoming
    Python lists."""
    import pyarrow

    for batch in batched(rows, _values, MOST_ROWS_PER_BATCH, MOST_VALUES_PER_BATCH):
        columns = [pyarrow.array([row[name] for row in batch], type=schema.field(name).type) for name in schema.names]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def in_memory(rows: Iterable[dict], schema: pyarrow.Schema) -> datasets.Dataset:
    import datasets
    import pyarrow

    return datasets.Dataset(pyarrow.Table.from_batches(list(record_batches(rows, schema)), schema))


def _values(row: dict) -> int:
    return sum(len(value) for value in row.values() if hasattr(value, "__len__"))
