"""Access only to run directories in one root folder: no name or link can lead out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from scu_trainer.errors import SettingsError
from scu_trainer.report.files import is_run
from scu_trainer.runs.store import FOLDER, Run

READ_FOLDERS = (".", FOLDER, "logs")
"""Folders of a run in which the board opens files."""


class NoSuchRun(SettingsError):
    """There is no run of this name, or no longer."""


def runs_below(root: Path) -> list[Run]:
    """Return every run directly in ``root``. Other folders, and links that lead out of ``root``, are skipped."""
    if not root.is_dir():
        return []
    real = root.resolve()
    with os.scandir(root) as entries:
        paths = [root / entry.name for entry in entries if not entry.is_symlink() or _is_below(Path(entry), real)]
    return [Run(path, path.name) for path in paths if is_run(path)]


def run_below(root: Path, name: str) -> Run:
    """Return the run ``name``. Raises NoSuchRun, and SettingsError if a link in it leads out of ``root``."""
    path = root / name
    is_name = name not in ("", ".", "..") and not any(sign in name for sign in ("/", "\\", "\0"))
    if not is_name or not _is_below(path, root.resolve()) or not is_run(path):
        raise NoSuchRun(f"there is no run {name!r} in {root}")
    run = Run(path, name)
    if (link := link_out(run)) is not None:
        raise SettingsError(f"{name} is not shown: {link} is a link that leads out of {root}; replace it with a copy")
    return run


def can_answer(run: Run) -> bool:
    """Whether the run has saved a model or an adapter that can answer."""
    return any(os.path.isfile(run.path / name) for name in ("adapter_config.json", "config.json"))


def file_stamps(run: Run, names: Iterable[str]) -> tuple:
    """Return a value that changes whenever one of the run's files ``names`` does."""
    return tuple(_stamp(run.path / name) for name in names)


def _stamp(path: Path) -> Optional[tuple[int, int, int]]:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def link_out(run: Run) -> Optional[str]:
    """Return the first link in ``run`` that leads out of the root, as a path relative to the run; None if none does."""
    real = run.path.parent.resolve()
    for folder in READ_FOLDERS:
        try:
            with os.scandir(run.path / folder) as entries:
                links = [entry.name for entry in entries if entry.is_symlink()]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        for name in links:
            if not _is_below(run.path / folder / name, real):
                return os.path.normpath(os.path.join(folder, name))
    return None


def _is_below(path: Path, real_root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(real_root)
    except (OSError, RuntimeError, ValueError):  # a cycle of links, or not a valid file name
        return False
