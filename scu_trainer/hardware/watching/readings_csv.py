"""Readings of ``monitor`` as CSV: one row each, whole or not there, however the writer ends."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import StorageError
from scu_trainer.hardware.watching.monitor import MonitorReading, RunReading


def row_of(reading: MonitorReading) -> dict[str, Any]:
    """Values by column; the columns depend on the machine and on whether a run is watched."""
    row: dict[str, Any] = {"time_s": f"{reading.time_s:.3f}"}
    for level in reading.levels:
        name = _column(level.name)
        row |= {f"{name}_used_bytes": level.used_bytes, f"{name}_total_bytes": level.total_bytes}
    if reading.run is not None:
        values = {item.name: getattr(reading.run, item.name) for item in fields(RunReading)}
        row |= {f"run_{name}": "" if value is None else value for name, value in values.items()}
    return row


def _column(name: str) -> str:
    """ram, container_limit, cuda_0: without the name of the card, which may hold anything."""
    kind = re.match(r"[a-z]+:\d+", name)
    return re.sub(r"\W+", "_", kind[0] if kind else name.lower())


class CsvLog:
    """Appends to ``path``, or to the standard output for "-". Each row is one write, and is there at once.

    A row that a killed writer left unfinished is cut off. Raises StorageError where the file cannot be written, or
    holds other columns.
    """

    def __init__(self, path: str) -> None:
        self._path = None if path == "-" else Path(path).expanduser()
        self._columns: Optional[list[str]] = None

    def append(self, reading: MonitorReading) -> None:
        row = row_of(reading)
        if self._columns is None:
            self._columns = [*row]
            self._write(_line(self._columns) if self._is_new() else "")
        self._write(_line([row.get(name, "") for name in self._columns]))

    def _is_new(self) -> bool:
        """Whether the columns are still to be written. Makes the end of the file one where a row may follow."""
        if self._path is None or not self._path.exists():
            return True
        try:
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self._path, len(whole))
        except OSError as error:
            raise self._failed(error) from error
        if whole and whole.split(b"\n", 1)[0] != _line(self._columns).rstrip("\n").encode():
            raise StorageError(f"{self._path} has columns that do not match this machine and run; give another file")
        return not whole

    def _write(self, text: str) -> None:
        if self._path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._path}: {error.strerror}; give another file with --csv")


def _line(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
