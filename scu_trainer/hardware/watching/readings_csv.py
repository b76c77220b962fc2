"""Write readings of ``monitor`` as CSV, so that each row is complete or missing even if the writer is killed."""

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
    """Return the values by column; the columns depend on the machine and on whether a run is monitored."""
    row: dict[str, Any] = {"time_s": f"{reading.time_s:.3f}"}
    for level in reading.levels:
        name = _column(level.name)
        row |= {f"{name}_used_bytes": level.used_bytes, f"{name}_total_bytes": level.total_bytes}
    if reading.run is not None:
        values = {item.name: getattr(reading.run, item.name) for item in fields(RunReading)}
        row |= {f"run_{name}": "" if value is None else value for name, value in values.items()}
    return row


def _column(name: str) -> str:
    """Return a column name such as ram, container_limit or cuda_0, without the GPU's name, which may hold anything."""
    kind = re.match(r"[a-z]+:\d+", name)
    return re.sub(r"\W+", "_", kind[0] if kind else name.lower())


class CsvLog:
    """Appends readings to ``path``, or to standard output for "-"; each row is one unbuffered write. An incomplete row
    that a killed writer left is cut off. Raises StorageError if the file cannot be written or has other columns."""

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
        """Return whether the header must be written; cut off an incomplete last row."""
        if self._path is None or not self._path.exists():
            return True
        try:
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self._path, len(whole))
        except OSError as error:
            raise self._storage_error(error) from error
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
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._path}: {error.strerror}; give another file with --csv")


def _line(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
