"""Read the manifest of a folder of recordings: its files, classes and splits. See ``format.py``."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data.json_files import dict_of_unique_keys
from scu_trainer.data.readers import (
    HELD_OUT_SPLITS,
    MOST_NAMES,
    canonical_split,
    is_hidden,
    require_unique_columns,
    shown_name,
)
from scu_trainer.data.records import BadSample
from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.sensors.format import ARRAY_FORMATS, FORMAT_HINT, MANIFEST
from scu_trainer.data.statistics import unused_column_lines
from scu_trainer.errors import DataError, did_you_mean
from scu_trainer.figures import count_text, first_few
from scu_trainer.settings.base import short

CSV_MANIFEST = "manifest.csv"
COLUMNS = ("file", "label", "split", "missing", "report")
HELD_OUT = "eval"
ALMOST_A_NUMBER = r"nan|[-+]*[0-9]*\.?[0-9]*"  # nan: tables use it for a missing value
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # lone surrogates, which no file name can contain
MOST_LETTERS = 500
"""Longest report. Attention to all words of longer texts would dominate the memory of a step."""
MOST_IMPLIED_CLASSES = 1000
"""A label as high as this and as the number of rows is considered a mistake, unless ``num_classes`` is set."""


@dataclass(frozen=True)
class Entry:
    """A usable row of a manifest. ``place`` names it in messages; ``key`` is its file as written in the manifest;
    ``label`` is a number or a name; ``split`` is in lower case; ``report`` is "" if there is none."""

    place: str
    key: str
    file: Path
    label: Any
    split: Optional[str]
    missing: tuple[str, ...]
    report: str


class Rejections:
    """Raises DataError at the first bad row or, with ``skip``, counts bad rows in ``statistics``."""

    def __init__(self, statistics: SampleStatistics, skip: bool) -> None:
        self.statistics, self.skip = statistics, skip

    def add(self, place: str, error: BadSample) -> None:
        if not self.skip:
            raise DataError(f"{place}: {error}; fix it, or set skip_bad_rows: true to leave such rows out") from error
        self.statistics.drop(error.reason, place)


def read_manifest(folder: Path, rejections: Rejections) -> list[Entry]:
    """Return the usable rows in the order of the file. Raises DataError if there is no manifest or no usable row."""
    path = next((folder / name for name in (MANIFEST, CSV_MANIFEST) if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{folder} has no {MANIFEST} or {CSV_MANIFEST}; give a folder of recordings with a manifest of the columns "
            f"{', '.join(COLUMNS)}, and one .npz per recording, {FORMAT_HINT}"
        )
    entries: list[Entry] = []
    by_file: dict[Path, Entry] = {}
    named: set[str] = set()
    unread: Counter[str] = Counter()
    for line, row, problem in _rows(path):
        rejections.statistics.read += 1
        named.add(os.path.normpath(folder / str(row.get("file") if isinstance(row, dict) else "")))
        place = f"{path.name} line {line}"
        try:
            entry = _parse_entry(folder, place, row, problem)
            first = by_file.setdefault(entry.file, entry)
            if first.label != entry.label:
                conflict = f"its label is {entry.label!r}, but {first.label!r} in {first.place}"
                raise BadSample("two labels", f"{conflict}; a recording has one class")
            entries.append(entry)
            unread.update(str(name) for name, value in row.items() if name not in COLUMNS and value not in (None, ""))
        except BadSample as error:
            rejections.add(place, error)
    if not entries:
        raise DataError(
            f"{path} has no usable row: {rejections.statistics.read:,} read; it needs file and label in each"
        )
    rejections.statistics.notes += [*unused_column_lines(unread), *_unread_notes(folder, path, named)]
    return entries


def _unread_notes(folder: Path, manifest: Path, named: Collection[str]) -> list[str]:
    """Return notes about recordings that no row names, and about a second manifest."""
    inside = {os.path.normpath(path): path for path in folder.rglob("*.npz") if not is_hidden(path, folder)}
    left = [shown_name(inside[name]) for name in sorted(inside.keys() - named)]
    is_second = manifest.name == MANIFEST and (folder / CSV_MANIFEST).is_file()
    notes = [f"{folder / CSV_MANIFEST} was not read, because there is also a {MANIFEST}"] if is_second else []
    if left:
        names = ", ".join(left[:MOST_NAMES])
        missing = count_text(len(left), f".npz file of {folder} is", f".npz files of {folder} are")
        notes.append(f"{missing} not in {manifest.name} and not read: {names}")
    return notes


def _rows(path: Path) -> Iterator[tuple[int, Any, Optional[str]]]:
    """Yield (line of the file, columns, None) or, for a bad row, (line, columns or None, what is wrong)."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from _json_rows(file) if path.suffix == ".jsonl" else _csv_rows(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; it must be UTF-8 text, with each quote closed") from error


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[int, Any, Optional[str]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line, object_pairs_hook=dict_of_unique_keys), None
        except (ValueError, RecursionError) as error:
            yield number, None, f"not JSON: {error}"


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any, Optional[str]]]:
    # Strict, because otherwise an open quote would swallow the rows that follow.
    reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
    header = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    require_unique_columns(f"the header line of {path}", header)
    if not {"file", "label"} <= {*header}:
        raise DataError(
            f"{path} begins with the columns {header}; its first line must name file and label (allowed: "
            f"{', '.join(COLUMNS)}), separated by commas"
        )
    for row in reader:
        excess = row.pop(None, None)  # csv stores values without a column under None
        problem = f"{len(header) + len(excess)} values for {len(header)} columns" if excess else None
        yield reader.line_num, row, problem


def _parse_entry(folder: Path, place: str, row: Any, problem: Optional[str]) -> Entry:
    if problem is not None or not isinstance(row, dict):
        raise BadSample("unreadable row", problem or f"a {type(row).__name__}, not an object with {COLUMNS}")
    for name in (name for name in row if name not in COLUMNS):
        says_split = canonical_split(str(row[name]).strip()) in ("train", *HELD_OUT_SPLITS)
        if near := _suggestion("split" if says_split else str(name)):
            allowed = f"allowed columns: {', '.join(COLUMNS)}"
            raise BadSample("unknown column", f"unknown column {name!r} with {short(row[name])}{near}; {allowed}")
    file = row.get("file")
    if not isinstance(file, str) or not file or HALF_CHARACTER.search(file):
        raise BadSample("no file", "it names no file")
    inside = Path(os.path.normpath(folder / file))
    if not inside.is_relative_to(os.path.normpath(folder)):
        raise BadSample("file outside", f"{file} is outside of {folder}")
    shown = file if file.isprintable() else repr(file)
    label, split = _label_of(row.get("label")), _split_of(row)
    return Entry(f"{place} ({shown})", file, inside, label, split, _missing_of(row), _report_of(row))


@lru_cache
def _suggestion(name: str) -> str:
    """Return a suggestion for a misspelled column. Cached, because it takes time and all rows have the same columns."""
    return did_you_mean(name, COLUMNS)


def _split_of(row: dict) -> Optional[str]:
    value = row.get("split")
    if value is not None and not isinstance(value, str):
        raise BadSample("no split", f"its split is {value!r}; it must be a word, such as train or {HELD_OUT}")
    return (value or "").strip().casefold() or None


def _label_of(value: Any) -> Any:
    """Return the label, a whole number or a name. In CSV, numbers are text."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
        return int(value)
    if isinstance(value, str) and not re.fullmatch(ALMOST_A_NUMBER, value.strip()):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    raise BadSample("no label", f"its label is {short(value)}; it must be a whole number (0 or more) or a name")


def _missing_of(row: dict) -> tuple[str, ...]:
    value = row.get("missing") or []
    names = [name.strip() for name in value.split(";")] if isinstance(value, str) else value
    if not isinstance(names, list) or not set(map(str, names)) <= set(ARRAY_FORMATS):
        raise BadSample("unknown branch", f"missing is {value!r}; allowed: {', '.join(ARRAY_FORMATS)}")
    return tuple(names)


def _report_of(row: dict) -> str:
    value = row.get("report")
    if value is not None and (not isinstance(value, str) or HALF_CHARACTER.search(value)):
        raise BadSample("no report", f"its report is {short(value)}; it must be text")
    value = (value or "").strip()
    if len(value) > MOST_LETTERS:
        raise BadSample("long report", f"its report has {len(value):,} letters; at most {MOST_LETTERS}")
    return value


# -- classes -----------------------------------------------------------------------------------------------------------


def with_labels_in_range(
    entries: Sequence[Entry], num_classes: Optional[int], rejections: Rejections
) -> Sequence[Entry]:
    """Return ``entries`` without those with an implausibly high label, which would create too many classes."""
    if num_classes is not None:
        return entries
    limit = max(MOST_IMPLIED_CLASSES, len(entries))
    kept = []
    for entry in entries:
        if isinstance(entry.label, int) and entry.label >= limit:
            problem = f"label {entry.label} makes {entry.label + 1:,} classes of {len(entries):,} rows"
            rejections.add(entry.place, BadSample("label out of range", f"{problem}; if it is right, set num_classes"))
        else:
            kept.append(entry)
    return kept


def class_names(entries: Sequence[Entry], num_classes: Optional[int], known: Optional[Sequence[str]]) -> list[str]:
    """Return the class names by label: ``known`` (those of a trained model) if given; else the numbers below
    ``num_classes`` (by default up to the highest label), or the names in the manifest, sorted. Raises DataError if
    ``num_classes`` is not the number of these names."""
    if known is not None:
        return list(known)
    labels = {entry.label for entry in entries if isinstance(entry.label, str) or entry.label >= 0}
    if all(isinstance(label, int) for label in labels):
        return [str(label) for label in range(num_classes or max(labels, default=0) + 1)]
    names = sorted(map(str, labels))
    if num_classes not in (None, len(names)):
        raise DataError(
            f"num_classes is {num_classes}, but the manifest has {len(names)} labels: {', '.join(names[:10])}; drop "
            "num_classes, or fix the labels"
        )
    return names


def label_number(label: Any, names: Sequence[str]) -> int:
    """Return the number of a label. Raises BadSample if it is not one of the classes."""
    if str(label) in names:
        return names.index(str(label))
    if isinstance(label, int) and 0 <= label < len(names):
        return label  # the classes of a model have names, but the manifest has numbers
    raise BadSample(
        "label out of range",
        f"label {label!r} is not one of the {len(names)} classes: {first_few(names, 10)}"
        f"{did_you_mean(label, names) if isinstance(label, str) else ''}",
    )
