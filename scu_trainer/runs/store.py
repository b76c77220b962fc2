"""Background runs on disk: a folder for each below a root, with a record of how it was started. There is no index.

runs/NAME/                  what training writes, see run_files.py
    run.json                status, step, loss; "queued" until training begins
    background/start.json   the record: command, process, device, how it ended
    background/config.yaml  a copy of the configuration at the start: later edits of the original change nothing
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

from scu_trainer.errors import SettingsError, StorageError, did_you_mean
from scu_trainer.figures import first_few
from scu_trainer.json_types import misfit
from scu_trainer.run_files import read_json, read_status, write_json
from scu_trainer.runs.process import Identity

ROOT = Path("runs")
FOLDER = "background"
NAME = re.compile(r"[^\W_][\w.-]{0,63}")  # letters of any alphabet
ENDED_STATUSES = ("stopped", "finished", "failed")
"""Statuses of run.json after which no process is expected."""


@dataclass(frozen=True)
class Options:
    """The options of a start. ``device``: "auto", "cpu", or a name such as "gpu-1"."""

    launcher: str = "python"
    device: str = "auto"
    nice: int = 10
    threads: Optional[int] = None
    max_ram_percent: float = 90.0
    max_gpu_percent: float = 90.0
    numa_node: str = "auto"


@dataclass(frozen=True)
class RunRecord:
    """The content of start.json. It is written by ``start`` until the process has registered itself, then only by that
    process, and by others only after the process has ended.

    Fields:
        token: new at each start; every process of the run has it in its environment.
        directory: where the run was when it was started.
        flags: flags of the training command, without those for the configuration and the output directory.
        environment: variables that a resume from another shell must set again; none of them is secret.
        asked_s: when this start was requested, in seconds since 1970.
        starts: the number of this start, from 1.
        goes_on: whether this start resumes the run.
        spawner: the process that started the run.
        process: the process of the run; None until it has registered itself.
        phase: "spawned", "queued" or "training".
        waiting: what the run waits for, while it is queued.
        exit_code: None while the run is alive, if it was killed before it could write the code, and under a launcher,
            which replaces the process that would write it.
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
    """One run directory, whether the run was started in the background or not."""

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
        """A file that the first request to stop creates, and the next start removes."""
        return self.folder / "stop"

    def status(self) -> dict[str, Any]:
        """Return the content of run.json, or {} if there is none yet. Raises StorageError if it cannot be read."""
        path = self.path / "run.json"
        return read_status(path) if path.is_file() else {}

    def record(self) -> Optional[RunRecord]:
        """Return the record of the start; None for a run that is not in the background. Raises StorageError."""
        path = self.folder / "start.json"
        return _parse_record(read_json(path), path) if path.is_file() else None

    def copied_from(self, record: RunRecord) -> Optional[Path]:
        """Return the directory that this is a copy of (``cp -r``), if both still hold ``record``; otherwise None."""
        original = Run(Path(record.directory))
        if not os.path.isfile(original.folder / "start.json") or os.path.samefile(original.path, self.path):
            return None
        found = original.record()
        return original.path if found is not None and found.token == record.token else None

    def write(self, record: RunRecord) -> RunRecord:
        write_json(self.folder / "start.json", asdict(record))
        return record

    def change(self, **changes: Any) -> RunRecord:
        """Change fields of the record, write it, and return it. Raises StorageError if there is no record."""
        before = self.record()
        if before is None:
            raise StorageError(f"{self.folder / 'start.json'} is gone; start the run again")
        return self.write(replace(before, **changes))


def _parse_record(content: Any, path: Path) -> RunRecord:
    try:
        content = {"directory": str(path.absolute().parents[1]), **content}  # older records lack this field
        known = {item.name: content[item.name] for item in fields(RunRecord)}
        wrong = misfit(known, RunRecord, "the record", null_is_nan=False)
        if wrong is not None:
            raise TypeError(wrong)
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
            f"{name!r} cannot be the name of a run; use at most 64 letters, digits, '.', '_' and '-', and begin with a "
            "letter or digit"
        )


def all_runs(root: Path) -> list[Run]:
    """Return all runs directly below ``root``, sorted by name."""
    if not root.is_dir():
        return []
    return [Run(path, path.name) for path in sorted(root.iterdir()) if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Whether ``path`` is a run. A folder without read permission counts as one, and is reported as unreadable."""
    try:
        return path.is_dir() and ((path / "run.json").is_file() or (path / FOLDER / "start.json").is_file())
    except OSError:
        return True


def find_run(name: str, root: Path) -> Run:
    """Return the run ``name`` below ``root``, or in the directory ``name``. Raises SettingsError, which suggests a
    name, if there is none."""
    for path in (root / name, Path(name)):
        if _is_run(path):
            return Run(path, path.absolute().name)
    known = [run.name for run in all_runs(root)]
    listed = f"; runs: {first_few(known, 8)}" if known else "; there is none yet"
    raise SettingsError(f"no run {name!r} in {root}{did_you_mean(name, known)}{listed}")


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return ``wanted``, or the first of wanted-2, wanted-3, ... that is not in ``taken``."""
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in taken)
