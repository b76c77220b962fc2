"""Watch a run until it ends. This module provides the data that a monitor shows; the command line draws it."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.runs.process import System
from scu_trainer.runs.progress import last_lines, last_warning, tail
from scu_trainer.runs.state import Report, report
from scu_trainer.runs.store import Run

LOG_LINES = 6
FOLLOW_EVERY_S = 0.25


@dataclass(frozen=True)
class RunView:
    """One snapshot of a run: its report, the last lines that it printed, and the last warning in its log."""

    report: Report
    lines: tuple[str, ...]
    warning: Optional[str]


def log_of(run: Run) -> Path:
    """Return the file with the output of ``run``. A run that was started by hand has only the log of the libraries."""
    return run.console if run.console.is_file() else run.path / "logs" / "train.log"


def watch(
    run: Run, refresh_s: float, machine: System, sleep: Callable[[float], None] = time.sleep
) -> Iterator[RunView]:
    """Yield a view every ``refresh_s`` seconds. The last view shows the run after its end."""
    while True:
        found = report(run, machine)
        yield RunView(found, tuple(last_lines(log_of(run), LOG_LINES)), last_warning(run))
        if not found.state.is_alive:
            return
        sleep(refresh_s)


def follow(run: Run, lines: int, machine: System, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield the last ``lines`` lines of the log, then the text that is added to it, until the run has ended."""
    path = log_of(run)
    read_bytes = _size_bytes(path)  # taken before reading: text that is printed meanwhile is yielded next
    text, end = "\n".join(last_lines(path, lines, read_bytes)), tail(path, 1, read_bytes)
    yield text + end if text and end in ("\n", "\r") else text
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # the file may end inside a character
    while True:
        is_alive = report(run, machine).state.is_alive  # checked before reading, so that the last output is not missed
        added, read_bytes = _read_added(path, read_bytes)
        text = decoder.decode(added, final=not is_alive)
        if text:
            yield text
        if not is_alive:
            return
        sleep(FOLLOW_EVERY_S)


def _read_added(path: Path, read_bytes: int) -> tuple[bytes, int]:
    """Return the content after the first ``read_bytes`` bytes, and the new number of bytes read. A log that is shorter
    than that was rotated, and is read from its start."""
    size_bytes = _size_bytes(path)
    read_bytes = 0 if size_bytes < read_bytes else read_bytes
    if size_bytes == read_bytes:
        return b"", read_bytes
    with open(path, "rb") as file:
        file.seek(read_bytes)
        content = file.read()
    return content, read_bytes + len(content)


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
