"""Memory of this machine, and of one run or process with all that it has started, read again and again.

Reads only. A number of a process that the system has given to another one in the meantime is not taken for the run.
"""

from __future__ import annotations

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
"""Start times of processes are counted from the boot, run.json's from the clock."""


@dataclass(frozen=True)
class Level:
    """One memory: used and total bytes now, and the most that was used while we looked."""

    name: str
    used_bytes: int
    total_bytes: int
    highest_bytes: int


@dataclass(frozen=True)
class RunReading:
    """A run's processes now, and what its files say.

    Fields:
        processes: the supervisor, its workers, and on one machine the other ranks.
        rss_bytes: sum of what they have in main memory; what several share is counted for each of them.
        pss_bytes: the same with shared memory split among those who share it; None where the system does not tell.
        gpu_bytes: of all GPUs, by the driver; None where it does not tell.
        status, step, max_steps: of run.json; None for a process that is no run.
        rows_per_chunk, tokens_per_chunk, limit_bytes: what memory control allows since its last change; None before it.
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
    """``time_s``: seconds since 1970."""

    time_s: float
    levels: tuple[Level, ...]
    run: Optional[RunReading] = None


@dataclass(frozen=True)
class Target:
    """What is watched. ``folder``: of the run; None for a process that is none. ``process``: None once it has ended."""

    name: str
    folder: Optional[Path]
    process: Optional[psutil.Process]

    @property
    def is_alive(self) -> bool:
        """psutil compares the start of the process, so another one with its number does not count."""
        return self.process is not None and self.process.is_running() and self.process.status() != "zombie"

    def ending(self) -> str:
        """How it ended, in a line."""
        if self.folder is None:
            return f"process {self.name} has ended"
        state = read_status(self.folder / "run.json")
        step = "" if state.get("step") is None else f" at step {state['step']} of {state.get('max_steps')}"
        why = f": {state['error']}" if state.get("error") else ""
        if state["status"] in LIVE:
            gone = f"its process {state['pid']} ended without a message{step}"
            return f"run {self.name} is gone: {gone}; see logs/train.log"
        return f"run {self.name} is {state['status']}{step}, last written {state.get('updated')}{why}"


def find_target(text: str) -> Target:
    """A run directory, or the number of a process. Raises SettingsError where there is neither."""
    import psutil

    folder = Path(text).expanduser()
    if (folder / "run.json").is_file():
        state = read_status(folder / "run.json")
        try:
            return Target(text, folder, _process_of(state))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"{folder / 'run.json'} is not what a run writes ({error!r}); give the output_dir of a run"
            ) from error
    if folder.exists() or not text.isdigit():
        found = "holds no run.json" if folder.exists() else "is not there"
        raise SettingsError(f"{text} {found}; give the directory of a run (its output_dir), or the number of a process")
    try:
        return Target(text, None, psutil.Process(int(text)))
    except psutil.NoSuchProcess:
        raise SettingsError(
            f"there is no process {text}; give a directory of a run, or nothing for the machine"
        ) from None


def _process_of(state: dict[str, Any]) -> Optional[psutil.Process]:
    """The process that wrote run.json, if it lives. It began before it wrote last: one that is younger took over its
    number. (``started`` would not do: a run that was resumed keeps the time of its first start.)"""
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
    target: Optional[Target] = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[MonitorReading]:
    """Every ``interval_s`` seconds, for ``duration_s`` or without end, and no longer than ``target`` lives."""
    highest: dict[str, int] = {}
    begun_s = None
    while True:
        found = list(memories())
        begun_s = clock() if begun_s is None else begun_s  # the first look also imports what it looks with
        for name, used, _ in found:
            highest[name] = max(used, highest.get(name, 0))
        levels = tuple(Level(name, used, total, highest[name]) for name, used, total in found)
        run = None if target is None else read_run(target)
        if target is not None and run is None:
            return
        yield MonitorReading(time.time(), levels, run)
        if duration_s is not None and clock() - begun_s + interval_s > duration_s:
            return
        sleep(interval_s)


def memories() -> Iterator[tuple[str, int, int]]:
    """(name, used bytes, all bytes) of main memory, the container's limit, and each GPU."""
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


def read_run(target: Target) -> Optional[RunReading]:
    """None once it has ended."""
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
        **({} if target.folder is None else _from_files(target.folder)),
    )


def family(supervisor: psutil.Process) -> list[psutil.Process]:
    """The supervisor and all that it has started; where a launcher started several ranks here, all of theirs."""
    import psutil

    try:
        launcher = supervisor.parent() if int(supervisor.environ().get("LOCAL_WORLD_SIZE", "1")) > 1 else None
        others = [] if launcher is None else launcher.children(recursive=True)
        return list({item.pid: item for item in (supervisor, *supervisor.children(recursive=True), *others)}.values())
    except psutil.NoSuchProcess:
        return []
    except psutil.AccessDenied:  # another user's: its own memory can be read, not its environment
        return [supervisor]


def held_bytes(process: psutil.Process) -> Optional[int]:
    """Main memory of its family, each page once where the system tells. None if it has ended."""
    sizes = [size for member in family(process) if (size := _sizes(member)) is not None]
    return sum(rss if pss is None else pss for rss, pss in sizes) or None


def _sizes(process: psutil.Process) -> Optional[tuple[int, Optional[int]]]:
    """(RSS, PSS) in bytes; None for a process that has ended."""
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
    """Bytes that these processes hold on GPUs; None where the driver's tool is not there, or knows none of them (inside
    of a container it sees none)."""
    ours = [user.used_bytes for _, user in gpu_users() or () if user.pid in pids and user.used_bytes is not None]
    return sum(ours) if ours else None


def _from_files(folder: Path) -> dict[str, Any]:
    state = read_status(folder / "run.json")
    found = {name: state.get(name) for name in ("status", "step", "max_steps")}
    try:
        rows = read_rows(folder / "memory_history.json")
    except StorageError:  # memory control is off, or has not begun
        return found
    last = rows[-1] if rows else {}
    return found | {name: last.get(name) for name in ("rows_per_chunk", "tokens_per_chunk", "limit_bytes")}
