"""Files -> records, one at a time, so that memory stays flat however large the file is.

Rows count from 1. In a .jsonl file the row is the line number, so an editor finds it. A file may be compressed by gzip.
"""

from __future__ import annotations

import csv
import functools
import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data.json_files import read_json_file, read_json_lines
from scu_trainer.data.opening import opened, shown_name
from scu_trainer.data.records import Record, without_padding
from scu_trainer.errors import DataError

BLANK_TWICE = 2  # a document of a single .txt ends at this many blank lines
BLANK_ONCE = 1  # a paragraph
READ_BYTES = 2**20  # of a column of a parquet file at a time


def kind_of(path: Path) -> Optional[str]:
    """One of SUFFIXES, in whatever case it is written; None for a file that cannot be read."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not (suffix in WITHOUT_GZIP and name.endswith(".gz")) else None


def require_kind(path: Path) -> str:
    """``kind_of``. Raises DataError where it is None, and for a pipe or a device."""
    kind = kind_of(path)
    if kind is None:
        found = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise DataError(
            f"the name of {path} {found}, so its format is not known; allowed: {ALLOWED_SUFFIXES}. Rename it, or "
            "convert it"
        )
    with opened(path):
        return kind


def read_file(path: Path, text_column: str) -> Iterator[Record]:
    """Records of one file, by its suffix. A .txt file is one record with the column ``text_column``.

    Raises DataError for a file that cannot be read, or is of none of the kinds."""
    kind = require_kind(path)
    if kind == ".txt":
        yield Record(shown_name(path), {text_column: _whole_text(path)})
    else:
        yield from READERS[kind](path)


def read_sections(path: Path, text_column: str, blank_lines: int) -> Iterator[Record]:
    """Records of one .txt file, cut wherever at least ``blank_lines`` lines in a row are blank."""
    for number, text in enumerate(_sections(_text_lines(path), blank_lines), start=1):
        yield Record(f"{shown_name(path)} part {number}", {text_column: text})


def has_several_sections(path: Path, blank_lines: int) -> bool:
    """Whether ``read_sections`` would give two records or more; reads no further than the second."""
    sections = _sections(_text_lines(path), blank_lines)
    return next(sections, None) is not None and next(sections, None) is not None


def _sections(lines: Iterable[str], blank_lines: int) -> Iterator[str]:
    section, blank = [], 0
    for line in lines:
        if line.strip():
            if section and blank >= blank_lines:
                yield "".join(section).rstrip()
                section = []
            blank = 0
        else:
            blank += 1
        if section or line.strip():
            section.append(line)
    if section:
        yield "".join(section).rstrip()


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for instance with iconv -t UTF-8") from None


def _whole_text(path: Path) -> str:
    return "".join(_text_lines(path))


def _csv(path: Path, delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is shorter than many documents
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        try:
            reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
            _require_columns(path, list(reader.fieldnames or ()))
            for number, row in enumerate(reader, start=1):
                yield _csv_record(f"{shown_name(path)} row {number}", row)
        except (csv.Error, UnicodeDecodeError) as error:
            kind = "CSV" if delimiter == "," else "tab-separated table"
            raise DataError(f"{path} is not readable as UTF-8 {kind} with a header line: {error}") from None


def _require_columns(path: Path, names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"the header line of {path} names the column {twice!r} twice; one of the two would be lost")


def _csv_record(place: str, row: dict) -> Record:
    if None in row:
        return Record(place, None, f"has {len(row[None])} more fields than the header line")
    missing = [column for column, field in row.items() if field is None]
    if missing:
        return Record(place, None, f"has no field for the columns {', '.join(missing)}")
    return Record(place, row)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    name = shown_name(path)
    try:
        # By default all row groups are fetched ahead: the whole file. A buffered stream holds a page at a time.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Record(f"{name} row {number}", {key: without_padding(value) for key, value in row.items()})
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a torn file: any of them
        raise DataError(f"{path} is not readable as parquet: {error}") from None


def _arrow(path: Path) -> Iterator[Record]:
    """An IPC file (Feather) or stream, as pyarrow and the datasets library write them; mapped, not read whole."""
    import pyarrow

    name = shown_name(path)
    try:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            rows = (row for batch in batches for part in _slices(batch) for row in part.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Record(f"{name} row {number}", {key: without_padding(value) for key, value in row.items()})
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not readable as an Arrow file: {error}") from None


def _slices(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, 256) for start in range(0, batch.num_rows, 256))


READERS = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_file,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
WITHOUT_GZIP = (".parquet", ".arrow", ".feather")
SUFFIXES = (".txt", *READERS)
ALLOWED_SUFFIXES = f"{' '.join(SUFFIXES)}; all but the last three also with .gz appended"

_SPLIT_WORD = re.compile(r"^(train|training|validation|valid|val|dev|eval|test)(?![a-z])")
_SPLIT_NAMES = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


def split_named_by(file_name: str) -> str | None:
    """The split that a file name starts with ("train-00.jsonl", "val.csv"), as train, validation or test; or None."""
    match = _SPLIT_WORD.match(file_name.lower())
    return _SPLIT_NAMES.get(match[1], match[1]) if match else None
