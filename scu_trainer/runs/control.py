"""Start, stop and resume background runs. Each returns what happened; the command line puts it into words."""

from __future__ import annotations

import os
import shlex
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
from scu_trainer.runs.process import MARK, Identity, Machine, Platform, family, is_alive, this_platform
from scu_trainer.runs.progress import START_LINE, last_error, newest_checkpoint, tail
from scu_trainer.runs.queue import FileLock
from scu_trainer.runs.state import Report, report
from scu_trainer.runs.store import ENDED, Options, Run, RunRecord, check_name
from scu_trainer.runs.supervisor import settle
from scu_trainer.secrets import SECRET_PARTS, redact

NEEDED_BYTES = 64 * 2**20
REGISTERS_WITHIN_S = 20.0
ENDS_WITHIN_S = 20.0
LOOK_EVERY_S = 0.01
KEPT = ("HF_", "SCU_TRAINER_", "CUDA_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "OMP_", "MKL_", "DS_", "NCCL_", "WANDB_")
"""Variables that a resume from another shell finds again, if they hold nothing secret."""

Spawn = Callable[[Sequence[str], str, Mapping[str, str], Path], Any]


@dataclass(frozen=True)
class Hands:
    """What acts on the system; a test may replace it. ``spawn`` None: the platform's."""

    machine: Machine = field(default_factory=Machine)
    platform: Platform = field(default_factory=this_platform)
    spawn: Optional[Spawn] = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Wish:
    """A start: ``config`` as text, ``flags`` of the training command besides it."""

    name: str
    config: str
    flags: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)


def check(wish: Wish, root: Path) -> None:
    """Everything that can be refused at once. The settings themselves are checked by training."""
    check_name(wish.name)
    path, options = root / wish.name, wish.options
    if path.exists():
        raise SettingsError(f"the name {wish.name!r} is in use: {path} exists; give another --name")
    if not 0 <= options.nice <= 19:
        raise SettingsError(f"nice is {options.nice}; allowed: 0 (as others) to 19 (last)")
    if options.numa_node not in ("auto", "off") and not options.numa_node.isdecimal():
        raise SettingsError(f"numa_node is {options.numa_node!r}; allowed: auto, off, or the number of a node")
    if options.threads is not None and options.threads < 1:
        raise SettingsError(f"threads is {options.threads}; give 1 or more")
    for name in ("max_ram_percent", "max_gpu_percent"):
        if not 0 < getattr(options, name) <= 100:
            raise SettingsError(f"{name} is {getattr(options, name):g}; allowed: above 0, up to 100")
    _check_secrets(wish)
    require_writable(root, "--root")
    require_room(root, NEEDED_BYTES, "--root")


def _check_secrets(wish: Wish) -> None:
    where = "the configuration" if redact(wish.config) != wish.config else "the flags"
    if redact(wish.config) != wish.config or any(redact(flag) != flag for flag in wish.flags):
        raise SettingsError(
            f"{where} of a background run are kept in its directory, and there is a token or password among them; take "
            "it out and set HF_TOKEN or the like in the environment"
        )


# -- starting ----------------------------------------------------------------------------------------------------------


def start(wish: Wish, root: Path, hands: Hands) -> RunRecord:
    """Detach a run and return once it has registered itself. Raises a UserError."""
    check(wish, root)
    run = Run(root / wish.name, wish.name)
    try:
        run.path.mkdir(parents=True)  # takes the name: of two starts at once one gets it
        run.folder.mkdir()
    except FileExistsError as error:
        raise SettingsError(f"the name {wish.name!r} was taken just now; give another --name") from error
    except OSError as error:
        raise StorageError(f"{run.path} cannot be made: {error.strerror}; set --root to another directory") from error
    write_text(run.config, wish.config)
    cwd, variables = str(Path.cwd()), environment()
    record = _record(run, hands, flags=wish.flags, options=wish.options, cwd=cwd, environment=variables)
    return _begin(run, record, hands)


def _record(run: Run, hands: Hands, **fields: Any) -> RunRecord:
    """Of a start that is asked for now."""
    new = {"token": uuid.uuid4().hex, "directory": str(run.path.absolute())}
    return RunRecord(**new, asked_s=time.time(), spawner=hands.machine.identity(), **fields)


def _begin(run: Run, record: RunRecord, hands: Hands) -> RunRecord:
    run.write(record)
    run.stop_request.unlink(missing_ok=True)
    # After the record: "queued" beside a process that has ended would be a run that was killed.
    RunStatus(run.path / "run.json").update(status="queued", pid=None, error=None, eta_s=None)
    _write_start_line(run, record.starts)
    # -P: a folder named like a package, where the command is typed, must not be imported in its place.
    words = [sys.executable, "-P", "-m", "scu_trainer.cli.background.supervisor", str(run.path.absolute())]
    child = (hands.spawn or hands.platform.spawn)(words, record.cwd, _environment_of(record), run.console)
    return _registered(run, child, hands)


def _write_start_line(run: Run, starts: int) -> None:
    try:
        with open(run.console, "a") as file:
            file.write(f"{START_LINE}{starts}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    except OSError as error:
        raise StorageError(f"cannot write {run.console}: {error.strerror}; check the path and its rights") from error


def environment() -> dict[str, str]:
    """Of this process, what a later resume needs; without secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KEPT) and redact(value) == value and {"KEY", *SECRET_PARTS}.isdisjoint(name.split("_"))
    }


def _environment_of(record: RunRecord) -> dict[str, str]:
    found = {**os.environ, **record.environment, MARK: record.token, "PYTHONUNBUFFERED": "1"}
    threads = record.options.threads
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    elif record.options.launcher == "python":
        found.setdefault("OMP_NUM_THREADS", str(room.default_threads()))
    return found


def _registered(run: Run, child: Any, hands: Hands) -> RunRecord:
    begun_s = hands.clock()
    while hands.clock() - begun_s < REGISTERS_WITHIN_S:
        ended = child.poll() is not None  # before looking: it may register and end
        record = run.record()
        if record is not None and record.process is not None:
            return record
        if ended:
            last = last_error(run.console) or "\n".join(tail(run.console).splitlines()[-3:])
            raise StorageError(f"the process of {run.name} ended at once: {last}; see {run.console}")
        hands.sleep(LOOK_EVERY_S)
    raise StorageError(f"the process of {run.name} has not started within {REGISTERS_WITHIN_S:g} s; see {run.console}")


# -- going on ----------------------------------------------------------------------------------------------------------


def resume(run: Run, hands: Hands) -> tuple[RunRecord, Optional[str]]:
    """The same command again, in the same directory, or in the current one where that is gone: a project may have been
    moved. Returns the record and the checkpoint that it goes on from."""
    before = _own_record(run, "resumed")
    with FileLock(run.folder / "start.lock"):  # of two at once the second finds it alive
        seen = report(run, hands.machine)
        if seen.state.is_alive and seen.state.status in ENDED and _all_gone(before, hands, ENDS_WITHIN_S):
            seen = report(run, hands.machine)
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
        is_copy = run.copied_from(before) is not None  # the processes are those of the run that it was copied from
        if before.process is not None and not is_copy and not _all_gone(before, hands, ENDS_WITHIN_S):
            raise SettingsError(f"processes of {run.name} are still ending; try again, or runs stop {run.name} --now")
        checkpoint = newest_checkpoint(run.path, seen.progress.step)
        require_room(run.path, NEEDED_BYTES, "--root")
        same = {name: getattr(before, name) for name in ("flags", "options", "environment")}
        cwd = before.cwd if Path(before.cwd).is_dir() else str(Path.cwd())
        record = _record(run, hands, **same, cwd=cwd, starts=before.starts + 1, goes_on=True)
        return _begin(run, record, hands), checkpoint


def _own_record(run: Run, done: str) -> RunRecord:
    record = run.record()
    if record is None:
        raise SettingsError(
            f"{run.name} was not started by runs start, so it cannot be {done} from here; Ctrl-C in its terminal or "
            "kill -TERM stops it, and the command that started it resumes it"
        )
    return record


# -- stopping ----------------------------------------------------------------------------------------------------------


def stop(run: Run, hands: Hands, timeout_s: Optional[float] = None, now: bool = False) -> Report:
    """Ask it to write a checkpoint and end, and wait for that; ``now``: end all its processes at once.

    Returns what is there afterwards; still alive where ``timeout_s`` was too short.
    """
    record = _awake(run, hands)
    if now:
        _end_all(record, hands)
    elif is_alive(record.process, hands.machine):
        if _is_first_request(run):
            hands.platform.ask_to_stop(_who_is_asked(run, record, hands), hands.machine)
        if not _all_gone(record, hands, timeout_s):
            return report(run, hands.machine)
    after = report(run, hands.machine)
    has_begun = after.progress.step is not None and run.status().get("status") != "queued"
    if not after.state.is_alive and after.state.status == "killed" and (now or not has_begun):
        how = "ended at once by runs stop --now" if now else "stopped before training began"
        settle(run, "stopped", how)
        after = report(run, hands.machine)
    return after


def _awake(run: Run, hands: Hands) -> RunRecord:
    """The record, once the process has registered itself."""
    begun_s = hands.clock()
    while True:
        record = _own_record(run, "stopped")
        first = run.copied_from(record)
        if first is not None:
            raise SettingsError(
                f"{run.name} is a copy of {first} and has no process of its own; scu-trainer runs stop "
                f"{shlex.quote(str(first))} stops that one"
            )
        if record.process is not None:
            return record
        seen = report(run, hands.machine)
        if not seen.state.is_alive or hands.clock() - begun_s > REGISTERS_WITHIN_S:
            raise SettingsError(f"{run.name} has no process: {seen.state.detail}")
        hands.sleep(LOOK_EVERY_S)


def _who_is_asked(run: Run, record: RunRecord, hands: Hands) -> Identity:
    """The first rank, which tells the others: a launcher gives its ranks 30 seconds for a step and a checkpoint, and
    then kills them."""
    members, status = family(record.process, record.token, hands.machine), run.status()
    rank = status.get("pid") if status.get("status") == "running" else None
    return next((member for member in members if member.pid == rank), record.process)


def _is_first_request(run: Run) -> bool:
    """A second signal would end the run without its checkpoint."""
    try:
        run.stop_request.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"cannot write {run.stop_request}: {error.strerror}; --now needs no file") from error
    return True


def _all_gone(record: RunRecord, hands: Hands, timeout_s: Optional[float]) -> bool:
    begun_s = hands.clock()
    while is_alive(record.process, hands.machine) or family(record.process, record.token, hands.machine):
        if timeout_s is not None and hands.clock() - begun_s >= timeout_s:
            return False
        hands.sleep(0.05)
    return True


def _end_all(record: RunRecord, hands: Hands) -> None:
    """Again until nobody is left: one that is being ended may have started another."""
    begun_s = hands.clock()
    while members := family(record.process, record.token, hands.machine):
        if hands.clock() - begun_s > ENDS_WITHIN_S:
            numbers = ", ".join(str(member.pid) for member in members)
            raise StorageError(f"processes {numbers} do not end: they are waiting for a device or disk")
        for member in members:
            hands.platform.end(member, hands.machine)
        hands.sleep(LOOK_EVERY_S)
