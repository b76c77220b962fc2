"""Tokenized documents of one source, cached and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from scu_trainer.data.sources import Source
from scu_trainer.data.statistics import DataStatistics, add_counts
from scu_trainer.data.store import build_once, digest_of, open_arrow, read_statistics, write_arrow, write_statistics
from scu_trainer.data.text.encode import UNREADABLE, Document, Dropped, Encoder, Reading, encode_records
from scu_trainer.data.text.packing import NumberedDocument, record_batches
from scu_trainer.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

DOCUMENTS_VERSION = 11  # raise it when the same text would give other documents
DOCUMENTS_PER_READ = 64


class StoredDocuments:
    """Stored documents, accessed by number, with the statistics of how they were read."""

    def __init__(self, rows: datasets.Dataset, statistics: DataStatistics) -> None:
        self._rows = rows.with_format("arrow")
        self.statistics = statistics

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def digests(self) -> numpy.ndarray:
        """int64 of shape (documents,); equal for documents with the same content."""
        return self._rows.select_columns("digest")[:]["digest"].to_numpy()


class TokenizedDocuments(StoredDocuments):
    """Tokenized documents; ``digests`` are digests of the tokens."""

    def numbered(self, order: numpy.ndarray) -> Iterator[NumberedDocument]:
        """Yield the documents in the given order. Only a few are in memory."""
        for start in range(0, len(order), DOCUMENTS_PER_READ):
            numbers = order[start : start + DOCUMENTS_PER_READ]
            table = self._rows[numbers]
            for number, ids, labels in zip(numbers, table["input_ids"], table["labels"], strict=True):
                yield NumberedDocument(int(number), ids.values.to_numpy(), labels.values.to_numpy())

    def described(self, order: numpy.ndarray) -> Iterator[tuple[int, str, int, int]]:
        """Yield number, name, token count and UTF-8 bytes of each document in ``order``."""
        if not len(order):
            return
        columns = ["name", "tokens", "utf8_bytes"]
        for number, row in zip(order, self._rows.select_columns(columns)[order].to_pylist(), strict=True):
            yield int(number), *(row[column] for column in columns)


def tokenized_documents(
    source: Source, encoder: Encoder, limit: int | None, cache_dir: Path, processes: int
) -> TokenizedDocuments:
    """Return the first ``limit`` usable documents of a source (all if None), from the cache if nothing changed."""

    def write(folder: Path) -> None:
        statistics = DataStatistics()
        documents = usable_documents(source, encoder, limit, processes, statistics)
        write_arrow(folder / "documents.arrow", _schema(), record_batches(map(_as_row, documents), _schema()))
        write_statistics(folder, statistics)

    name = digest_of(DOCUMENTS_VERSION, source.identity, encoder.identity, limit)
    folder = build_once(cache_dir / "documents" / name, write)
    return TokenizedDocuments(open_arrow(folder / "documents.arrow"), read_statistics(folder, DataStatistics))


def usable_documents(
    source: Source, encoder: Encoder, limit: int | None, processes: int, statistics: DataStatistics
) -> Iterator[Document]:
    """Yield documents in the order of the source, and count the rows read and dropped in ``statistics``. Raises
    DataError at the first unreadable row unless ``skip_bad_rows`` is set, and for a source without rows."""
    from tqdm.auto import tqdm

    results = encode_records(source.read(), encoder, processes)
    with_bar = tqdm(results, desc=f"tokenizing {source.name}", unit=" rows", delay=2, disable=None, leave=False)
    yield from islice(_usable(with_bar, encoder.settings.skip_bad_rows, statistics), limit)
    if not statistics.rows_read and limit != 0:
        raise DataError(f"{source.name} is empty: it has no rows")
    statistics.columns_not_used.update(dict.fromkeys(source.columns_not_read, statistics.rows_read))


def _usable(results: Iterable[Document | Dropped], skip_bad: bool, statistics: DataStatistics) -> Iterator[Document]:
    """Yield the documents, and count all rows. Raises DataError at an unreadable row that must not be skipped."""
    for result in results:
        statistics.rows_read += 1
        if isinstance(result, Document):
            _count_reading(result, result.read, statistics)
            yield result
        elif result.reason == UNREADABLE and not skip_bad:
            raise DataError(f"{result.example}. Repair the row, or count and skip such rows with --skip_bad_rows true")
        else:
            statistics.drop(result.reason, result.example)


def _count_reading(document: Document, read: Reading, statistics: DataStatistics) -> None:
    add_counts(statistics.formats, {read.format: 1})
    add_counts(statistics.columns_not_used, dict.fromkeys(read.not_used, 1))
    add_counts(statistics.rendered_away, dict.fromkeys(read.rendered_away, 1))
    statistics.empty_answers += read.empty_answers
    for role in read.unknown_roles:
        add_counts(statistics.roles_not_known, {role: 1})
        statistics.role_places.setdefault(role, document.name)


def _schema() -> pyarrow.Schema:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {
            "input_ids": tokens,
            "labels": tokens,
            "tokens": pyarrow.int32(),
            "digest": pyarrow.int64(),
            "name": pyarrow.string(),
            "utf8_bytes": pyarrow.int64(),
        }
    )


def _as_row(document: Document) -> dict:
    return {**document._asdict(), "tokens": len(document.input_ids), "digest": document.digest}
