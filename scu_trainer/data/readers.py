"""Read records from files one at a time, so that memory does not grow with the file; and find the splits in file names.

Rows count from 1. In a .jsonl file the row is the line number, so an editor finds it. Files may be gzip-compressed.
"""

from __future__ import annotations

import csv
import functools
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from scu_trainer.data.json_files import encoding_advice, read_json_file, read_json_lines
from scu_trainer.data.opening import open_data_file, shown_name
from scu_trainer.data.records import Record, table_records
from scu_trainer.errors import DataError, did_you_mean
from scu_trainer.figures import count_text, first_few

if TYPE_CHECKING:
    import pyarrow

BLANK_TWICE = 2  # blank lines between the documents of a single .txt file
BLANK_ONCE = 1  # blank lines between paragraphs
READ_BYTES = 2**20  # bytes of a column of a parquet file that are read at a time
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}


def kind_of(path: Path) -> Optional[str]:
    """Return the suffix of a file, in lower case, as in SUFFIXES; None for a format that cannot be read."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not (suffix in WITHOUT_GZIP and name.endswith(".gz")) else None


def require_kind(path: Path) -> str:
    """Return ``kind_of``. Raises DataError if it is None, and for a file that cannot be opened, a pipe or a device."""
    kind = kind_of(path)
    if kind is None:
        problem = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise DataError(
            f"the name of {path} {problem}, so its format is unknown; allowed: {ALLOWED_SUFFIXES}. Rename it, or "
            "convert it"
        )
    with open_data_file(path):
        return kind


def read_file(path: Path, text_column: str, *columns: str) -> Iterator[Record]:
    """Yield the records of one file, by its suffix. A .txt file is one record with the column ``text_column``.
    ``columns``: others that are needed. Raises DataError for an unknown suffix and a file that cannot be read."""
    kind = require_kind(path)
    if kind == ".txt":
        yield Record(shown_name(path), {text_column: "".join(_text_lines(path))})
    elif kind == ".json":
        yield from read_json_file(path, (text_column, *columns))
    else:
        yield from READERS[kind](path)


def read_sections(path: Path, text_column: str, blank_lines: int) -> Iterator[Record]:
    """Yield the records of one .txt file, split at every ``blank_lines`` or more consecutive blank lines."""
    for number, text in enumerate(_sections(_text_lines(path), blank_lines), start=1):
        yield Record(f"{shown_name(path)} part {number}", {text_column: text})


def has_several_sections(path: Path, blank_lines: int) -> bool:
    """Whether ``read_sections`` would yield two or more records. Reads only until the second."""
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
        with open_data_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; {encoding_advice(error.object)}") from None


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is shorter than many documents
    with open_data_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        try:
            reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            _require_columns(path, reader.fieldnames, delimiter)
            for number, row in enumerate(reader, start=1):
                yield _csv_record(f"{shown_name(path)} row {number}", row)
        except (csv.Error, UnicodeDecodeError) as error:
            kind = "CSV" if delimiter == "," else "tab-separated table"
            is_encoding = isinstance(error, UnicodeDecodeError)
            hint = f"; {encoding_advice(error.object)}" if is_encoding else f" (line {reader.reader.line_num})"
            if "expected after" in str(error) and reader.reader.line_num == 1:
                hint += f"; if {SEPARATORS[delimiter]} do not separate its fields, {_separator_advice('')}"
            raise DataError(f"{path} is not readable as UTF-8 {kind} with a header line: {error}{hint}") from None


def _require_columns(path: Path, names: list[str], delimiter: str) -> None:
    other = next((name for name in SEPARATORS if len(names) == 1 and name != delimiter and name in names[0]), None)
    if other is not None:
        raise DataError(
            f"the header line of {path} is a single column, {names[0]!r}: its fields seem to be separated by "
            f"{SEPARATORS[other]}, not by {SEPARATORS[delimiter]}; {_separator_advice(other)}"
        )
    require_unique_columns(f"the header line of {path}", names)


def require_unique_columns(where: str, names: list[str]) -> None:
    """Raise DataError if two columns have the same name, because the values of one would be lost."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where} names the column {twice!r} twice; the values of one of the two would be lost")


def _separator_advice(separator: str) -> str:
    kinds = {",": "name the file .csv", "\t": "name the file .tsv"}
    return kinds.get(separator, "save it with commas, or with tabs under a name that ends in .tsv")


def _csv_record(place: str, row: dict) -> Record:
    if None in row:
        return Record(place, None, f"has {len(row[None])} more fields than the header line")
    missing = [column for column, field in row.items() if field is None]
    if missing:
        return Record(place, None, f"has no field for the columns {', '.join(missing)}")
    return Record(place, row)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        # By default pyarrow fetches all row groups ahead: the whole file. A buffered stream holds one page at a time.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            require_unique_columns(f"{path}", file.schema_arrow.names)
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            yield from table_records(shown_name(path), rows)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a damaged file can raise any
        raise DataError(f"{path} is not readable as parquet: {error}") from None


def _read_arrow(path: Path) -> Iterator[Record]:
    """Read an IPC file (Feather) or stream, as pyarrow and the datasets library write them, by memory-mapping it."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            require_unique_columns(f"{path}", reader.schema.names)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            parts = (batch.slice(start, 256) for batch in batches for start in range(0, batch.num_rows, 256))
            yield from table_records(shown_name(path), (row for part in parts for row in _checked(part).to_pylist()))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not readable as an Arrow file: {error}") from None


def _checked(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Raise ArrowInvalid for offsets that point outside of the file, which would end the process instead."""
    batch.validate(full=True)
    return batch


READERS = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_file,
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
WITHOUT_GZIP = (".parquet", ".arrow", ".feather")
SUFFIXES = (".txt", *READERS)
ALLOWED_SUFFIXES = f"{' '.join(SUFFIXES)}; all but the last three also with .gz appended"


# Splits of a folder

HELD_OUT_SPLITS = ("validation", "test")
MOST_NAMES, MOST_SPLITS = 5, 20  # in one message

_WORD = re.compile(r"(?<![^\W_])(training|train|validation|valid|val|dev|eval|testing|test)(?![^\W\d_])")
_SPLITS = {
    "training": "train",
    "testing": "test",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
_ABOUT_DATA = re.compile(r"^(licen[cs]e|readme|copying|notice|changelog|citation|authors)(?![^\W\d_])")


SplitFiles = tuple[dict[str, list[Path]], tuple[str, ...]]
"""Files by split, empty if no name indicates a split; and lines for the user about the rest."""


def split_of(path: Path, folder: Path) -> Optional[str]:
    """Return the split of a file in ``folder`` (train, validation or test), from a word in its name or in the name of a
    subfolder ("train-00.jsonl", "my_test.csv", "val/0.jsonl"); None if there is no such word. Raises DataError if one
    word says train and another a held-out split."""
    words = _WORD.findall(path.relative_to(folder).as_posix().lower())
    splits = [canonical_split(word) for word in words]
    if "train" in splits and len(set(splits)) > 1:
        raise DataError(
            f"the name of {path} says {' and '.join(dict.fromkeys(splits))}, so it is unclear whether to train on the "
            "file; rename it, so that it names only one split"
        )
    return splits[-1] if splits else None


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether the name of the file, or of a folder between it and ``folder``, begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def canonical_split(name: str) -> str:
    """Return ``train``, ``validation`` or ``test`` for one of their synonyms; any other name in lower case."""
    return _SPLITS.get(name.lower(), name.lower())


def find_split(splits: Iterable[str], wanted: Sequence[str]) -> Optional[str]:
    """Return the first of the ``wanted`` splits that exists, under its own name or else under a synonym."""
    existing = list(splits)
    for word in wanted:
        same = [split for split in existing if canonical_split(split) == canonical_split(word)]
        if same:
            return next((name for name in (word, canonical_split(word)) if name in same), same[0])
    return None


def require_split(name: str, splits: Iterable[str], wanted: Sequence[str], shown: Iterable[str]) -> str:
    """Return ``find_split``. Raises DataError, with the splits ``shown``, if no wanted one exists."""
    chosen = find_split(splits, wanted)
    if chosen is None:
        raise DataError(
            f"{name} has the splits {', '.join(shown)}, but none of the requested: {', '.join(wanted)}"
            f"{did_you_mean(wanted[0], splits)}; choose one with --dataset_split"
        )
    return chosen


def choose_splits(
    name: str, splits: Iterable[str], wanted: Sequence[str], items: str, has_own: bool
) -> tuple[str, Optional[str], tuple[str, ...]]:
    """Return the split that ``require_split`` finds. For training data (one ``wanted`` split) also return the held-out
    split, and notes about it and about splits that are not read. ``has_own``: an ``eval_dataset`` is given, so none is
    held out."""
    chosen = require_split(name, splits, wanted, shown=splits)
    if len(wanted) > 1:
        return chosen, None, ()
    others = [split for split in splits if split != chosen]
    held_out = None if has_own else find_split(others, HELD_OUT_SPLITS)
    left = [split for split in others if split != held_out]
    origin = (f"held-out {items} come from the split {held_out!r} of {name}",) if held_out is not None else ()
    not_read = (f"splits of {name} that were not read: {', '.join(left[:MOST_SPLITS])}",) if left else ()
    return chosen, held_out, (*origin, *not_read)


def group_by_split(files: Sequence[Path], folder: Path) -> SplitFiles:
    """Group files by their splits. Raises DataError if some files name train and other data files no split: training
    must not silently use files that are meant for testing."""
    by_split: dict[str, list[Path]] = {}
    rest: list[Path] = []
    for path in files:
        split = split_of(path, folder)
        (rest if split is None else by_split.setdefault(split, [])).append(path)
    if not by_split or not rest:
        return by_split, ()
    return _with_unnamed(by_split, rest, folder)


def _with_unnamed(by_split: dict[str, list[Path]], rest: list[Path], folder: Path) -> SplitFiles:
    """Use ``rest``, the files that name no split, for training; raise DataError if other files name train. Left out and
    noted are files that are not data and, if files name train, those of a kind that no file with a split has."""
    kinds = {kind_of(path) for paths in by_split.values() for path in paths} if "train" in by_split else set()
    left = [path for path in rest if _is_about_data(path) or (kinds and kind_of(path) not in kinds)]
    data = [path for path in rest if path not in left]
    if data and "train" in by_split:
        raise DataError(_unclear_split_message(by_split, data, folder))
    return ({"train": data, **by_split} if data else by_split), _notes(left, data, [*by_split], folder)


def _notes(left: list[Path], data: list[Path], splits: list[str], folder: Path) -> tuple[str, ...]:
    unread, kept = count_text(len(left), "file"), count_text(len(data), "file")
    was = "was" if len(left) == 1 else "were"
    not_read = f"{unread} in {folder} {_verb(left)} no split and {was} not read: {_first_names(left)}"
    trained_on = f"{kept} in {folder} {_verb(data)} no split, next to files for {' and '.join(splits)}: read as train"
    return tuple(note for note, files in ((not_read, left), (trained_on, data)) if files)


def _is_about_data(path: Path) -> bool:
    return kind_of(path) == ".txt" and _ABOUT_DATA.match(path.name.lower()) is not None


def _unclear_split_message(by_split: dict[str, list[Path]], rest: list[Path], folder: Path) -> str:
    train, others = by_split["train"][0], [paths[0] for split, paths in by_split.items() if split != "train"]
    eval_flag = f" --eval_dataset {others[0]}" if others else ""
    return (
        f"in {folder} some files name a split ({_first_names([train, *others])}), but {len(rest):,} "
        f"{_verb(rest)} none ({_first_names(rest)}), so it is unclear whether to train on them. Rename them "
        f"(train-{shown_name(rest[0])}), or give the files that you want: --dataset {train}{eval_flag}; several with "
        f'--dataset \'[{{"dataset": "{train}"}}, {{"dataset": "{rest[0]}"}}]\' (docs/data.md, Mixtures)'
    )


def _verb(paths: Sequence[Path]) -> str:
    return "names" if len(paths) == 1 else "name"


def _first_names(paths: Sequence[Path]) -> str:
    return first_few(map(shown_name, paths), MOST_NAMES)
