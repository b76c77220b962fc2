"""A record: one row of a source as it was read, before anybody knows whether it is usable."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Record(NamedTuple):
    """``value`` holds the columns, or is None and ``problem`` says why the row cannot be read.

    ``place`` names the row for a person, for instance "notes.jsonl row 3". Rows count from 1.
    """

    place: str
    value: Optional[dict]
    problem: Optional[str] = None


def without_padding(value: Any) -> Any:
    """A value of Arrow or Parquet without the keys that such files add to every object because another one has them."""
    if isinstance(value, dict):
        return {key: without_padding(inner) for key, inner in value.items() if inner is not None}
    return [without_padding(inner) for inner in value] if isinstance(value, list) else value


class BadRow(Exception):
    """One row that cannot be used; its message says why. It stays in this room: counted, or turned into a DataError."""
