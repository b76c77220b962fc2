"""Where background runs are: folders below a root, and in each a record of how it was started. No list beside them.

runs/NAME/                  what training writes, see run_files.py
    run.json                status, step, loss; "queued" until training begins
    background/start.json   the record: command, process, device, how it ended
    background/config.yaml  the configuration as it was at the start: a file that is edited later changes nothing
    background/console.log  what the run prints
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import SettingsError, StorageError, nearest
from scu_trainer.run_files import read_json, read_status, write_json
from scu_trainer.runs.process import Identity

ROOT = Path("runs")
FOLDER = "background"
NAME = re.compile(r"[^\W_][\w.-]{0,63}")  # letters of any alphabet
ENDED = ("stopped", "finished", "failed")
"""Statuses of run.json after which no process is expected."""


@dataclass(frozen=True)
class Options:
    """What was asked for at the start. ``device``: "auto", "cpu", or a name such as "gpu-1"."""

    launcher: str = "python"
    device: str = "auto"
    nice: int = 10
    threads: Optional[int] = None
    max_ram_percent: float = 90.0
    max_gpu_percent: float = 90.0
    numa_node: str = "auto"


@dataclass(frozen=True)
class RunRecord:
    """start.json. Written by ``start`` until the process has registered itself, then by that process alone, and by
    others only once it is dead.

    Fields:
        token: new at each start; every process of the run has it in its environment.
        directory: where the run was when it was started.
        flags: of the training command, without those for configuration and place.
        environment: variables that a resume from another shell must find again; nothing secret.
        asked_s: when this start was asked for, in seconds since 1970.
        spawner, process: who started it, and the run itself; None until it has registered.
        phase: "spawned", "queued", "training".
        waiting: for what, in words, while it is queued.
        exit_code: None while it runs, and where it had no time for last words.
    """

    token: str
    directory: str
    flags: tuple[str, ...]
    options: Options
    cwd: str
    environment: dict[str, str]
    asked_s: float
    spawner: Identity
    starts: int = 1
    goes_on: bool = False
    process: Optional[Identity] = None
    devices: tuple[str, ...] = ()
    phase: str = "spawned"
    waiting: Optional[str] = None
    notes: tuple[str, ...] = ()
    exit_code: Optional[int] = None
    ended: Optional[str] = None


@dataclass(frozen=True)
class Run:
    """One run directory, started in the background or not."""

    path: Path
    name: str = field(default="", compare=False)

    @property
    def folder(self) -> Path:
        return self.path / FOLDER

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def stop_request(self) -> Path:
        """There from the first request to stop on; the next start removes it."""
        return self.folder / "stop"

    def status(self) -> dict[str, Any]:
        """Content of run.json, {} before there is one. Raises StorageError."""
        path = self.path / "run.json"
        return read_status(path) if path.is_file() else {}

    def record(self) -> Optional[RunRecord]:
        """None where the run was not started in the background. Raises StorageError."""
        path = self.folder / "start.json"
        return _record(read_json(path), path) if path.is_file() else None

    def copied_from(self, record: RunRecord) -> Optional[Path]:
        """The directory whose copy this is (``cp -r``), as long as both hold ``record``."""
        first = Run(Path(record.directory))
        if not os.path.isfile(first.folder / "start.json") or os.path.samefile(first.path, self.path):
            return None
        found = first.record()
        return first.path if found is not None and found.token == record.token else None

    def write(self, record: RunRecord) -> RunRecord:
        write_json(self.folder / "start.json", asdict(record))
        return record

    def change(self, **changes: Any) -> RunRecord:
        """The record with ``changes``, written."""
        before = self.record()
        if before is None:
            raise StorageError(f"{self.folder / 'start.json'} is gone; start the run again")
        return self.write(replace(before, **changes))


def _record(content: Any, path: Path) -> RunRecord:
    try:
        content = {"directory": str(path.absolute().parents[1]), **content}  # older records do not name it
        known = {item.name: content[item.name] for item in fields(RunRecord)}
        for name in ("flags", "devices", "notes"):
            known[name] = tuple(known[name])
        known["options"] = Options(**known["options"])
        known["spawner"] = Identity(**known["spawner"])
        known["process"] = None if known["process"] is None else Identity(**known["process"])
        return RunRecord(**known)
    except (KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is not the record of a background run ({error}); delete the folder {path.parent}"
        ) from error


# -- finding -----------------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise SettingsError(
            f"{name!r} cannot be the name of a run; take letters, digits, '.', '_' and '-', 64 at most, a letter or "
            "digit first"
        )


def all_runs(root: Path) -> list[Run]:
    """Every run directly below ``root``, by name."""
    if not root.is_dir():
        return []
    return [Run(path, path.name) for path in sorted(root.iterdir()) if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Also one that its owner alone may look into: what is said of it is that it cannot be read."""
    try:
        return path.is_dir() and ((path / "run.json").is_file() or (path / FOLDER / "start.json").is_file())
    except OSError:
        return True


def find(name: str, root: Path) -> Run:
    """The run called ``name`` below ``root``, or in the directory ``name``. Raises SettingsError with the nearest."""
    for path in (root / name, Path(name)):
        if _is_run(path):
            return Run(path, path.absolute().name)
    known = [run.name for run in all_runs(root)]
    listed = f"; there: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}" if known else "; there is none yet"
    raise SettingsError(f"no run {name!r} in {root}{nearest(name, known)}{listed}")


def free_name(wanted: str, taken: Collection[str]) -> str:
    """``wanted``, or the first of wanted-2, wanted-3, ... that is free."""
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in taken)
