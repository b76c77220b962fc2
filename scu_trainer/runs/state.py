"""Find out what a run is doing, from its files and from its process. A dead run is never reported as running.

``judge`` is a pure function of what was read before: run.json, the record of the start, and whether the process lives.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

import psutil

from scu_trainer.errors import StorageError
from scu_trainer.hardware.watching.monitor import held_bytes
from scu_trainer.run_files import free_bytes, storage_error
from scu_trainer.runs.process import Fact, System, check_process
from scu_trainer.runs.progress import RunProgress, last_error, progress, seconds
from scu_trainer.runs.queue import DeviceQueue
from scu_trainer.runs.store import ENDED_STATUSES, Run, RunRecord

COMING_UP_S = 3.0
"""A started process registers itself within this time; a tenth of it is usual."""

SILENT_S = 600.0
"""A run whose run.json was not written for longer than this is reported as not progressing."""

NO_ROOM_BYTES = 1 << 20
FULL_DISK_WORDS = ("the disk is full", "No space left on device", "Disk quota exceeded")


@dataclass(frozen=True)
class RunState:
    """What a run is doing.

    ``status``: one of run.json's, or "starting", "killed", "rebooted", "elsewhere", "copied", "unreadable". ``detail``:
    an explanation, or what the run waits for. ``cause``: why it ended unexpectedly: "killed", "number re-used",
    "reboot", "disk full", "error" or "no start". ``is_alive``: whether it has a living process.
    """

    status: str
    detail: str = ""
    cause: Optional[str] = None
    is_alive: bool = False


@dataclass(frozen=True)
class Evidence:
    """What was read about a run. ``fact``: what happened to its process; ``spawner``: what happened to the process that
    started it; None if no such process is known. ``error``: the last error message that this start printed."""

    status: Mapping[str, Any]
    record: Optional[RunRecord]
    fact: Optional[Fact]
    spawner: Optional[Fact]
    now_s: float
    updated_s: Optional[float] = None
    error: Optional[str] = None
    free_bytes: Optional[int] = None
    is_asked_to_stop: bool = False
    copied_from: Optional[Path] = None


def judge(seen: Evidence) -> RunState:
    """Decide what a run is doing."""
    status = seen.status.get("status", "queued")
    if status in ENDED_STATUSES and (seen.record is None or seen.copied_from is not None):
        # The recorded process may do something else by now, as a notebook does, or may belong to the original run.
        return _judge_ended(seen, status)
    if seen.copied_from is not None:
        return RunState("copied", f"a copy of {seen.copied_from}, last seen {status}; it has no process of its own")
    if seen.fact in ("alive", "suspended"):
        return _judge_living(seen, status)
    if status in ENDED_STATUSES:
        return _judge_ended(seen, status)
    if seen.fact is None:
        return _judge_without_process(seen)
    if seen.fact == "elsewhere":
        host = seen.record.process.host if seen.record and seen.record.process else "another machine"
        return RunState(
            "elsewhere", f"it was started on {host}: only that machine can tell whether it is alive; last seen {status}"
        )
    if seen.fact == "rebooted":
        return RunState("rebooted", f"the machine restarted while {_activity(seen, status)}", "reboot")
    if _is_disk_full(seen):
        return RunState(
            "failed", seen.error or "the disk was full, so its last message could not be written", "disk full"
        )
    if seen.record is not None and seen.record.exit_code is not None:
        return RunState("failed", seen.error or f"ended with exit code {seen.record.exit_code}", "error")
    if seen.error is not None and seen.record is not None and seen.record.options.launcher != "python":
        return RunState("failed", seen.error, "error")  # the exit code of a launcher is not recorded
    gone = f"it ended without an error message while {_activity(seen, status)}"
    if seen.fact == "other program":
        return RunState("killed", f"{gone}; another program now has its process number", "number re-used")
    return RunState("killed", f"{gone}: killed, or out of memory", "killed")


def _judge_living(seen: Evidence, status: str) -> RunState:
    record = seen.record
    if status in ENDED_STATUSES:
        ended = _judge_ended(seen, status)
        return replace(ended, detail=ended.detail or "its process is just ending", is_alive=True)
    if seen.fact == "suspended":
        return RunState(status, "suspended by a signal; kill -CONT lets it continue", is_alive=True)
    if status == "queued" and record is not None:
        if record.phase == "training":
            return RunState("starting", "libraries, model and data are being loaded", is_alive=True)
        return RunState("queued", f"waits {record.waiting or 'for its place in the queue'}", is_alive=True)
    if status == "running" and seen.is_asked_to_stop:
        return RunState("stopping", "stopping: the current step finishes first", is_alive=True)
    silent_s = 0.0 if seen.updated_s is None else seen.now_s - seen.updated_s
    if status in ("running", "stopping") and silent_s > SILENT_S:
        return RunState(status, f"not progressing: no news for {silent_s / 60:.0f} minutes", is_alive=True)
    return RunState(status, is_alive=True)


def _judge_ended(seen: Evidence, status: str) -> RunState:
    error = seen.status.get("error")
    if status != "failed":
        return RunState(status, error or "")
    is_full = any(words in (error or "") for words in FULL_DISK_WORDS)
    return RunState(status, error or "", "disk full" if is_full else "error")


def _judge_without_process(seen: Evidence) -> RunState:
    """Judge a run without a known process: its process has not registered itself yet, or none was ever recorded."""
    if seen.record is None:
        return RunState("killed", "none of its processes is known, and it did not end normally", "killed")
    age_s = seen.now_s - seen.record.asked_s
    if seen.spawner == "alive" or 0 <= age_s < COMING_UP_S:
        return RunState("starting", "its process is coming up", is_alive=True)
    if _is_disk_full(seen):
        return RunState("failed", "the disk was full when it was started", "disk full")
    return RunState("killed", "its process never came up", "no start")


def _activity(seen: Evidence, status: str) -> str:
    if status != "queued":
        return f"it was {status}"
    is_in_queue = seen.record is None or seen.record.phase != "training"
    return "it waited in the queue" if is_in_queue else "it was starting"


def _is_disk_full(seen: Evidence) -> bool:
    said = any(words in (seen.error or "") for words in FULL_DISK_WORDS)
    return said or (seen.free_bytes is not None and seen.free_bytes < NO_ROOM_BYTES)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All that is reported of a run. ``ahead``: runs before it in the queue of its device; None if it does not wait."""

    run: Run
    state: RunState
    progress: RunProgress
    record: Optional[RunRecord] = None
    pid: Optional[int] = None
    ahead: Optional[int] = None

    @functools.cached_property
    def resident_bytes(self) -> Optional[int]:
        """The main memory that its processes hold now, including a launcher and data loader workers. It is computed on
        demand, because that is expensive, and most readers of a report only want to know whether the run is alive."""
        try:
            return None if self.pid is None else held_bytes(psutil.Process(self.pid))
        except psutil.Error:  # it has ended since
            return None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict."""
        record = self.record
        return {
            "name": self.run.name,
            "directory": str(self.run.path),
            **asdict(self.state),
            "pid": self.pid,
            "ahead": self.ahead,
            "resident_bytes": self.resident_bytes,
            **{"lambda" if name == "strength" else name: value for name, value in asdict(self.progress).items()},
            "devices": list(record.devices) if record else [],
            "launcher": record.options.launcher if record else None,
            "nice": record.options.nice if record else None,
            "notes": list(record.notes) if record else [],
            "exit_code": record.exit_code if record else None,
            "starts": record.starts if record else None,
        }


def report(run: Run, machine: System, now_s: Optional[float] = None) -> Report:
    """Read the files of a run and check its process. A run that cannot be read is reported as "unreadable"."""
    try:
        return _report(run, machine, time.time() if now_s is None else now_s)
    except StorageError as error:
        reason = error
    except OSError as error:  # such as a folder or file without permission for this user
        reason = storage_error(error.filename or run.path, "read", error)
    return Report(run, RunState("unreadable", str(reason), "error"), RunProgress())


def _report(run: Run, machine: System, now_s: float) -> Report:
    """The process is checked before the files are read: if it ends in between, the files already hold its end."""
    before = run.record()
    pid, fact = _recorded_process(run, before, machine)
    status, record = run.status(), run.record()
    if record is not None and (before is None or record.process != before.process):  # it has just registered
        pid, fact = _recorded_process(run, record, machine)
        status = run.status()
    found = progress(run, status)
    state = judge(
        Evidence(
            status=status,
            record=record,
            fact=fact,
            spawner=None if record is None else check_process(record.spawner, machine),
            now_s=now_s,
            updated_s=found.updated_s,
            error=last_error(run.console),
            free_bytes=free_bytes(run.path),
            is_asked_to_stop=record is not None and run.stop_request.exists(),
            copied_from=None if record is None else run.copied_from(record),
        )
    )
    pid = pid if state.is_alive else None
    return Report(run, state, found, record, pid, _count_ahead(state, record, machine))


def _recorded_process(run: Run, record: Optional[RunRecord], machine: System) -> tuple[Optional[int], Optional[Fact]]:
    if record is not None:
        return (None, None) if record.process is None else (record.process.pid, check_process(record.process, machine))
    return _process_of_manual_run(run.status(), machine)


def _process_of_manual_run(status: Mapping[str, Any], machine: System) -> tuple[Optional[int], Optional[Fact]]:
    """Return the process ID of a run that was started by hand, and what happened to the process.

    Its number is in run.json, but not its creation time. A process that was created after run.json was last written is
    another program.
    """
    pid, updated_s = status.get("pid"), seconds(status.get("updated"))
    if pid is None or updated_s is None:
        return None, None
    if updated_s < psutil.boot_time() - 1:
        return pid, "rebooted"
    seen = machine.process(pid)
    if seen is None or seen.state == "zombie":
        return pid, "dead"
    if psutil.Process(pid).create_time() > updated_s + 1:
        return pid, "other program"
    return pid, "suspended" if seen.state == "suspended" else "alive"


def _count_ahead(state: RunState, record: Optional[RunRecord], machine: System) -> Optional[int]:
    if state.status != "queued" or record is None or not record.devices:
        return None
    places = DeviceQueue(record.devices[-1], machine=machine).waiting()
    return next((index for index, place in enumerate(places) if place.process == record.process), None)
