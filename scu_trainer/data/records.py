"""A record: one row of a source as it was read, before anybody knows whether it is usable."""

from __future__ import annotations

from typing import NamedTuple, Optional


class Record(NamedTuple):
    """``value`` holds the columns, or is None and ``problem`` says why the row cannot be read.

    ``place`` names the row for a person, for instance "notes.jsonl row 3". Rows count from 1.
    """

    place: str
    value: Optional[dict]
    problem: Optional[str] = None


class BadRow(Exception):
    """One row that cannot be used; its message says why. It stays in this room: counted, or turned into a DataError."""
