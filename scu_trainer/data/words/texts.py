"""Read texts with their categories one at a time, and store them in a memory-mapped file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy
import xxhash

from scu_trainer.data.records import BadRow, Record
from scu_trainer.data.sources import Source
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import build_once, digest_of, open_arrow, read_statistics, write_arrow, write_statistics
from scu_trainer.data.text.documents import StoredDocuments
from scu_trainer.data.text.encode import EMPTY, UNREADABLE, batched
from scu_trainer.data.text.packing import record_batches
from scu_trainer.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pyarrow

TEXTS_VERSION = 1  # raise it when the same rows would give other texts
TEXTS_PER_READ = 64
BATCH_CHARACTERS = 2**20  # texts take more memory than their tokens, and Arrow keeps a batch until it is written


class TextColumns(NamedTuple):
    """Names of the columns. ``category`` is None if texts have no category."""

    text: str
    category: Optional[str]


class LabelledText(NamedTuple):
    """A text with its category, or None if the row has none. ``name``: its place in the source."""

    text: str
    category: Optional[str]
    name: str


class Texts(StoredDocuments):
    def category_counts(self, numbers: numpy.ndarray) -> dict[Optional[str], int]:
        """Return the number of texts of each category, among the texts with these numbers."""
        categories = self._rows.select_columns("category")[:]["category"].take(numbers)
        return {count["values"]: count["counts"] for count in categories.value_counts().to_pylist()}

    def batches(self, order: numpy.ndarray) -> Iterator[list[tuple[int, LabelledText]]]:
        """Yield lists of (number, text) in the given order. Only a few texts are in memory."""
        for start in range(0, len(order), TEXTS_PER_READ):
            numbers = order[start : start + TEXTS_PER_READ]
            table = self._rows[numbers].select(LabelledText._fields)
            yield [(int(n), LabelledText(**row)) for n, row in zip(numbers, table.to_pylist(), strict=True)]


def stored_texts(
    source: Source, columns: TextColumns, skip_bad_rows: bool, limit: int | None, cache_dir: Path
) -> Texts:
    """Return the first ``limit`` usable texts of a source (all if None), from the cache if nothing changed. Raises
    DataError at the first row that cannot be used unless ``skip_bad_rows`` is set, and if no text is left."""

    def write(folder: Path) -> None:
        statistics = DataStatistics()
        texts = islice(_usable(source.read(), columns, skip_bad_rows, statistics), limit)
        write_arrow(folder / "texts.arrow", _schema(), _batches(texts))
        write_statistics(folder, statistics)

    name = digest_of(TEXTS_VERSION, source.identity, columns, skip_bad_rows, limit)
    folder = build_once(cache_dir / "texts" / name, write)
    texts = Texts(open_arrow(folder / "texts.arrow"), read_statistics(folder, DataStatistics))
    if not len(texts):
        raise DataError(
            f"{source.name} has no text to learn from. {texts.statistics.rows_read:,} rows read, dropped: "
            f"{texts.statistics.describe_dropped()}. Check text_column and category_column"
        )
    return texts


def _usable(
    records: Iterable[Record], columns: TextColumns, skip_bad_rows: bool, statistics: DataStatistics
) -> Iterator[LabelledText]:
    for record in records:
        statistics.rows_read += 1
        try:
            text = _labelled_text(record, columns)
        except BadRow as error:
            if not skip_bad_rows:
                raise DataError(
                    f"{record.place}: {error}. Repair the row, or count and skip such rows with --skip_bad_rows true"
                ) from None
            statistics.drop(UNREADABLE, f"{record.place}: {error}")
            continue
        if text.text.strip():
            yield text
        else:
            statistics.drop(EMPTY, record.place)


def _labelled_text(record: Record, columns: TextColumns) -> LabelledText:
    if record.problem:
        raise BadRow(record.problem)
    text = _value_of(record.value, columns.text, "text_column", "")
    if not isinstance(text, str):
        raise BadRow(f"column {columns.text!r} holds {type(text).__name__}, not text")
    return LabelledText(text, _category_of(record.value, columns.category), record.place)


def _category_of(row: dict, column: str | None) -> Optional[str]:
    if column is None:
        return None
    value = _value_of(row, column, "category_column", ", or set category_column to an empty value to learn without")
    if value is not None and not isinstance(value, (str, int, float)):
        raise BadRow(f"column {column!r} holds {type(value).__name__}, not a category (text or a number)")
    name = "" if value is None or value != value else str(value).strip()  # tables use NaN for a missing value
    return name or None


def _value_of(row: dict, column: str, setting: str, otherwise: str):
    if column not in row:
        raise BadRow(
            f"has no column {column!r}; its columns: {', '.join(map(str, row)) or 'none'}"
            f"{did_you_mean(column, map(str, row))}. Name it with --{setting}{otherwise}"
        )
    return row[column]


def _schema() -> pyarrow.Schema:
    import pyarrow

    names = {name: pyarrow.large_string() for name in LabelledText._fields}
    return pyarrow.schema({**names, "digest": pyarrow.int64()})


def _batches(texts: Iterable[LabelledText]) -> Iterator[pyarrow.RecordBatch]:
    """Yield Arrow batches, limited in number of texts and of characters."""
    for batch in batched(texts, lambda text: len(text.text), 4 * TEXTS_PER_READ, BATCH_CHARACTERS):
        yield from record_batches(map(_columns_of, batch), _schema())


def _columns_of(text: LabelledText) -> dict:
    digest = xxhash.xxh3_64_intdigest(text.text.encode("utf-8", "surrogatepass")) - 2**63
    return {**text._asdict(), "digest": digest}
