"""A run, looked at again and again until it ends. The data of a screen; drawing it is the command line's."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.runs.process import Machine
from scu_trainer.runs.progress import last_lines, last_warning, tail
from scu_trainer.runs.state import Report, report
from scu_trainer.runs.store import Run

LOG_LINES = 6
FOLLOW_EVERY_S = 0.25


@dataclass(frozen=True)
class View:
    """One look: the report, the last lines that the run printed, and the last warning in its log."""

    report: Report
    lines: tuple[str, ...]
    warning: Optional[str]


def log_of(run: Run) -> Path:
    """What it prints; of a run that was started by hand the log of the libraries, the only one there is."""
    return run.console if run.console.is_file() else run.path / "logs" / "train.log"


def watch(run: Run, refresh_s: float, machine: Machine, sleep: Callable[[float], None] = time.sleep) -> Iterator[View]:
    """A view every ``refresh_s`` seconds; the last one is of the run that has ended."""
    while True:
        found = report(run, machine)
        yield View(found, tuple(last_lines(log_of(run), LOG_LINES)), last_warning(run))
        if not found.state.is_alive:
            return
        sleep(refresh_s)


def follow(run: Run, lines: int, machine: Machine, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """The last ``lines`` lines of the log, then what is added, until the run has ended. Text as it stands there."""
    path = log_of(run)
    read_bytes = _size_bytes(path)  # before reading: what is printed meanwhile comes next
    text, end = "\n".join(last_lines(path, lines, read_bytes)), tail(path, 1, read_bytes)
    yield text + end if text and end in ("\n", "\r") else text
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # half of a letter may have been written
    while True:
        is_alive = report(run, machine).state.is_alive  # before reading: what it printed last is there by then
        added, read_bytes = _added(path, read_bytes)
        text = decoder.decode(added, final=not is_alive)
        if text:
            yield text
        if not is_alive:
            return
        sleep(FOLLOW_EVERY_S)


def _added(path: Path, read_bytes: int) -> tuple[bytes, int]:
    """What stands after the first ``read_bytes``, and how far that is. A log that is shorter was rotated."""
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
