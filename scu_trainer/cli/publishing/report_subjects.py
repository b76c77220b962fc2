"""Finds the runs of a report by path or name, and reads them with the state of their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.figures import first_few
from scu_trainer.report.ablation import Comparison, read_comparison
from scu_trainer.report.comparison.report import COMPARISON_FILE, is_comparison
from scu_trainer.report.files import BEGUN, STATUS_FILE, RunFiles, has_begun, is_run, read_run
from scu_trainer.runs.process import System
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run, all_runs

LOCK_FILE = "_run.lock"
QUIET_S = 60.0
"""A comparison with unfinished runs counts as stopped if none is alive and its file did not change for this time."""


@dataclass(frozen=True)
class ReportSubjects:
    """What a report is about: ``runs``, with their names in the report, or the folder of one comparison."""

    runs: tuple[Run, ...]

    @property
    def is_comparison(self) -> bool:
        """Whether this is a comparison. Checked each time, because the report may be waiting for it to start."""
        return is_comparison(self.runs[0].path)

    def read(self) -> list[RunFiles] | Comparison:
        if self.is_comparison:
            return read_comparison(self.runs[0].path)
        return [read_run(run.path, run.name, *_state(run)) for run in self.runs]

    def is_alive(self) -> bool:
        """Whether a run is still running or expected."""
        if self.is_comparison:
            return _is_under_way(read_comparison(self.runs[0].path))
        return any(_state(run)[2] for run in self.runs)

    def may_write(self, folder: Path) -> bool:
        """Whether a report may be written to ``folder``. It must not be inside a run that has not started, because
        training needs that folder to be empty."""
        place = folder.resolve()
        inside = [run.path for run in self.runs if run.path.resolve() in (place, *place.parents)]
        return self.is_comparison or all(has_begun(run) for run in inside)


def find_subjects(words: Sequence[str], root: Path, waits: bool) -> ReportSubjects:
    """Return what the report is about. ``waits``: whether a run may not exist yet. Raises SettingsError for anything
    that is not a run or a comparison."""
    folders = [_folder(word, root) for word in words]
    if any(is_comparison(folder) for folder in folders):
        if len(folders) > 1:
            raise SettingsError("a comparison cannot be combined with others: give only its folder, or only runs")
        return ReportSubjects((Run(folders[0], folders[0].name),))
    for folder, word in zip(folders, words, strict=True):
        if not is_run(folder) and not (waits and _may_become_run(folder)):
            raise SettingsError(_not_a_run_message(folder, word, root))
    absolute = [Path(os.path.abspath(folder)) for folder in folders]  # unlike ``resolve``, keeps the names of links
    repeated = next((word for word, path in zip(words, absolute, strict=True) if absolute.count(path) > 1), None)
    if repeated is not None:
        raise SettingsError(f"{repeated} is given twice; give each run once")
    return ReportSubjects(tuple(map(Run, folders, _distinct_names(absolute))))


def require_begun(wanted: ReportSubjects, folder: Path) -> None:
    """Raise SettingsError if the report would be written into a run that has not started."""
    if not wanted.may_write(folder):
        raise SettingsError(
            f"{folder} belongs to a run that has not started to train, and needs to be empty for it; add "
            f"--watch to wait for it, or give another --output"
        )


def _may_become_run(folder: Path) -> bool:
    """Whether a training may be about to start in ``folder``. It locks the folder while it loads."""
    return not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE})


def _folder(word: str, root: Path) -> Path:
    path = Path(word)
    return path if path.exists() or not (root / word).is_dir() else root / word


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, with parent folders if two have the same name."""
    names, depth = [folder.name for folder in folders], 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
    return names


def _not_a_run_message(folder: Path, word: str, root: Path) -> str:
    if not folder.exists():
        known = [run.name for run in all_runs(root)]
        listed = f"; runs in {root}: {first_few(known, 8)}" if known else ""
        return f"{word} does not exist{did_you_mean(Path(word).name, known)}{listed}; give the directory of a run"
    below = folder / "runs" if (folder / "runs").is_dir() else folder  # a sweep has its runs in there
    inside = [path.name for path in sorted(below.iterdir()) if is_run(path)] if below.is_dir() else []
    runs = f"; it holds runs: {first_few(inside, 8)}; give one of them, as {below / inside[0]}" if inside else ""
    files = ", ".join((STATUS_FILE, *BEGUN[:3], COMPARISON_FILE))
    return f"{folder} is not the directory of a run or comparison: it holds none of {files} and the like" + (
        runs or "; give a directory that scu-trainer train or compare wrote"
    )


def _is_under_way(comparison: Comparison) -> bool:
    """Whether a comparison has unfinished runs and is still being worked on."""
    if not comparison.is_alive:
        return False
    is_recent = time.time() - (comparison.folder / COMPARISON_FILE).stat().st_mtime < QUIET_S
    return is_recent or any(_state(Run(run.folder, run.name))[2] for run in comparison.runs.values())


def _state(run: Run) -> tuple[str, str, bool]:
    """Return (state, its description, whether something is still to come)."""
    if not is_run(run.path):
        return "not there yet", "its folder does not exist yet", True
    if not (run.path / STATUS_FILE).is_file() and not run.folder.is_dir():
        return "unknown", "without run.json, which your own script does not write, its end is unknown", False
    state = report(run, System()).state
    return state.status, state.detail, state.is_alive
