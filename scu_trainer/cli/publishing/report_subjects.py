"""Which runs a report is about: found by path or name, read with the state of their process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scu_trainer.errors import SettingsError, nearest
from scu_trainer.report.ablation import Comparison, read_comparison
from scu_trainer.report.comparison.report import COMPARISON_FILE, is_comparison
from scu_trainer.report.files import BEGUN, STATUS_FILE, RunFiles, has_begun, is_run, read_run
from scu_trainer.runs.process import Machine
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run, all_runs

MOST_NAMED = 8
LOCK_FILE = "_run.lock"
QUIET_S = 60.0
"""A comparison with runs to come, none of which is alive for longer than this, has been stopped."""


@dataclass(frozen=True)
class Wanted:
    """``folders``: of the runs, or the one of a comparison; ``names``: what the report calls them."""

    folders: tuple[Path, ...]
    names: tuple[str, ...]

    @property
    def is_comparison(self) -> bool:
        """Looked at again: a comparison may be waited for."""
        return is_comparison(self.folders[0])

    def read(self) -> list[RunFiles] | Comparison:
        if self.is_comparison:
            return read_comparison(self.folders[0])
        return [_read(folder, name) for folder, name in zip(self.folders, self.names, strict=True)]

    def is_alive(self) -> bool:
        """Whether anything is still to come."""
        if self.is_comparison:
            return _is_under_way(read_comparison(self.folders[0]))
        return any(_state(folder, name)[2] for folder, name in zip(self.folders, self.names, strict=True))

    def may_write(self, folder: Path) -> bool:
        """A report inside of a run that has not begun would take the place that training locks for itself."""
        place = folder.resolve()
        inside = [run for run in self.folders if run.resolve() in (place, *place.parents)]
        return self.is_comparison or all(has_begun(run) for run in inside)


def find(words: Sequence[str], root: Path, waits: bool) -> Wanted:
    """Raises SettingsError for what is no run. ``waits``: one that is not there yet may come."""
    folders = [_folder(word, root) for word in words]
    if any(is_comparison(folder) for folder in folders):
        if len(folders) > 1:
            raise SettingsError("a comparison is reported alone: give its folder, or only folders of runs")
        return Wanted(tuple(folders), (folders[0].name,))
    for folder, word in zip(folders, words, strict=True):
        if not is_run(folder) and not (waits and _may_become_one(folder)):
            raise SettingsError(_no_run(folder, word, root))
    absolute = [Path(os.path.abspath(folder)) for folder in folders]  # without "..", and links keep their names
    twice = next((word for word, place in zip(words, absolute, strict=True) if absolute.count(place) > 1), None)
    if twice is not None:
        raise SettingsError(f"{twice} is given twice; give each run once")
    return Wanted(tuple(folders), tuple(_names(absolute)))


def require_begun(wanted: Wanted, folder: Path) -> None:
    """Raise SettingsError where the report would be written into a run that has not begun."""
    if not wanted.may_write(folder):
        raise SettingsError(
            f"{folder} belongs to a run that has not started to train, and needs to be empty for it; add "
            f"--watch to wait for it, or give another --output"
        )


def _may_become_one(folder: Path) -> bool:
    """Whether training may be about to write there: it locks a folder while it loads."""
    return not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE})


def _folder(word: str, root: Path) -> Path:
    path = Path(word)
    return path if path.exists() or not (root / word).is_dir() else root / word


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders; with those above where two are called the same."""
    names, depth = [folder.name for folder in folders], 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
    return names


def _no_run(folder: Path, word: str, root: Path) -> str:
    if not folder.exists():
        known = [run.name for run in all_runs(root)]
        there = f"; runs in {root}: {_listed(known)}" if known else ""
        return f"{word} is not there{nearest(Path(word).name, known)}{there}; give the directory of a run"
    below = folder / "runs" if (folder / "runs").is_dir() else folder  # where a sweep keeps them
    inside = [path.name for path in sorted(below.iterdir()) if is_run(path)] if below.is_dir() else []
    runs = f"; it holds runs: {_listed(inside)}; give one of them, as {below / inside[0]}" if inside else ""
    files = ", ".join((STATUS_FILE, *BEGUN[:3], COMPARISON_FILE))
    return f"{folder} is not the directory of a run or comparison: it holds none of {files} and the like" + (
        runs or "; give a directory that scu-trainer train or compare wrote"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def _read(folder: Path, name: str) -> RunFiles:
    state, detail, is_alive = _state(folder, name)
    return read_run(folder, name, state, detail, is_alive)


def _is_under_way(found: Comparison) -> bool:
    """Whether runs of it are still to come, and somebody is about to run them."""
    if not found.is_alive:
        return False
    is_recent = time.time() - (found.folder / COMPARISON_FILE).stat().st_mtime < QUIET_S
    return is_recent or any(_state(run.folder, run.name)[2] for run in found.runs.values())


def _state(folder: Path, name: str) -> tuple[str, str, bool]:
    """(state, in words, whether something is still to come)."""
    if not is_run(folder):
        return "not there yet", "its folder does not exist yet", True
    if not (folder / STATUS_FILE).is_file() and not (folder / "background").is_dir():
        return "unknown", "without run.json, which your own script does not write, it is not known how it ended", False
    found = report(Run(folder, name), Machine()).state
    return found.status, found.detail, found.is_alive
