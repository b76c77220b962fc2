"""Read the files of one run as far as possible. A missing or torn file is reported and never raises an error. People
and other programs may edit these files, so a value of another type is reported and left out, and all others are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TypeVar

from scu_trainer.errors import StorageError
from scu_trainer.figures import UNITS
from scu_trainer.run_files import read_json, read_regular, read_rows, read_status

T = TypeVar("T")
Row = dict[str, Any]

LOG_FILE = "log_history.json"
STOCK_LOG_FILE = "trainer_state.json"
CONTROL_FILE = "scu_history.json"
MEMORY_FILE = "memory_history.json"
CURRICULUM_FILE = "curriculum.json"
CONFIG_FILE = "training_config.json"
METRICS_FILE = "scu_metrics.json"
STATUS_FILE = "run.json"
SAMPLES_FILE = "samples.json"
SUSPECTS_FILE = "suspects.jsonl"

BEGUN = (CONFIG_FILE, LOG_FILE, CONTROL_FILE, MEMORY_FILE, CURRICULUM_FILE, STOCK_LOG_FILE)
"""Files that training writes. A folder with one of them is a run that has begun."""


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run. Rows are as in the files; a missing file has none.

    ``state``: what the run is doing, in one word; ``detail``: an explanation. ``epochs``: rows of curriculum.json.
    ``suspects``: number of rows of suspects.jsonl. ``faults``: the files that could not be read, each with the reason.
    ``has_torn_logs``: there are no logs because log_history.json is torn or is not a log.
    """

    name: str
    folder: Path
    state: str = "unknown"
    detail: str = ""
    is_alive: bool = False
    status: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    metrics: Row = field(default_factory=dict)
    logs: Sequence[Row] = ()
    control: Sequence[Row] = ()
    memory: Sequence[Row] = ()
    epochs: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    suspects: int = 0
    has_torn_logs: bool = False
    faults: tuple[str, ...] = ()

    @property
    def settings(self) -> Row:
        """The resolved configuration."""
        return self.config.get("configuration") or {}

    @property
    def unit(self) -> str:
        """The unit that bits are counted per, from scu_metrics.json, or from the task before that file exists."""
        return self.metrics.get("unit") or UNITS.get(self.settings.get("task", ""), "token")


def has_begun(folder: Path) -> bool:
    """Whether training has written any file to ``folder`` yet."""
    return any((folder / name).is_file() for name in BEGUN) or newest_stock_log(folder) is not None


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run. One that still waits in a queue is, and so is one that this user may not read."""
    try:
        waits = (folder / STATUS_FILE).is_file() or (folder / "background" / "start.json").is_file()
        return folder.is_dir() and (waits or has_begun(folder))
    except OSError:
        return True


def read_run(folder: Path, name: str, state: str = "unknown", detail: str = "", is_alive: bool = False) -> RunFiles:
    """Read all files of a run. ``name``: the name of the run in plots and tables. ``state``, ``detail`` and
    ``is_alive`` come from the caller, which can check its process."""
    reader = _Reader(folder)
    return RunFiles(
        name=name,
        folder=folder,
        state=state,
        detail=detail,
        is_alive=is_alive,
        status=reader.mapping(STATUS_FILE, read_status),
        config=reader.fitting(CONFIG_FILE, reader.mapping(CONFIG_FILE), CONFIG),
        metrics=reader.fitting(METRICS_FILE, reader.mapping(METRICS_FILE), METRICS),
        logs=reader.logs(),
        control=reader.rows(CONTROL_FILE),
        memory=reader.rows(MEMORY_FILE),
        epochs=[reader.fitting(CURRICULUM_FILE, row, EPOCH) for row in reader.rows(CURRICULUM_FILE)],
        samples=reader.rows(SAMPLES_FILE),
        suspects=reader.read(SUSPECTS_FILE, lambda path: path.read_bytes().count(b"\n"), 0),
        has_torn_logs=reader.has_torn_logs,
        faults=tuple(reader.faults),
    )


def newest_stock_log(folder: Path) -> Optional[Path]:
    """Return ``trainer_state.json``, with the stock Trainer's logs, of the folder or else of its newest checkpoint."""
    if (folder / STOCK_LOG_FILE).is_file():
        return folder / STOCK_LOG_FILE
    found = [path for path in folder.glob(f"checkpoint-*/{STOCK_LOG_FILE}") if path.parent.name[11:].isdigit()]
    return max(found, key=lambda path: int(path.parent.name[11:]), default=None)


def _is_torn(log: Path) -> bool:
    """Whether log_history.json, which gave no rows, is unreadable or is not the empty list of a run without logs."""
    try:
        return b"".join(read_regular(log).split()) != b"[]"
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


class _Reader:
    """Reads the files that exist, and collects the errors in ``faults``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults, self.has_torn_logs = folder, [], False

    def mapping(self, name: str, read: Callable[[Path], Any] = read_json) -> Row:
        content = self.read(name, read, {})
        if isinstance(content, dict):
            return content
        self.faults.append(f"{name} is not a JSON object")
        return {}

    def fitting(self, name: str, found: Row, kinds: Row) -> Row:
        return drop_wrong_types(found, kinds, self.folder / name, self.faults)

    def rows(self, name: str) -> Sequence[Row]:
        return [row for row in self.read(name, read_rows, []) if isinstance(row, dict)]

    def logs(self) -> Sequence[Row]:
        """Return the rows of log_history.json. If that is missing or torn, return those of the stock Trainer."""
        known = len(self.faults)
        rows = self.rows(LOG_FILE)
        is_torn = not rows and _is_torn(self.folder / LOG_FILE)
        if rows or ((self.folder / LOG_FILE).is_file() and not is_torn):
            return rows
        rows = self.stock_logs()
        if rows and is_torn and len(self.faults) == known:
            self.faults.append(
                f"{LOG_FILE} holds no complete row; the rows of the newest {STOCK_LOG_FILE} are shown instead"
            )
        self.has_torn_logs = is_torn and not rows
        return rows

    def stock_logs(self) -> Sequence[Row]:
        path = newest_stock_log(self.folder)
        if path is None:
            return []
        rows = self.mapping(str(path.relative_to(self.folder))).get("log_history")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def read(self, name: str, read: Callable[[Path], T], nothing: T) -> T:
        path = self.folder / name
        if not path.is_file():
            return nothing
        try:
            return read(path)
        except (StorageError, OSError) as error:
            self.faults.append(str(error))
            return nothing


# -- rows as points ----------------------------------------------------------------------------------------------------


def points(rows: Sequence[Row], name: str, x: str = "step", factor: float = 1.0) -> tuple[list[float], list[float]]:
    """Return the x and the y values of the rows that have a finite number under ``name``. ``factor`` scales y."""
    found = [(row[x], row[name] * factor) for row in rows if _is_number(row.get(x)) and _is_number(row.get(name))]
    found = [(at, value) for at, value in found if math.isfinite(at) and math.isfinite(value)]
    return [at for at, _ in found], [value for _, value in found]


def _is_number(value: Any) -> bool:
    return value is not None and _is_of_kind(value, NUMBER)


def newest(rows: Sequence[Row], name: str) -> Any:
    """Return the last value under ``name`` that is a number, or None if there is none."""
    return next((row[name] for row in reversed(rows) if _is_number(row.get(name))), None)


# -- the types of their values -----------------------------------------------------------------------------------------

NUMBER = (int, float)
EACH = "*"
"""Stands for all names that are not listed."""

INTERVAL = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
CONFIG: Row = {
    "configuration": {"task": str, "logging_steps": NUMBER},
    "changed_from": {},
    "versions": {},
    "git_commit": str,
    "world_size": int,
    "data": {},
    "preflight": [{}],
    "hardware": {"cores": NUMBER, "ram_bytes": NUMBER, "gpus": [{"total_bytes": NUMBER}]},
}
METRICS: Row = {
    **dict.fromkeys(("item", "unit"), str),
    **dict.fromkeys(("steps", "train_s", "held_out_documents", "held_out_tokens"), NUMBER),
    **{f"held_out_{what}_{when}": INTERVAL
       for what in ("bpt", "accuracy", "report_exact", "report_bpt") for when in ("before", "after", "change")},
    "held_out_sources": {EACH: {"bpt_before": INTERVAL, "bpt_after": INTERVAL}},
    "best_held_out": {"step": NUMBER, "bpt": NUMBER, "accuracy": NUMBER},
    "costs": {"peak_bytes": NUMBER},
    "memory": {"peak_bytes": NUMBER, "out_of_memory": NUMBER},
    "memory_estimate": {"predicted_peak_bytes": NUMBER, "measured_peak_bytes": NUMBER, "reason": str},
    "bad_numbers": {"skipped_steps": NUMBER, "skipped": [{}]},
    "regularization": {"overhead_fraction": NUMBER, "final_lambda": NUMBER, "verdict": str, "notices": [str]},
    "curriculum": {"notices": [str]},
    "throughput": {"notices": [str]},
}  # fmt: skip
EPOCH: Row = {
    **dict.fromkeys(("repeated", "suspects", "quarantined", "real_tokens", "padded_tokens"), NUMBER),
    "skipped": {EACH: NUMBER},
    "difficulty": {},
}


def drop_wrong_types(found: Row, kinds: Row, file: Any, faults: list[str], within: str = "") -> Row:
    """Return ``found``, the content of ``file``, without the values whose type differs from ``kinds``. Each of those is
    reported in ``faults``. ``within``: prefix of the names in these reports."""
    kept = {}
    for name, value in found.items():
        kind, path = kinds.get(name, kinds.get(EACH, object)), f"{within}{name}"
        if not _is_of_kind(value, kind):
            faults.append(f"{file} holds {_shortened(value)} as its {path}, which no run writes; it is left out")
        elif isinstance(kind, Mapping) and value is not None:
            kept[name] = drop_wrong_types(value, kind, file, faults, f"{path}.")
        elif isinstance(kind, list) and value is not None:
            numbered = drop_wrong_types(dict(enumerate(value)), {EACH: kind[0]}, file, faults, f"{path}.")
            kept[name] = [item for item in numbered.values() if item is not None]
        else:
            kept[name] = value
    return kept


def _is_of_kind(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of type ``kind``. None, which is null in the file, fits every type."""
    if value is None or kind is object:
        return True
    if isinstance(kind, (Mapping, list)):
        return isinstance(value, dict if isinstance(kind, Mapping) else list)
    return isinstance(value, kind) and not isinstance(value, bool)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
