"""Files -> records, one at a time, so that memory stays flat however large the file is.

Rows count from 1. In a .jsonl file the row is the line number, so an editor finds it. A file may be compressed by gzip.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Optional

from scu_trainer.data.records import Record
from scu_trainer.errors import DataError

BLANK_TWICE = 2  # a document of a single .txt ends at this many blank lines
BLANK_ONCE = 1  # a paragraph
READ_BYTES = 2**20  # of a column of a parquet file at a time
DEEPEST_ROW = 100  # lists and objects in each other; no conversation and no description of a tool comes near

_LONE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character, which is one only beside its other half


def kind_of(path: Path) -> Optional[str]:
    """One of SUFFIXES, in whatever case it is written; None for a file that cannot be read."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not (suffix == ".parquet" and name.endswith(".gz")) else None


def require_kind(path: Path) -> str:
    """``kind_of``. Raises DataError where it is None, and for a pipe or a device."""
    kind = kind_of(path)
    if kind is None:
        found = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise DataError(
            f"the name of {path} {found}, so its format is not known; allowed: {ALLOWED_SUFFIXES}. Rename it, or "
            "convert it"
        )
    with _opened(path):
        return kind


def read_file(path: Path, text_column: str) -> Iterator[Record]:
    """Records of one file, by its suffix. A .txt file is one record with the column ``text_column``.

    Raises DataError for a file that cannot be read, or is of none of the kinds."""
    kind = require_kind(path)
    if kind == ".txt":
        yield Record(shown_name(path), {text_column: _whole_text(path)})
    else:
        yield from READERS[kind](path)


def shown_name(path: Path) -> str:
    """The name of a file for a person, also where its bytes are no UTF-8."""
    return os.fsencode(path.name).decode(errors="replace")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name ends in .gz. What cannot be read becomes a DataError."""
    try:
        # Without waiting: a pipe that nobody writes to, and a device, would never begin or never end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"{path} is a pipe or a device; write its content to a file first")
            with gzip.open(file) if path.name.lower().endswith(".gz") else contextlib.nullcontext(file) as content:
                yield content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}; check the file, its permissions and its suffix") from error


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
        with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it, for instance with iconv -t UTF-8") from None


def _whole_text(path: Path) -> str:
    return "".join(_text_lines(path))


def _json_lines(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_record(f"{shown_name(path)} row {number}", line)


def _json_record(place: str, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        return Record(place, None, f"not readable as JSON: {error}")
    except RecursionError:
        return Record(place, None, TOO_DEEP)
    return _object_record(place, value, line)


TOO_DEEP = f"lists and objects lie in each other deeper than {DEEPEST_ROW} levels"


def _object_record(place: str, value, text: bytes) -> Record:
    """``text``: what the value was read from, or more; most rows need no second look."""
    if not isinstance(value, dict):
        return Record(place, None, f"holds {type(value).__name__}, not an object with named columns")
    if text.count(b"[") + text.count(b"{") > DEEPEST_ROW and _is_too_deep(value):
        return Record(place, None, TOO_DEEP)
    if _LONE.search(text) and _has_half_character(value):
        return Record(place, None, "a text holds half of a character (a lone surrogate such as \\ud83d)")
    return Record(place, value)


def _is_too_deep(value) -> bool:
    level = [value]
    for _ in range(DEEPEST_ROW):
        level = [part for item in level for part in _parts(item) if isinstance(part, (dict, list))]
    return bool(level)


def _parts(item) -> Iterable:
    return item.values() if isinstance(item, dict) else item


def _has_half_character(value) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _json(path: Path) -> Iterator[Record]:
    """A .json file: one object per line, or one list of objects (which is read whole)."""
    with _opened(path) as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _json_list(path) if start.startswith(b"[") else _json_lines(path)


def _json_list(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        content = file.read()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} starts like a list but is not readable as JSON: {error}; write one object per line and name the "
            "file .jsonl, then bad rows can be skipped one by one"
        ) from None
    for number, value in enumerate(values, start=1):
        yield _object_record(f"{shown_name(path)} row {number}", value, content)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is shorter than many documents
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        try:
            reader = csv.DictReader(lines, strict=True)
            _require_columns(path, list(reader.fieldnames or ()))
            for number, row in enumerate(reader, start=1):
                yield _csv_record(f"{shown_name(path)} row {number}", row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not readable as UTF-8 CSV with a header line: {error}") from None


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
                yield Record(f"{name} row {number}", row)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a torn file: any of them
        raise DataError(f"{path} is not readable as parquet: {error}") from None


READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
SUFFIXES = (".txt", *READERS)
ALLOWED_SUFFIXES = f"{' '.join(SUFFIXES)}, all but the last also with .gz behind"

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
