"""What the detached process does: registers itself, steps back behind others, waits for its turn, trains, says how it
ended. It is one process from the start to the end, so its number, its session and its place in the line stay true.
"""

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
from scu_trainer.runs.process import Machine, Platform, this_platform
from scu_trainer.runs.progress import last_error
from scu_trainer.runs.queue import Line, wait_for_turn
from scu_trainer.runs.store import ENDED, Run, RunRecord

STOPPED, INTERRUPTED = 3, 130
AFTERWARDS = {STOPPED: "stopped", INTERRUPTED: "stopped", 128 + signal.SIGTERM: "stopped"}
"""Status by exit code, where training has not set one itself; every other code: failed."""


def _become(words: Sequence[str]) -> NoReturn:
    os.execv(words[0], list(words))


@dataclass(frozen=True)
class Outside:
    """What a test may replace. ``train``: the training command of this process; ``become``: exec of a launcher."""

    train: Callable[[list[str]], int]
    become: Callable[[Sequence[str]], NoReturn] = _become
    machine: Machine = field(default_factory=Machine)
    platform: Platform = field(default_factory=this_platform)
    sleep: Callable[[float], None] = time.sleep
    devices: Callable[[], list[str]] = room.devices
    lacking: Callable[[str, float, float], Optional[str]] = room.lacking
    lines: Optional[Path] = None
    """Folder of the waiting lines; None: that of this user."""


def lead(run: Run, outside: Outside) -> int:
    """The whole life of a background run. Returns its exit code."""
    supervisor = _Supervisor(run, outside)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = supervisor.live()
    except KeyboardInterrupt:
        code, reason = (INTERRUPTED, None) if supervisor.is_training else (STOPPED, "left the queue before it began")
        supervisor.say_last(code, reason)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except Exception as error:  # nobody is there to see it but the log
        traceback.print_exc()
        supervisor.say_last(1, f"{type(error).__name__}: {error}")
        return 1
    supervisor.say_last(code)
    return code


def _interrupt(number: int, frame: object) -> None:
    """Training has a handler of its own while there is a step to finish."""
    raise KeyboardInterrupt(signal.Signals(number).name)


class _Supervisor:
    def __init__(self, run: Run, outside: Outside) -> None:
        self.run, self.outside = run, outside
        self.is_training = False

    def live(self) -> int:
        record = self._register()
        self.outside.platform.watch_for_stop(self.run.stop_request)
        record = self._wait(record)
        record = self._change(phase="training", waiting=None)
        self.is_training = True
        words = training_words(self.run, record)
        if record.options.launcher != "python":
            sys.stdout.flush()
            start = [sys.executable, "-P", "-m", "scu_trainer.cli.main", "launch", record.options.launcher]
            self.outside.become([*start, *words])
        return self.outside.train(words)

    def _register(self) -> RunRecord:
        record = self.run.record()
        if record is None:
            raise StorageError(f"{self.run.folder} holds no start.json; use scu-trainer runs start")
        notes = self.outside.platform.lower_priority(record.options.nice)
        for note in notes:
            print(note, flush=True)
        return self.run.change(process=self.outside.machine.identity(), phase="queued", notes=tuple(notes))

    def _wait(self, record: RunRecord) -> RunRecord:
        """In the line of each device that the run uses, in the order of names: so no two runs wait for each other.

        Nobody leaves a line but by its end: the next run begins when the memory of this one is free.
        """
        chosen, options = self._devices(record), record.options
        limits = (options.max_ram_percent, options.max_gpu_percent)
        record = self.run.change(devices=tuple(chosen))
        for name in chosen:
            line = Line(name, self.outside.lines, self.outside.machine)
            place = line.join(record.process, self.run.path)
            lacks = functools.partial(self.outside.lacking, name, *limits)
            wait_for_turn(line, place, lacks, self._tell, self.outside.sleep)
            line.keep_through_exec()
        os.environ.update(room.visible_devices(chosen))
        return self._bind(record, chosen)

    def _bind(self, record: RunRecord, devices: Sequence[str]) -> RunRecord:
        note = numa.bind(record.options.numa_node, devices)
        if note is None:
            return record
        print(note, flush=True)
        if record.options.threads is None:  # more than the cores that are left would take turns
            os.environ["OMP_NUM_THREADS"] = str(room.default_threads())
        return self._change(notes=(*record.notes, note))

    def _devices(self, record: RunRecord) -> list[str]:
        found, asked = self.outside.devices(), record.options.device
        if asked == "auto" and record.options.launcher != "python":
            return sorted(found)  # a launcher starts a process on each
        lines = {device: Line(device, self.outside.lines, self.outside.machine) for device in found}
        return [room.choose(asked, found, lambda device: len(lines[device].waiting()))]

    def _tell(self, waiting: str) -> None:
        print(f"waiting {waiting}", flush=True)
        self._change(waiting=waiting)

    def _change(self, **changes: Any) -> RunRecord:
        """Who waits for days may be given another name in the meantime."""
        self.run = _where_it_is_now(self.run)
        return self.run.change(**changes)

    def say_last(self, code: int, error: Optional[str] = None) -> None:
        """How it ended, wherever training has not said so itself. A second request to stop changes nothing now."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        self.run = _where_it_is_now(self.run)
        try:
            if self.run.status().get("status") not in ENDED:
                settle(self.run, AFTERWARDS.get(code, "failed"), error or self._why(code))
            self.run.change(exit_code=code, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        except StorageError as failure:  # a full disk: whoever asks for the status finds the cause in the log
            print(f"the last message was not written: {failure}", file=sys.stderr, flush=True)

    def _why(self, code: int) -> Optional[str]:
        if code == 0:
            return "training ended well, but in another directory; see the log"
        return None if code in AFTERWARDS else last_error(self.run.console) or f"ended with exit code {code}"


def _where_it_is_now(run: Run) -> Run:
    """Its folder may have been renamed since, and another run have its name; what it prints still goes to the file
    there."""
    console = Path("/proc/self/fd/1")  # of Linux
    if not console.is_symlink() or (run.console.exists() and run.console.samefile(console)):
        return run
    moved = Run(console.readlink().parent.parent, run.name)
    return moved if moved.console == console.readlink() and moved.console.is_file() else run


def settle(run: Run, status: str, error: Optional[str]) -> None:
    """Write the end of a run into run.json, in place of training that had no time for it."""
    RunStatus(run.path / "run.json").update(status=status, error=error, eta_s=None)


def training_words(run: Run, record: RunRecord) -> list[str]:
    """Of the training command: configuration as it was at the start, the place, and what was typed."""
    words = ["--config", str(run.config.absolute()), "--output_dir", str(run.path.absolute()), *record.flags]
    if record.options.device == room.CPU:
        words += ["--use_cpu", "true"]
    return [*words, "--resume_from_checkpoint", "auto"] if record.goes_on else words
