"""Read records from JSON files: one object per line, a list of objects, or an object that contains such a list."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from scu_trainer.data.formats import KNOWN_COLUMNS
from scu_trainer.data.opening import open_data_file, shown_name
from scu_trainer.data.records import Record
from scu_trainer.errors import DataError

READ_CHARACTERS = 2**20  # characters of a list that are read at a time
DEEPEST_ROW = 100  # levels of nesting; no conversation and no description of a tool comes near this

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair, which may or may not be complete


def read_json_lines(path: Path) -> Iterator[Record]:
    with open_data_file(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_record(f"{shown_name(path)} row {number}", line)


def _json_record(place: str, line: bytes) -> Record:
    try:
        value = json.loads(line, object_pairs_hook=dict_of_unique_keys)
    except ValueError as error:  # broken JSON, a duplicate key, or bytes that are not UTF-8
        return Record(place, None, f"not readable as JSON: {error}{_hint(error, line)}")
    except RecursionError:
        return Record(place, None, TOO_DEEP)
    record = _object_record(place, value, line)
    return record._replace(problem=record.problem + ONE_LIST) if isinstance(value, list) else record


class _DuplicateKey(ValueError):
    """An object has a key twice. Python's json module would keep the last value and silently drop the others."""


def dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of ``pairs``, as an ``object_pairs_hook`` for json. Raises ValueError for a duplicate key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKey(f"an object has the key {twice!r} twice; one of the two values would be lost")
    return value


def _hint(error: ValueError, line: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"; {encoding_advice(error.object)}"
    if line.strip() == b"[":
        return ONE_LIST
    if line.strip() == b"{":
        return "; the object spans several lines: write each row on its own line (jq -c . FILE does this)"
    if b"\r" in line.strip():
        return "; its lines end with carriage returns only: convert them, for instance with tr '\\r' '\\n'"
    if not line.rstrip().endswith(b","):
        return ""
    return "; the line ends with a comma: remove it, because each line is a separate object"


ONE_LIST = "; if the file is one list of objects, name it .json"
TO_UTF_8 = "convert it, for instance with iconv -f LATIN1 -t UTF-8"


def encoding_advice(content: bytes) -> str:
    """Return advice for a file that is not UTF-8. ``content``: the start of the file, or all of it."""
    if content.startswith(b"\x1f\x8b"):
        return "it is compressed by gzip: append .gz to its name"
    return TO_UTF_8.replace("LATIN1", "UTF-16") if _is_utf_16(content) else TO_UTF_8


def _is_utf_16(content: bytes) -> bool:
    return content.startswith((b"\xff\xfe", b"\xfe\xff")) or content[:2].count(0) == 1


TOO_DEEP = f"lists and objects are nested deeper than {DEEPEST_ROW} levels"


def _object_record(place: str, value, text: bytes) -> Record:
    """``text``: the bytes that the row was parsed from, or more; they show cheaply if it needs no closer check."""
    if not isinstance(value, dict):
        return Record(place, None, f"holds {type(value).__name__}, not an object with named columns")
    if text.count(b"[") + text.count(b"{") > DEEPEST_ROW and _is_too_deep(value):
        return Record(place, None, TOO_DEEP)
    if _SURROGATE.search(text) and _has_lone_surrogate(value):
        return Record(place, None, "a text holds half of a character (a lone surrogate such as \\ud83d)")
    return Record(place, value)


def _is_too_deep(value) -> bool:
    level = [value]
    for _ in range(DEEPEST_ROW):
        level = [part for item in level for part in _children(item) if isinstance(part, (dict, list))]
    return bool(level)


def _children(item) -> Iterable:
    return item.values() if isinstance(item, dict) else item


def _has_lone_surrogate(value) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_json_file(path: Path, columns: Collection[str] = ()) -> Iterator[Record]:
    """Read a .json file: one list of objects, an object that contains such a list, or one object per line. An object
    with one of the requested ``columns`` is a row, whatever it contains: a folder may have one document per file."""
    with open_data_file(path) as file:
        start = file.read(4096)
        if _is_utf_16(start):  # json.loads accepts UTF-16 bytes, so a list on one line would be taken for a row
            raise DataError(f"{path} is not UTF-8 text; {encoding_advice(start)}")
        start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
        is_line = _is_whole_object(start.partition(b"\n")[0])
    if start.startswith(b"["):
        return _json_list(path)
    is_lines = is_line or not start.startswith(b"{")
    return _lines_or_object(path, columns) if is_lines else _json_object(path, columns)


def _lines_or_object(path: Path, columns: Collection[str]) -> Iterator[Record]:
    """A single line may be a row, or an object with the list of rows, as ``json.dump`` writes it."""
    records = read_json_lines(path)
    first = list(islice(records, 2))
    if len(first) == 1 and first[0].value is not None and _contains_rows(first[0].value, columns):
        return _json_object(path)
    return chain(first, records)


def _contains_rows(value: dict, columns: Collection[str]) -> bool:
    """Whether an object is not a row itself, but has exactly one list of objects, which are not messages."""
    rows = [item[0] for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
    return len(rows) == 1 and not {"role", "from"} & {*rows[0]} and not {*KNOWN_COLUMNS, *columns} & {*value}


def _is_whole_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return len(line) > 4000  # longer than what was read: a row, or an error that its reader will report


def _json_list(path: Path) -> Iterator[Record]:
    """Yield the records of one list. Only a few elements are in memory."""
    name, number = shown_name(path), 0
    try:
        with open_data_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            for number, (value, source) in enumerate(_elements(text), start=1):
                yield _object_record(f"{name} row {number}", value, source)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} starts like a list but is not readable as JSON after {number:,} rows: {error}; write one object "
            "per line and name the file .jsonl; then bad rows can be skipped individually"
        ) from None


def _elements(text: TextIO) -> Iterator[tuple[Any, bytes]]:
    """Yield each element of a JSON list, with the bytes it was parsed from. Raises ValueError for an invalid list."""
    decoder = json.JSONDecoder(object_pairs_hook=dict_of_unique_keys)
    buffer, place, is_first = text.read(READ_CHARACTERS).lstrip()[1:], 0, True
    while True:
        place = _SPACE.match(buffer, place).end()
        if buffer[place : place + 1] == "]" and is_first:
            _require_end(buffer[place + 1 :], text)
            return
        try:
            value, end = decoder.raw_decode(buffer, place)
            following = _SPACE.match(buffer, end).end()
            if following == len(buffer):  # a number may continue in the next part, which is not read yet
                raise ValueError("the list does not end")
        except _DuplicateKey:
            raise
        except ValueError:
            # The size doubles, so that a long row is not parsed again many times.
            more = text.read(max(READ_CHARACTERS, len(buffer) - place))
            if not more:
                raise
            buffer, place = buffer[place:] + more, 0
            continue
        yield value, buffer[place:end].encode("utf-8", "surrogatepass")
        is_first = False
        if buffer[following] == "]":
            _require_end(buffer[following + 1 :], text)
            return
        if buffer[following] != ",":
            raise ValueError(f"a comma or ] is missing after {buffer[max(place, end - 40) : end]!r}")
        place = following + 1


def _require_end(rest: str, text: TextIO) -> None:
    """Raise ValueError if anything but white space follows the list, such as a second one."""
    while not rest.strip():
        rest = text.read(READ_CHARACTERS)
        if not rest:
            return
    raise ValueError(f"more text follows the end of the list: {rest.strip()[:40]!r}")


def _json_object(path: Path, columns: Collection[str] = ()) -> Iterator[Record]:
    """Read one object, which is a row or contains the rows in its only list of objects."""
    with open_data_file(path) as file:
        content = file.read()
    try:
        value = json.loads(content, object_pairs_hook=dict_of_unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable as JSON: {error}; a .json file is a list of objects") from None
    if {*columns} & {*value}:
        yield _object_record(shown_name(path), value, content)
        return
    lists = [name for name, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    if len(lists) != 1:
        found = f"has the lists {', '.join(lists)}" if lists else f"has no list, but {', '.join(list(value)[:20])}"
        raise DataError(
            f"{path} is one object that {found}; its rows must be one list of objects, or one object per line (.jsonl)"
        )
    for number, row in enumerate(value[lists[0]], start=1):
        # Pass the row and not the content of the file, which would be searched once per row.
        yield _object_record(f"{shown_name(path)} row {number} of {lists[0]!r}", row, json.dumps(row).encode())
