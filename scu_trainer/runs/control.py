"""Start, stop and resume background runs. Each function returns what happened; the command line prints it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.run_files import RunStatus, require_room, require_writable, write_text
from scu_trainer.runs import room
from scu_trainer.runs.process import (
    TOKEN_VARIABLE,
    Identity,
    System,
    is_alive,
    processes_of_run,
    send_signal,
    spawn_detached,
)
from scu_trainer.runs.progress import START_LINE, last_error, newest_checkpoint, tail
from scu_trainer.runs.queue import FileLock
from scu_trainer.runs.state import Report, report
from scu_trainer.runs.store import ENDED_STATUSES, Options, Run, RunRecord, check_name
from scu_trainer.runs.supervisor import record_final_status
from scu_trainer.secrets import SECRET_PARTS, redact

NEEDED_BYTES = 64 * 2**20
REGISTERS_WITHIN_S = 20.0
ENDS_WITHIN_S = 20.0
LOOK_EVERY_S = 0.01
KEPT = ("HF_", "SCU_TRAINER_", "CUDA_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "OMP_", "MKL_", "DS_", "NCCL_", "WANDB_")
"""Prefixes of the environment variables that are recorded for a resume from another shell. Secrets are not recorded."""

Spawn = Callable[[Sequence[str], str, Mapping[str, str], Path], Any]


@dataclass(frozen=True)
class RunBackend:
    """The functions that act on the system, which tests replace."""

    machine: System = field(default_factory=System)
    spawn: Spawn = spawn_detached
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class StartRequest:
    """A start. ``config``: the configuration file as text; ``flags``: further flags of the training command."""

    name: str
    config: str
    flags: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)


def check(request: StartRequest, root: Path) -> None:
    """Raise a UserError for a start that is invalid. The training settings are checked later, by training itself."""
    check_name(request.name)
    path, options = root / request.name, request.options
    if path.exists():
        raise SettingsError(f"the name {request.name!r} is in use: {path} exists; give another --name")
    if not 0 <= options.nice <= 19:
        raise SettingsError(f"nice is {options.nice}; allowed: 0 (normal priority) to 19 (lowest)")
    if options.numa_node not in ("auto", "off") and not options.numa_node.isdecimal():
        raise SettingsError(f"numa_node is {options.numa_node!r}; allowed: auto, off, or the number of a node")
    if options.threads is not None and options.threads < 1:
        raise SettingsError(f"threads is {options.threads}; give 1 or more")
    for name in ("max_ram_percent", "max_gpu_percent"):
        if not 0 < getattr(options, name) <= 100:
            raise SettingsError(f"{name} is {getattr(options, name):g}; allowed: above 0, up to 100")
    _check_secrets(request)
    require_writable(root, "--root")
    require_room(root, NEEDED_BYTES, "--root")


def _check_secrets(request: StartRequest) -> None:
    where = "the configuration" if redact(request.config) != request.config else "the flags"
    if redact(request.config) != request.config or any(redact(flag) != flag for flag in request.flags):
        raise SettingsError(
            f"{where} would be stored in the directory of the background run, with a token or password in plain text; "
            "remove it and set it in the environment instead, for example as HF_TOKEN"
        )


# -- starting ----------------------------------------------------------------------------------------------------------


def start(request: StartRequest, root: Path, backend: RunBackend) -> RunRecord:
    """Start a background run, and return its record once it has registered itself. Raises a UserError if it cannot."""
    check(request, root)
    run = Run(root / request.name, request.name)
    try:
        run.path.mkdir(parents=True)  # reserves the name: only one of two simultaneous starts succeeds
        run.folder.mkdir()
    except FileExistsError as error:
        raise SettingsError(f"the name {request.name!r} was taken just now; give another --name") from error
    except OSError as error:
        raise StorageError(f"{run.path} cannot be made: {error.strerror}; set --root to another directory") from error
    write_text(run.config, request.config)
    cwd, variables = str(Path.cwd()), environment()
    record = _new_record(run, backend, flags=request.flags, options=request.options, cwd=cwd, environment=variables)
    return _spawn_and_register(run, record, backend)


def _new_record(run: Run, backend: RunBackend, **fields: Any) -> RunRecord:
    """Return the record of a start that is requested now."""
    new = {"token": uuid.uuid4().hex, "directory": str(run.path.absolute())}
    return RunRecord(**new, asked_s=time.time(), spawner=backend.machine.identity(), **fields)


def _spawn_and_register(run: Run, record: RunRecord, backend: RunBackend) -> RunRecord:
    run.write(record)
    run.stop_request.unlink(missing_ok=True)
    # Written after the record: "queued" next to the old record, whose process has ended, would mean a killed run.
    RunStatus(run.path / "run.json").update(status="queued", pid=None, error=None, eta_s=None)
    _write_start_line(run, record.starts)
    # -P: a folder in the current directory must not be imported instead of a package of the same name.
    words = [sys.executable, "-P", "-m", "scu_trainer.cli.background.supervisor", str(run.path.absolute())]
    child = backend.spawn(words, record.cwd, _child_environment(record), run.console)
    return _wait_until_registered(run, child, backend)


def _write_start_line(run: Run, starts: int) -> None:
    try:
        with open(run.console, "a") as file:
            file.write(f"{START_LINE}{starts}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    except OSError as error:
        raise StorageError(
            f"cannot write {run.console}: {error.strerror}; check the path and its permissions"
        ) from error


def environment() -> dict[str, str]:
    """Return the environment variables of this process that a later resume needs, without secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KEPT) and redact(value) == value and {"KEY", *SECRET_PARTS}.isdisjoint(name.split("_"))
    }


def _child_environment(record: RunRecord) -> dict[str, str]:
    variables = {**os.environ, **record.environment, TOKEN_VARIABLE: record.token, "PYTHONUNBUFFERED": "1"}
    threads = record.options.threads
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    elif record.options.launcher == "python":
        variables.setdefault("OMP_NUM_THREADS", str(room.default_threads()))
    return variables


def _wait_until_registered(run: Run, child: Any, backend: RunBackend) -> RunRecord:
    started_s = backend.clock()
    while backend.clock() - started_s < REGISTERS_WITHIN_S:
        ended = child.poll() is not None  # checked before the record is read: the process may register and then end
        record = run.record()
        if record is not None and record.process is not None:
            return record
        if ended:
            last = last_error(run.console) or "\n".join(tail(run.console).splitlines()[-3:])
            raise StorageError(f"the process of {run.name} ended at once: {last}; see {run.console}")
        backend.sleep(LOOK_EVERY_S)
    raise StorageError(f"the process of {run.name} has not started within {REGISTERS_WITHIN_S:g} s; see {run.console}")


# -- resuming ----------------------------------------------------------------------------------------------------------


def resume(run: Run, backend: RunBackend) -> tuple[RunRecord, Optional[str]]:
    """Run the command of ``run`` again. Returns the record and the name of the checkpoint that training resumes from.

    The command runs in its original working directory, or in the current one if that no longer exists, because a
    project may have been moved. Raises SettingsError for a run that cannot be resumed.
    """
    before = _require_record(run, "resumed")
    with FileLock(run.folder / "start.lock"):  # the second of two simultaneous resumes finds the run alive
        seen = report(run, backend.machine)
        if (
            seen.state.is_alive
            and seen.state.status in ENDED_STATUSES
            and _wait_until_ended(before, backend, ENDS_WITHIN_S)
        ):
            seen = report(run, backend.machine)
        if seen.state.is_alive:
            raise SettingsError(f"{run.name} is {seen.state.status} already; nothing to resume")
        if seen.state.status == "elsewhere":
            words = ["--config", str(run.config), "--output_dir", str(run.path), *before.flags]
            raise SettingsError(
                f"{run.name} cannot be resumed: {seen.state.detail}. If it has ended there, this resumes it here: "
                f"scu-trainer train {shlex.join(words)}"
            )
        if seen.state.status in ("finished", "unreadable"):
            raise SettingsError(f"{run.name} cannot be resumed: {seen.state.detail or 'it is finished'}")
        is_copy = run.copied_from(before) is not None  # then the recorded processes belong to the original run
        if before.process is not None and not is_copy and not _wait_until_ended(before, backend, ENDS_WITHIN_S):
            raise SettingsError(
                f"processes of {run.name} are still ending; try again, or type scu-trainer runs stop {run.name} --now"
            )
        checkpoint = newest_checkpoint(run.path, seen.progress.step)
        require_room(run.path, NEEDED_BYTES, "--root")
        same = {name: getattr(before, name) for name in ("flags", "options", "environment")}
        cwd = before.cwd if Path(before.cwd).is_dir() else str(Path.cwd())
        record = _new_record(run, backend, **same, cwd=cwd, starts=before.starts + 1, goes_on=True)
        return _spawn_and_register(run, record, backend), checkpoint


def _require_record(run: Run, action: str) -> RunRecord:
    record = run.record()
    if record is None:
        raise SettingsError(
            f"{run.name} was not started by runs start, so it cannot be {action} from here; to stop it, press Ctrl-C "
            "in its terminal or use kill -TERM; to resume it, type the command that started it"
        )
    return record


# -- stopping ----------------------------------------------------------------------------------------------------------


def stop(run: Run, backend: RunBackend, timeout_s: Optional[float] = None, now: bool = False) -> Report:
    """Ask a run to write a checkpoint and end, and wait until it has. ``now``: kill all its processes instead.

    Returns a report of the run afterwards, which is still alive if it did not end within ``timeout_s``.
    """
    record = _wait_for_registration(run, backend)
    if now:
        _kill_all(record, backend)
    elif is_alive(record.process, backend.machine):
        if _create_stop_request(run):
            send_signal(_process_to_signal(run, record, backend), signal.SIGTERM, backend.machine)
        if not _wait_until_ended(record, backend, timeout_s):
            return report(run, backend.machine)
    after = report(run, backend.machine)
    has_begun = after.progress.step is not None and run.status().get("status") != "queued"
    if not after.state.is_alive and after.state.status == "killed" and (now or not has_begun):
        how = "ended at once by runs stop --now" if now else "stopped before training began"
        record_final_status(run, "stopped", how)
        after = report(run, backend.machine)
    return after


def _wait_for_registration(run: Run, backend: RunBackend) -> RunRecord:
    """Return the record once the process has registered itself. Raises SettingsError for a run without a process."""
    started_s = backend.clock()
    while True:
        record = _require_record(run, "stopped")
        first = run.copied_from(record)
        if first is not None:
            raise SettingsError(
                f"{run.name} is a copy of {first} and has no process of its own; to stop the original, type "
                f"scu-trainer runs stop {shlex.quote(str(first))}"
            )
        if record.process is not None:
            return record
        seen = report(run, backend.machine)
        if not seen.state.is_alive or backend.clock() - started_s > REGISTERS_WITHIN_S:
            raise SettingsError(f"{run.name} has no process: {seen.state.detail}")
        backend.sleep(LOOK_EVERY_S)


def _process_to_signal(run: Run, record: RunRecord, backend: RunBackend) -> Identity:
    """Return the process that receives the stop signal: rank 0, which informs the other ranks. A signal to the launcher
    would not do: a launcher kills its ranks after 30 seconds, which may be too short for a step and a checkpoint."""
    members, status = processes_of_run(record.process, record.token, backend.machine), run.status()
    rank = status.get("pid") if status.get("status") == "running" else None
    return next((member for member in members if member.pid == rank), record.process)


def _create_stop_request(run: Run) -> bool:
    """Create the stop file. Returns False if it exists: a second signal would end the run without a checkpoint."""
    try:
        run.stop_request.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"cannot write {run.stop_request}: {error.strerror}; --now needs no file") from error
    return True


def _wait_until_ended(record: RunRecord, backend: RunBackend, timeout_s: Optional[float]) -> bool:
    started_s = backend.clock()
    while is_alive(record.process, backend.machine) or processes_of_run(record.process, record.token, backend.machine):
        if timeout_s is not None and backend.clock() - started_s >= timeout_s:
            return False
        backend.sleep(0.05)
    return True


def _kill_all(record: RunRecord, backend: RunBackend) -> None:
    """Kill all processes of the run, repeatedly, because a process may start another before it ends."""
    started_s = backend.clock()
    while members := processes_of_run(record.process, record.token, backend.machine):
        if backend.clock() - started_s > ENDS_WITHIN_S:
            numbers = ", ".join(str(member.pid) for member in members)
            raise StorageError(
                f"processes {numbers} do not end, because they are waiting for a device or disk; try again later"
            )
        for member in members:
            send_signal(member, signal.SIGKILL, backend.machine)
        backend.sleep(LOOK_EVERY_S)
