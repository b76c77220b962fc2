"""The detached process of a background run: it registers itself, lowers its priority, waits for its turn, trains, and
records how it ended. It stays one process throughout, so its ID, session and place in the queue remain valid."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Optional

from scu_trainer.errors import StorageError, UserError
from scu_trainer.run_files import RunStatus
from scu_trainer.runs import numa, room
from scu_trainer.runs.process import System, lower_priority
from scu_trainer.runs.progress import last_error
from scu_trainer.runs.queue import DeviceQueue, wait_for_turn
from scu_trainer.runs.store import ENDED_STATUSES, Run, RunRecord

STOPPED, INTERRUPTED = 3, 130
AFTERWARDS = {STOPPED: "stopped", INTERRUPTED: "stopped", 128 + signal.SIGTERM: "stopped"}
"""The status to record for an exit code, if training has not set one itself. Every other code means failed."""


def _exec(words: Sequence[str]) -> NoReturn:
    os.execv(words[0], list(words))


@dataclass(frozen=True)
class SupervisorBackend:
    """Functions and objects that tests replace. ``train``: runs the training command in this process; ``become``:
    replaces this process by a launcher."""

    train: Callable[[list[str]], int]
    become: Callable[[Sequence[str]], NoReturn] = _exec
    machine: System = field(default_factory=System)
    lower_priority: Callable[[int], list[str]] = lower_priority
    sleep: Callable[[float], None] = time.sleep
    devices: Callable[[], list[str]] = room.devices
    lacking: Callable[[str, float, float], Optional[str]] = room.missing_memory
    lines: Optional[Path] = None
    """Folder of the queues; None: the default folder of this user."""


def supervise(run: Run, backend: SupervisorBackend) -> int:
    """Carry out a background run from its registration to its end. Returns its exit code."""
    supervisor = _Supervisor(run, backend)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = supervisor.execute()
    except KeyboardInterrupt:
        code, reason = (INTERRUPTED, None) if supervisor.is_training else (STOPPED, "left the queue before it began")
        supervisor.record_end(code, reason)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except Exception as error:  # only the log can show it
        traceback.print_exc()
        supervisor.record_end(1, f"{type(error).__name__}: {error}")
        return 1
    supervisor.record_end(code)
    return code


def _interrupt(number: int, frame: object) -> None:
    """Handle SIGTERM outside of training, which has its own handler that lets the current step finish."""
    raise KeyboardInterrupt(signal.Signals(number).name)


class _Supervisor:
    def __init__(self, run: Run, backend: SupervisorBackend) -> None:
        self.run, self.backend = run, backend
        self.is_training = False

    def execute(self) -> int:
        record = self._register()
        record = self._wait_for_devices(record)
        record = self._change_record(phase="training", waiting=None)
        self.is_training = True
        words = training_words(self.run, record)
        if record.options.launcher != "python":
            sys.stdout.flush()
            start = [sys.executable, "-P", "-m", "scu_trainer.cli.main", "launch", record.options.launcher]
            self.backend.become([*start, *words])
        return self.backend.train(words)

    def _register(self) -> RunRecord:
        record = self.run.record()
        if record is None:
            raise StorageError(f"{self.run.folder} holds no start.json; use scu-trainer runs start")
        notes = self.backend.lower_priority(record.options.nice)
        for note in notes:
            print(note, flush=True)
        return self.run.change(process=self.backend.machine.identity(), phase="queued", notes=tuple(notes))

    def _wait_for_devices(self, record: RunRecord) -> RunRecord:
        """Wait for the turn in the queue of each device that the run uses, in the order of their names, which prevents
        deadlocks between runs.

        A run leaves a queue only when its process ends, so the next run begins after the memory of this one is free.
        """
        chosen, options = self._choose_devices(record), record.options
        limits = (options.max_ram_percent, options.max_gpu_percent)
        record = self.run.change(devices=tuple(chosen))
        for name in chosen:
            queue = DeviceQueue(name, self.backend.lines, self.backend.machine)
            place = queue.join(record.process, self.run.path)
            lacks = functools.partial(self.backend.lacking, name, *limits)
            wait_for_turn(queue, place, lacks, self._report_waiting, self.backend.sleep)
            queue.keep_through_exec()
        os.environ.update(room.visible_devices(chosen))
        return self._bind_to_node(record, chosen)

    def _bind_to_node(self, record: RunRecord, devices: Sequence[str]) -> RunRecord:
        note = numa.bind_to_numa_node(record.options.numa_node, devices)
        if note is None:
            return record
        print(note, flush=True)
        if record.options.threads is None:  # more threads than the bound cores would only compete for them
            os.environ["OMP_NUM_THREADS"] = str(room.default_threads())
        return self._change_record(notes=(*record.notes, note))

    def _choose_devices(self, record: RunRecord) -> list[str]:
        found, asked = self.backend.devices(), record.options.device
        if asked == "auto" and record.options.launcher != "python":
            return sorted(found)  # a launcher starts a process on each
        queues = {device: DeviceQueue(device, self.backend.lines, self.backend.machine) for device in found}
        return [room.choose_device(asked, found, lambda device: len(queues[device].waiting()))]

    def _report_waiting(self, waiting: str) -> None:
        print(f"waiting {waiting}", flush=True)
        self._change_record(waiting=waiting)

    def _change_record(self, **changes: Any) -> RunRecord:
        """Change the record, wherever the folder of the run is now: it may be renamed while the run waits for days."""
        self.run = _at_current_path(self.run)
        return self.run.change(**changes)

    def record_end(self, code: int, error: Optional[str] = None) -> None:
        """Record how the run ended, unless training has. SIGTERM is ignored from here on, to not interrupt this."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        self.run = _at_current_path(self.run)
        try:
            if self.run.status().get("status") not in ENDED_STATUSES:
                record_final_status(self.run, AFTERWARDS.get(code, "failed"), error or self._end_reason(code))
            self.run.change(exit_code=code, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        except StorageError as failure:  # such as a full disk; the status then reports the cause from the log
            print(f"the last message was not written: {failure}", file=sys.stderr, flush=True)

    def _end_reason(self, code: int) -> Optional[str]:
        if code == 0:
            return "training succeeded, but in another directory; see the log"
        return None if code in AFTERWARDS else last_error(self.run.console) or f"ended with exit code {code}"


def _at_current_path(run: Run) -> Run:
    """Return ``run`` at its current path, found through the log file that this process still writes to. The folder may
    have been renamed since the start, and another run may have its old name."""
    console = Path("/proc/self/fd/1")  # exists on Linux only
    if not console.is_symlink() or (run.console.exists() and run.console.samefile(console)):
        return run
    moved = Run(console.readlink().parent.parent, run.name)
    return moved if moved.console == console.readlink() and moved.console.is_file() else run


def record_final_status(run: Run, status: str, error: Optional[str]) -> None:
    """Write the end of a run to run.json, for training that ended before it could do so itself."""
    RunStatus(run.path / "run.json").update(status=status, error=error, eta_s=None)


def training_words(run: Run, record: RunRecord) -> list[str]:
    """Return the arguments of training: the stored configuration, the output directory, and the flags of the user."""
    words = ["--config", str(run.config.absolute()), "--output_dir", str(run.path.absolute()), *record.flags]
    if record.options.device == room.CPU:
        words += ["--use_cpu", "true"]
    return [*words, "--resume_from_checkpoint", "auto"] if record.goes_on else words
