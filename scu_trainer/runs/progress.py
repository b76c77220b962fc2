"""The progress of a run, read from its files: the last rows, the newest complete checkpoint, the end of its logs.

Files may be long, so they are read from the end. A row that is still being written is skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

from scu_trainer.run_files import open_regular, read_object_or_none
from scu_trainer.runs.store import Run

TAIL_BYTES = 16_384
MOST_TAIL_BYTES = 1 << 26
START_LINE = "---- start "
"""Prefix of the line that separates the output of each start in the console log."""

WARNING = re.compile(r"\b(?:WARNING|ERROR)\b(?: \S+:)? (.*)")


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. A field is None if its value is not known, or not yet. ``loss``: in nats per ``unit``.
    ``started_s``, ``updated_s``: when the run began and when run.json was last written, in seconds since 1970."""

    step: Optional[int] = None
    max_steps: Optional[int] = None
    loss: Optional[float] = None
    unit: str = "token"
    eta_s: Optional[float] = None
    started_s: Optional[float] = None
    updated_s: Optional[float] = None
    s: Optional[float] = None
    s_target: Optional[float] = None
    strength: Optional[float] = None
    rows_per_chunk: Optional[int] = None
    tokens_per_chunk: Optional[int] = None
    used_bytes: Optional[int] = None
    peak_bytes: Optional[int] = None
    limit_bytes: Optional[int] = None
    samples_per_second: Optional[float] = None
    checkpoint: Optional[str] = None

    @property
    def fraction(self) -> Optional[float]:
        return None if not self.max_steps or self.step is None else min(1.0, self.step / self.max_steps)


def progress(run: Run, status: Mapping[str, Any]) -> RunProgress:
    """Read the progress of ``run``. ``status``: the content of its run.json."""
    scu, memory = last_row(run.path / "scu_history.json"), last_row(run.path / "memory_history.json")
    smoothed_s, logged = _number(scu, "s_ema"), last_row(run.path / "log_history.json", "throughput/samples_per_second")
    return RunProgress(
        **{name: _number(status, name) for name in ("step", "max_steps", "loss", "eta_s")},
        unit=status.get("unit") or "token",
        started_s=seconds(status.get("started")),
        updated_s=seconds(status.get("updated")),
        s=_number(scu, "s") if smoothed_s is None else smoothed_s,
        s_target=_number(scu, "s_target"),
        strength=_number(scu, "lambda"),
        **{
            name: _number(memory, name)
            for name in ("rows_per_chunk", "tokens_per_chunk", "used_bytes", "peak_bytes", "limit_bytes")
        },
        samples_per_second=_number(logged, "throughput/samples_per_second"),
        checkpoint=newest_checkpoint(run.path, _number(status, "step")),
    )


def _number(row: Mapping[str, Any], name: str) -> Optional[float]:
    """Return a finite number that fits a float; None for anything else, which only a damaged file holds."""
    value = row.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None


def seconds(moment: Any) -> Optional[float]:
    """Convert a time in ISO format to seconds since 1970. Returns None for anything else."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return None


# -- ends of files -----------------------------------------------------------------------------------------------------


def tail(path: Path, size_bytes: int = TAIL_BYTES, end_bytes: Optional[int] = None) -> str:
    """Return the last ``size_bytes`` of a text file, or of its first ``end_bytes``; "" if the file is missing. Raises
    OSError for a folder or a pipe."""
    try:
        with open_regular(path) as file:
            end_bytes = os.fstat(file.fileno()).st_size if end_bytes is None else end_bytes
            file.seek(max(0, end_bytes - size_bytes))
            return file.read(min(size_bytes, end_bytes)).decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_lines(path: Path, count: int, end_bytes: Optional[int] = None) -> list[str]:
    """Return the last ``count`` lines of a file, or fewer. At most MOST_TAIL_BYTES are read, because a file of another
    program may be a single long line."""
    size_bytes = TAIL_BYTES
    while True:
        text = tail(path, size_bytes, end_bytes)
        lines = text.splitlines()
        is_whole = len(text.encode()) < size_bytes
        if is_whole or len(lines) > count or size_bytes >= MOST_TAIL_BYTES:
            return lines[-count:] if count else []
        size_bytes *= 4


def last_row(path: Path, holds: Optional[str] = None) -> dict[str, Any]:
    """Return the last complete row of a history file, which has one row per line; {} if there is none. ``holds``:
    return the last row with this key instead, among the last 12."""
    for line in reversed(last_lines(path, 3 if holds is None else 12)):
        try:
            row = json.loads(line.rstrip().rstrip(","))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (holds is None or holds in row):
            return row
    return {}


def last_warning(run: Run) -> Optional[str]:
    warnings = [match[1] for match in map(WARNING.search, tail(run.path / "logs" / "train.log").splitlines()) if match]
    return warnings[-1] if warnings else None


def last_error(console: Path) -> Optional[str]:
    """Return why the newest start failed: its error message, or the last line of its traceback; None without either."""
    lines = tail(console).rpartition(START_LINE)[2].splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    is_traceback = any(line.startswith("Traceback ") for line in lines)
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), "") if is_traceback else ""
    # The launcher of torch prints a traceback even if it was asked to stop.
    return None if "SignalException: " in last else last or None


# -- checkpoints -------------------------------------------------------------------------------------------------------


def newest_checkpoint(run: Path, step: Optional[int] = None) -> Optional[str]:
    """Return the name of the newest complete checkpoint, judged by the file sizes in its manifest. Checkpoints after
    ``step`` are skipped, because they belong to an earlier start."""
    numbered = ((path.name.removeprefix("checkpoint-"), path) for path in run.glob("checkpoint-*"))
    found = {int(number): path for number, path in numbered if number.isdecimal()}
    for number in sorted(found, reverse=True):
        if (step is None or number <= step) and _is_complete(found[number]):
            return found[number].name
    return None


def _is_complete(checkpoint: Path) -> bool:
    state, manifest = read_object_or_none(checkpoint / "trainer_state.json"), checkpoint / "manifest.json"
    if state is None:
        return False
    if not manifest.is_file():
        return True  # the stock Trainer writes none
    content = read_object_or_none(manifest)
    listed = None if content is None else content.get("files")
    return isinstance(listed, dict) and all(
        isinstance(entry, dict)
        and (checkpoint / name).is_file()
        and (checkpoint / name).stat().st_size == entry.get("bytes")
        for name, entry in listed.items()
    )
