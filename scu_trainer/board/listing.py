"""All runs as rows of a table, quick also where there are a thousand: a run that has ended is read once, and again only
when its files change. No history is read, only the ends of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.board.folders import link_out, runs_below, signs_of
from scu_trainer.figures import bits_of
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
class Row:
    """Texts, as they are shown. ``started_s``: seconds since 1970."""

    name: str
    status: str
    status_words: str
    detail: str
    mood: str
    steps: str
    loss: str
    device: str
    started_s: float
    started: str
    is_alive: bool


@dataclass(frozen=True)
class Choice:
    """A page of the rows that were asked for. ``states``: those that there are, each with its number of runs."""

    rows: Sequence[Row]
    found: int
    page: int
    pages: int
    states: Sequence[tuple[str, int]]


class Listing:
    """Of the runs below ``root``. Used by several threads: a row that two of them read is the same row."""

    def __init__(self, root: Path, machine: Optional[Machine] = None) -> None:
        self.root, self._machine = root, machine or Machine()
        self._kept: dict[str, tuple[tuple, Row]] = {}

    def rows(self) -> list[Row]:
        """Newest first."""
        found = {run.name: self._row(run) for run in runs_below(self.root)}
        self._kept = {name: kept for name, kept in self._kept.items() if name in found}
        return sorted((row for row in found.values() if row), key=lambda row: (-row.started_s, row.name))

    def choose(self, name: str = "", state: str = "", page: int = 1) -> Choice:
        """``name``: a part of it. ``page``: from 1 on; one past the end is the last."""
        named = [row for row in self.rows() if name.lower() in row.name.lower()]
        counts = {one: sum(row.status == one for row in named) for one in sorted({row.status for row in named})}
        rows = [row for row in named if state in ("", row.status)]
        pages = max(1, -(-len(rows) // ROWS_PER_PAGE))
        page = min(max(1, page), pages)
        shown = rows[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
        return Choice(shown, len(rows), page, pages, list(counts.items()))

    def _row(self, run: Run) -> Optional[Row]:
        """None where the folder is gone since."""
        signs = signs_of(run, SIGNS)
        before = self._kept.get(run.name)
        if before is not None and before[0] == signs and not before[1].is_alive:
            return before[1]
        row = row_of(look_at(run, self._machine))
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


def row_of(found: Report) -> Row:
    started_s = _started_s(found)
    return Row(
        name=found.run.name,
        status=found.state.status,
        status_words=words.status_words(found),
        detail=found.state.detail,
        mood=mood(found.state.status),
        steps=words.steps(found.progress),
        loss=words.number(None if found.progress.loss is None else bits_of(found.progress.loss)),
        device=words.devices(found),
        started_s=started_s,
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(started_s)) if started_s else words.NONE,
        is_alive=found.state.is_alive,
    )


def mood(status: str) -> str:
    return MOODS.get(status, "bad")


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
