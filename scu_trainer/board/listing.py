"""All runs as rows of a table, quick also where there are a thousand: a run that has ended is read once, and again only
when its files change. No history is read, only the ends of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.board.folders import link_out, runs_below, signs_of
from scu_trainer.report.pages import MOODS
from scu_trainer.runs import words
from scu_trainer.runs.process import Machine
from scu_trainer.runs.progress import Progress
from scu_trainer.runs.state import Report, RunState, report
from scu_trainer.runs.store import FOLDER, Run

ROWS_PER_PAGE = 50
SIGNS = ("run.json", f"{FOLDER}/start.json", f"{FOLDER}/stop")
"""One of them changes whenever the state of a run does."""


@dataclass(frozen=True)
class Choice:
    """A page of the rows that were asked for. ``states``: those that there are, each with its number of runs."""

    rows: Sequence[Report]
    found: int
    page: int
    pages: int
    states: Sequence[tuple[str, int]]


class Listing:
    """Of the runs below ``root``. Used by several threads: a report that two of them read is the same report."""

    def __init__(self, root: Path, machine: Optional[Machine] = None) -> None:
        self.root, self._machine = root, machine or Machine()
        self._kept: dict[str, tuple[tuple, Report]] = {}

    def rows(self) -> list[Report]:
        """Newest first."""
        found = {run.name: self._row(run) for run in runs_below(self.root)}
        self._kept = {name: kept for name, kept in self._kept.items() if name in found}
        return sorted((row for row in found.values() if row), key=lambda row: (-_started_s(row), row.run.name))

    def choose(self, name: str = "", state: str = "", page: int = 1) -> Choice:
        """``name``: a part of it. ``page``: from 1 on; one past the end is the last."""
        named = [row for row in self.rows() if name.lower() in row.run.name.lower()]
        states = [row.state.status for row in named]
        rows = [row for row in named if state in ("", row.state.status)]
        pages = max(1, -(-len(rows) // ROWS_PER_PAGE))
        page = min(max(1, page), pages)
        shown = rows[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
        return Choice(shown, len(rows), page, pages, sorted(Counter(states).items()))

    def _row(self, run: Run) -> Optional[Report]:
        """None where the folder is gone since."""
        signs = signs_of(run, SIGNS)
        before = self._kept.get(run.name)
        if before is not None and before[0] == signs and not before[1].state.is_alive:
            return before[1]
        row = look_at(run, self._machine)
        if not run.path.is_dir():
            return None
        self._kept[run.name] = (signs, row)
        return row


def look_at(run: Run, machine: Machine) -> Report:
    """As ``report``; what is in the files of one run, whatever it is, must not hide the others."""
    try:
        if (link := link_out(run)) is not None:
            return _unreadable(run, f"{link} is a link that leads out of {run.path.parent}")
        found = report(run, machine)
        list(words.facts(found))
        return found
    except Exception as error:
        return _unreadable(run, f"its files contain what no run writes: {type(error).__name__}: {error}")


def _unreadable(run: Run, why: str) -> Report:
    return Report(run, RunState("unreadable", why, "error"), Progress())


def mood(status: str) -> str:
    return MOODS.get(status, "bad")


def started(found: Report) -> str:
    started_s = _started_s(found)
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started_s)) if started_s else words.NONE


def _started_s(found: Report) -> float:
    """Of a run that waits: when it was asked for; of one whose files say nothing: when its folder changed."""
    if found.progress.started_s is not None:
        return found.progress.started_s
    if found.record is not None:
        return found.record.asked_s
    try:
        return found.run.path.stat().st_mtime
    except OSError:
        return 0.0
