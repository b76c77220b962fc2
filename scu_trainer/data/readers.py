"""Files -> records, one at a time, so that memory stays flat however large the file is.

Rows count from 1. In a .jsonl file the row is the line number, so an editor finds it.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from scu_trainer.data.records import Record
from scu_trainer.errors import DataError

BLANK_TWICE = 2  # a document of a single .txt ends at this many blank lines
BLANK_ONCE = 1  # a paragraph
READ_BYTES = 2**20  # of a column of a parquet file at a time


def read_file(path: Path, text_column: str) -> Iterator[Record]:
    """Records of one file, by its suffix. A .txt file is one record with the column ``text_column``."""
    if path.suffix == ".txt":
        return iter([Record(path.name, {text_column: _whole_text(path)})])
    return READERS[path.suffix](path)


def read_sections(path: Path, text_column: str, blank_lines: int) -> Iterator[Record]:
    """Records of one .txt file, cut wherever at least ``blank_lines`` lines in a row are blank."""
    for number, text in enumerate(_sections(_text_lines(path), blank_lines), start=1):
        yield Record(f"{path.name} part {number}", {text_column: text})


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
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for instance with iconv -t UTF-8") from None


def _whole_text(path: Path) -> str:
    return "".join(_text_lines(path))


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_record(f"{path.name} row {number}", line)


def _json_record(place: str, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        return Record(place, None, f"not readable as JSON: {error}")
    return _object_record(place, value)


def _object_record(place: str, value) -> Record:
    if isinstance(value, dict):
        return Record(place, value)
    return Record(place, None, f"holds {type(value).__name__}, not an object with named columns")


def _json(path: Path) -> Iterator[Record]:
    """A .json file: one object per line, or one list of objects (which is read whole)."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _json_list(path) if start.startswith(b"[") else _json_lines(path)


def _json_list(path: Path) -> Iterator[Record]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} starts like a list but is not readable as JSON: {error}; write one object per line and name the "
            "file .jsonl, then bad rows can be skipped one by one"
        ) from None
    for number, value in enumerate(values, start=1):
        yield _object_record(f"{path.name} row {number}", value)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is shorter than many documents
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                yield _csv_record(f"{path.name} row {number}", row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not readable as UTF-8 CSV with a header line: {error}") from None


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

    try:
        # By default all row groups are fetched ahead: the whole file. A buffered stream holds a page at a time.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Record(f"{path.name} row {number}", row)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not readable as parquet: {error}") from None


READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
SUFFIXES = (".txt", *READERS)

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
