"""List all runs as rows of a table. It is fast even for a thousand runs: a run that has ended is read once, and again
only if its files change, and of a history only the end is read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.board.folders import file_stamps, link_out, runs_below
from scu_trainer.report.pages import STATE_STYLES
from scu_trainer.runs import words
from scu_trainer.runs.process import System
from scu_trainer.runs.progress import RunProgress
from scu_trainer.runs.state import Report, RunState, report
from scu_trainer.runs.store import FOLDER, Run

ROWS_PER_PAGE = 50
SIGNS = ("run.json", f"{FOLDER}/start.json", f"{FOLDER}/stop")
"""Files that show a change of a run's state: at least one of them changes with it."""


@dataclass(frozen=True)
class Choice:
    """A page of the ``found`` rows that match a filter. ``states``: how many runs are in each state."""

    rows: Sequence[Report]
    found: int
    page: int
    pages: int
    states: Sequence[tuple[str, int]]


class Listing:
    """The runs in ``root``. Several threads may use it: if two of them read the same run, the reports are the same."""

    def __init__(self, root: Path, machine: Optional[System] = None) -> None:
        self.root, self._machine = root, machine or System()
        self._kept: dict[str, tuple[tuple, Report]] = {}

    def rows(self) -> list[Report]:
        """Return a report of each run, newest first."""
        rows = {run.name: self._row(run) for run in runs_below(self.root)}
        self._kept = {name: kept for name, kept in self._kept.items() if name in rows}
        return sorted((row for row in rows.values() if row), key=lambda row: (-_started_s(row), row.run.name))

    def choose(self, name: str = "", state: str = "", page: int = 1) -> Choice:
        """Return a page of the runs with ``name`` in their names, in ``state``. ``page``: from 1; at most the last."""
        named = [row for row in self.rows() if name.lower() in row.run.name.lower()]
        states = [row.state.status for row in named]
        rows = [row for row in named if state in ("", row.state.status)]
        pages = max(1, -(-len(rows) // ROWS_PER_PAGE))
        page = min(max(1, page), pages)
        shown = rows[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
        return Choice(shown, len(rows), page, pages, sorted(Counter(states).items()))

    def _row(self, run: Run) -> Optional[Report]:
        """Return the report of a run, cached if it has ended and not changed; None if its folder has been deleted."""
        signs = file_stamps(run, SIGNS)
        before = self._kept.get(run.name)
        if before is not None and before[0] == signs and not before[1].state.is_alive:
            return before[1]
        row = report_or_unreadable(run, self._machine)
        if not run.path.is_dir():
            return None
        self._kept[run.name] = (signs, row)
        return row


def report_or_unreadable(run: Run, machine: System) -> Report:
    """Return ``report``, or an "unreadable" one if that fails, so that a run with broken files hides no others."""
    try:
        if (link := link_out(run)) is not None:
            return _unreadable(run, f"{link} is a link that leads out of {run.path.parent}")
        row = report(run, machine)
        list(words.facts(row))
        return row
    except Exception as error:
        return _unreadable(run, f"its files have content that no run writes: {type(error).__name__}: {error}")


def _unreadable(run: Run, why: str) -> Report:
    return Report(run, RunState("unreadable", why, "error"), RunProgress())


def pill_class(status: str) -> str:
    return STATE_STYLES.get(status, "bad")


def started(row: Report) -> str:
    started_s = _started_s(row)
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started_s)) if started_s else words.NONE


def _started_s(row: Report) -> float:
    """Return when a run started; if it waits, when it was requested; if no file says, when its folder changed."""
    if row.progress.started_s is not None:
        return row.progress.started_s
    if row.record is not None:
        return row.record.asked_s
    try:
        return row.run.path.stat().st_mtime
    except OSError:
        return 0.0
