"""Read the memory of this machine repeatedly, and that of one run or process with all its child processes.

Nothing is changed. If the system has reused the pid of a run for another process, that process is not taken for the
run.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.hardware import cgroup
from scu_trainer.hardware.probe import Accelerator, accelerators, gpu_users, ram_bytes
from scu_trainer.run_files import read_rows, read_status

if TYPE_CHECKING:
    import psutil

LIVE = ("running", "stopping")
CLOCK_TOLERANCE_S = 2.0
"""Tolerance when start times of processes, counted from the boot, are compared with the clock times in run.json."""


@dataclass(frozen=True)
class MemoryLevel:
    """The used and total bytes of one memory, and the most that was used since monitoring began."""

    name: str
    used_bytes: int
    total_bytes: int
    highest_bytes: int


@dataclass(frozen=True)
class RunReading:
    """The memory of a run's processes, and the state in its files.

    Fields:
        processes: number of processes: the supervisor, its workers, and the other ranks on this machine.
        rss_bytes: sum of their resident memory; shared memory counts for each process.
        pss_bytes: the same with shared memory divided among its users; None if the system does not report it.
        gpu_bytes: memory on all GPUs according to the driver; None if it does not report it.
        status, step, max_steps: from run.json; None for a process that is not a run.
        rows_per_chunk, tokens_per_chunk, limit_bytes: limits of memory control after its last change; None before one.
    """

    processes: int
    rss_bytes: int
    pss_bytes: Optional[int]
    gpu_bytes: Optional[int]
    status: Optional[str] = None
    step: Optional[int] = None
    max_steps: Optional[int] = None
    rows_per_chunk: Optional[int] = None
    tokens_per_chunk: Optional[int] = None
    limit_bytes: Optional[int] = None


@dataclass(frozen=True)
class MonitorReading:
    """All memories at ``time_s``, in seconds since 1970, and those of the run if one is monitored."""

    time_s: float
    levels: tuple[MemoryLevel, ...]
    run: Optional[RunReading] = None


@dataclass(frozen=True)
class MonitoredProcess:
    """The run or process to monitor; ``folder`` is None for a process, and ``process`` is None once it has ended."""

    name: str
    folder: Optional[Path]
    process: Optional[psutil.Process]

    @property
    def is_alive(self) -> bool:
        """Whether the process is running; psutil compares start times, so a reused pid does not count."""
        return self.process is not None and self.process.is_running() and self.process.status() != "zombie"

    def ending(self) -> str:
        """Return a line that says how it ended."""
        if self.folder is None:
            return f"process {self.name} has ended"
        state = read_status(self.folder / "run.json")
        step = "" if state.get("step") is None else f" at step {state['step']} of {state.get('max_steps')}"
        why = f": {state['error']}" if state.get("error") else ""
        if state["status"] in LIVE:
            gone = f"its process {state['pid']} ended without a message{step}"
            return f"run {self.name} is gone: {gone}; see logs/train.log"
        return f"run {self.name} is {state['status']}{step}, last written {state.get('updated')}{why}"


def find_target(text: str) -> MonitoredProcess:
    """Return the target for a run directory or a pid. Raises SettingsError if ``text`` is neither."""
    import psutil

    folder = Path(text).expanduser()
    if (folder / "run.json").is_file():
        state = read_status(folder / "run.json")
        try:
            return MonitoredProcess(text, folder, _process_of(state))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"{folder / 'run.json'} is not what a run writes ({error!r}); give the output_dir of a run"
            ) from error
    if folder.exists() or not text.isdigit():
        found = "holds no run.json" if folder.exists() else "is not there"
        raise SettingsError(f"{text} {found}; give the directory of a run (its output_dir), or the number of a process")
    try:
        return MonitoredProcess(text, None, psutil.Process(int(text)))
    except psutil.NoSuchProcess:
        raise SettingsError(
            f"there is no process {text}; give the directory of a run, or nothing to monitor the machine"
        ) from None


def _process_of(state: dict[str, Any]) -> Optional[psutil.Process]:
    """Return the process that wrote run.json if it is alive, and not one that started after its last write with a
    reused pid. The field ``started`` would not do: a resumed run keeps the time of its first start."""
    import psutil

    if state["status"] not in LIVE or not state.get("pid"):
        return None
    try:
        process = psutil.Process(state["pid"])
        written_s = datetime.fromisoformat(state["updated"]).timestamp()
        return process if process.create_time() <= written_s + CLOCK_TOLERANCE_S else None
    except psutil.NoSuchProcess:
        return None


# -- reading -----------------------------------------------------------------------------------------------------------


def readings(
    duration_s: Optional[float],
    interval_s: float,
    target: Optional[MonitoredProcess] = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[MonitorReading]:
    """Yield a reading every ``interval_s`` seconds, for ``duration_s`` (None: no end) and while ``target`` lives."""
    highest: dict[str, int] = {}
    begun_s = None
    while True:
        found = list(memories())
        begun_s = clock() if begun_s is None else begun_s  # only now, because the first reading also imports packages
        for name, used, _ in found:
            highest[name] = max(used, highest.get(name, 0))
        levels = tuple(MemoryLevel(name, used, total, highest[name]) for name, used, total in found)
        run = None if target is None else read_run(target)
        if target is not None and run is None:
            return
        yield MonitorReading(time.time(), levels, run)
        if duration_s is not None and clock() - begun_s + interval_s > duration_s:
            return
        sleep(interval_s)


def memories() -> Iterator[tuple[str, int, int]]:
    """Yield (name, used bytes, total bytes) of main memory, the container's limit, and each GPU."""
    total, available = ram_bytes()
    yield "RAM", total - available, total
    limit = cgroup.memory_limit_bytes()
    room = cgroup.memory_available_bytes() if limit is not None else None
    if room is not None:
        yield "container limit", max(limit - room, 0), limit
    for item in accelerators():
        yield device_name(item), item.total_bytes - item.free_bytes, item.total_bytes


def device_name(item: Accelerator) -> str:
    return f"{item.kind}:{item.index} {item.name}"


def read_run(target: MonitoredProcess) -> Optional[RunReading]:
    """Return the current reading of a run or process; None once it has ended."""
    if not target.is_alive:
        return None
    members = family(target.process)
    sizes = [size for member in members if (size := _sizes(member)) is not None]
    if not sizes:
        return None
    pss = [size[1] for size in sizes]
    return RunReading(
        processes=len(sizes),
        rss_bytes=sum(size[0] for size in sizes),
        pss_bytes=None if None in pss else sum(pss),
        gpu_bytes=gpu_bytes({member.pid for member in members}),
        **({} if target.folder is None else _run_state(target.folder)),
    )


def family(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return the supervisor and all its child processes, and those of other ranks that a launcher started here."""
    import psutil

    try:
        launcher = supervisor.parent() if int(supervisor.environ().get("LOCAL_WORLD_SIZE", "1")) > 1 else None
        others = [] if launcher is None else launcher.children(recursive=True)
        return list({item.pid: item for item in (supervisor, *supervisor.children(recursive=True), *others)}.values())
    except psutil.NoSuchProcess:
        return []
    except psutil.AccessDenied:  # for another user's process, the memory can be read but not the environment
        return [supervisor]


def held_bytes(process: psutil.Process) -> Optional[int]:
    """Return the main memory of a process family, shared pages once if that is known; None if it has ended."""
    sizes = [size for member in family(process) if (size := _sizes(member)) is not None]
    return sum(rss if pss is None else pss for rss, pss in sizes) or None


def _sizes(process: psutil.Process) -> Optional[tuple[int, Optional[int]]]:
    """Return (RSS, PSS) in bytes; None for a process that has ended."""
    import psutil

    try:
        rss = process.memory_info().rss
        try:
            return rss, getattr(process.memory_full_info(), "pss", None)
        except psutil.AccessDenied:
            return rss, None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def gpu_bytes(pids: set[int]) -> Optional[int]:
    """Return the bytes of these processes on GPUs; None if the driver reports none, as inside a container."""
    ours = [user.used_bytes for _, user in gpu_users() or () if user.pid in pids and user.used_bytes is not None]
    return sum(ours) if ours else None


def _run_state(folder: Path) -> dict[str, Any]:
    state = read_status(folder / "run.json")
    found = {name: state.get(name) for name in ("status", "step", "max_steps")}
    try:
        rows = read_rows(folder / "memory_history.json")
    except StorageError:  # memory control is off, or has not begun
        return found
    last = rows[-1] if rows else {}
    return found | {name: last.get(name) for name in ("rows_per_chunk", "tokens_per_chunk", "limit_bytes")}


# -- CSV ---------------------------------------------------------------------------------------------------------------


def row_of(reading: MonitorReading) -> dict[str, Any]:
    """Return the values by column; the columns depend on the machine and on whether a run is monitored."""
    row: dict[str, Any] = {"time_s": f"{reading.time_s:.3f}"}
    for level in reading.levels:
        name = _column(level.name)
        row |= {f"{name}_used_bytes": level.used_bytes, f"{name}_total_bytes": level.total_bytes}
    if reading.run is not None:
        row |= {f"run_{name}": "" if value is None else value for name, value in vars(reading.run).items()}
    return row


def _column(name: str) -> str:
    """Return a column name such as ram, container_limit or cuda_0, without the GPU's name, which may hold anything."""
    kind = re.match(r"[a-z]+:\d+", name)
    return re.sub(r"\W+", "_", kind[0] if kind else name.lower())


class CsvLog:
    """Appends readings to ``path``, or to standard output for "-"; each row is one unbuffered write. An incomplete row
    that a killed writer left is cut off. Raises StorageError if the file cannot be written or has other columns."""

    def __init__(self, path: str) -> None:
        self._path = None if path == "-" else Path(path).expanduser()
        self._columns: Optional[list[str]] = None

    def append(self, reading: MonitorReading) -> None:
        row = row_of(reading)
        if self._columns is None:
            self._columns = [*row]
            self._write(_line(self._columns) if self._is_new() else "")
        self._write(_line([row.get(name, "") for name in self._columns]))

    def _is_new(self) -> bool:
        """Return whether the header must be written; cut off an incomplete last row."""
        if self._path is None or not self._path.exists():
            return True
        try:
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self._path, len(whole))
        except OSError as error:
            raise self._storage_error(error) from error
        if whole and whole.split(b"\n", 1)[0] != _line(self._columns).rstrip("\n").encode():
            raise StorageError(f"{self._path} has columns that do not match this machine and run; give another file")
        return not whole

    def _write(self, text: str) -> None:
        if self._path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._path}: {error.strerror}; give another file with --csv")


def _line(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
