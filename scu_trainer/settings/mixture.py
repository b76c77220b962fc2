"""Mixtures: a list of datasets instead of one, with the names and weights of its sources."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, Optional, Union, get_args

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings.base import LARGEST_NUMBER, require, short

COLUMNS = ("text_column", "prompt_column", "response_column", "system_column", "messages_column")
SOURCE_FIELDS = ("dataset_config_name", "dataset_split", *COLUMNS, "dataset_size")
"""Fields of ``DataSettings`` that an entry of the list may set for its source."""

ENTRY_KEYS = ("dataset", "weight", "name", *SOURCE_FIELDS)

FILE_SUFFIXES = (".gz", ".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".ndjson", ".feather")
ALLOWED_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class SourceSettings:
    """One entry of the list. ``weight``: None if no entry has one. ``own``: values for this source only, by field."""

    dataset: str
    name: str
    weight: Optional[float] = None
    own: Mapping[str, Any] = field(default_factory=dict)


def parsed_dataset(value: Union[str, list]) -> Union[str, list]:
    """Return the value of ``dataset``, parsed if it begins like a JSON list. Raises SettingsError for invalid JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return list(value) if isinstance(value, tuple) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"dataset is {short(value)}, which starts like a list but is not valid JSON ({error}); write "
            '\'[{"dataset": "a.jsonl", "weight": 3}, {"dataset": "b.jsonl", "weight": 1}]\', or ./ before the name '
            "of a file that begins with ["
        ) from error


def dataset_names(value: Any) -> list[str]:
    """Return the names of the datasets in a value of ``dataset``, in order, also from files of older versions."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    names = [entry.get("dataset") if isinstance(entry, Mapping) else entry for entry in entries]
    return [str(name) for name in names if name]


def is_same_dataset(one: str, other: str) -> bool:
    """Whether both are the same name, or paths of the same file or folder."""
    paths = [Path(name).expanduser() for name in (one, other)]
    return one == other or (all(path.exists() for path in paths) and paths[0].resolve() == paths[1].resolve())


def dataset_label(value: Any) -> str:
    """Return a value of ``dataset`` as text for a message or a title."""
    return " + ".join(dataset_names(value))


def parsed_sources(entries: list[Any], hints: Mapping[str, Any]) -> tuple[SourceSettings, ...]:
    """Return the sources of a list. ``hints``: types of the fields of ``DataSettings``. Raises SettingsError for an
    invalid entry, if only some sources have weights, and if two sources have the same name."""
    require(bool(entries), "dataset is an empty list; give at least one entry, or one name without a list")
    sources = tuple(_parsed_source(number, entry, hints) for number, entry in enumerate(entries, start=1))
    without = [source.name for source in sources if source.weight is None]
    require(
        len(without) in (0, len(sources)),
        f"dataset has weights for only some of its sources; add a weight to {', '.join(without)}, or drop all weights",
    )
    name, count = Counter(source.name for source in sources).most_common(1)[0]
    require(
        count == 1,
        f"dataset has {count} sources with the name {name!r}; give them different names, for instance name: {name}_2",
    )
    return sources


def shares_of(sources: tuple[SourceSettings, ...]) -> list[Fraction]:
    """Return the requested share of the rows of each weighted source, as exact fractions that sum to 1."""
    weights = [Fraction(source.weight) for source in sources]  # type: ignore[arg-type]  # all have one, or none
    return [weight / sum(weights) for weight in weights]


def _parsed_source(number: int, entry: Any, hints: Mapping[str, Any]) -> SourceSettings:
    place = f"entry {number} of dataset"
    if isinstance(entry, str):
        entry = {"dataset": entry}
    require(
        isinstance(entry, Mapping),
        f"{place} is {short(entry)}; it must be a name, or a mapping with dataset and {', '.join(ENTRY_KEYS[1:])}",
    )
    for key in entry:
        require(
            key in ENTRY_KEYS,
            f"{place} has the unknown key {short(key)}{did_you_mean(str(key), ENTRY_KEYS)}; allowed: "
            + ", ".join(ENTRY_KEYS),
        )
    dataset = entry.get("dataset")
    require(
        isinstance(dataset, str) and bool(dataset) and not dataset.lstrip().startswith("["),
        f"{place} has {short(dataset)} as its dataset; it must be an embedded name, a path or a Hub id",
    )
    name = short_name(dataset) if entry.get("name") is None else entry["name"]
    require(
        isinstance(name, str) and ALLOWED_NAME.fullmatch(name) is not None,
        f"{place} has the name {short(name)}; use only letters, digits and _ . - because metrics are named after it",
    )
    own = {key: entry[key] for key in SOURCE_FIELDS if entry.get(key) is not None}
    for key, value in own.items():
        _check_type(f"{place} ({name}) has {key}: {short(value)}", value, hints[key])
    return SourceSettings(dataset, name, _parsed_weight(f"{place} ({name})", entry.get("weight")), own)


def _parsed_weight(place: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    require(
        is_number and 0 < value <= LARGEST_NUMBER,
        f"{place} has weight: {short(value)}; it must be a number above 0, such as 1 (to leave a source out, drop it)",
    )
    return float(value)


def _check_type(found: str, value: Any, hint: Any) -> None:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    is_right = isinstance(value, tuple(kinds)) and (bool in kinds or not isinstance(value, bool))
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    require(is_right, f"{found}; it must be {' or '.join(words.get(kind, kind.__name__) for kind in kinds)}")


def short_name(dataset: str) -> str:
    """Return the last part of a path or Hub id, without file suffixes."""
    path = PurePosixPath(dataset)
    while path.suffix.lower() in FILE_SUFFIXES and path.stem:
        path = path.with_suffix("")
    return re.sub(r"[^\w.-]+", "_", path.name).strip("_") or "source"
