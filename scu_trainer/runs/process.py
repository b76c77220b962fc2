"""Identify processes, check whether they are alive, find the processes of a run, and start, slow down and end them.

A process ID does not identify a process, because systems reuse the numbers. Here a process is identified by its number,
its creation time, the boot of the machine, and the name of the machine. Tests replace ``System``.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional, Union

import psutil

from scu_trainer.errors import RequirementError

TOKEN_VARIABLE = "SCU_TRAINER_BACKGROUND"
"""Environment variable that holds the token of a start. Children that leave the session still inherit it."""

BOOT_TOLERANCE_S = 300.0
"""How far two times of the same boot may differ: on systems without a boot ID, setting the clock moves that time."""

Fact = Literal["alive", "suspended", "dead", "other program", "rebooted", "elsewhere"]


@dataclass(frozen=True)
class Identity:
    """What identifies a process. ``born``: its creation time, on Linux in ticks since the boot, which do not change
    when the clock is set; elsewhere in seconds since 1970. ``boot``: see ``System.boot``."""

    pid: int
    born: float
    boot: str
    host: str


@dataclass(frozen=True)
class ProcessInfo:
    """A process that exists. ``state``: "running", "suspended" or "zombie"."""

    born: float
    state: str


class System:
    """Queries about this machine and its processes."""

    def host(self) -> str:
        return platform.node()

    @staticmethod
    @functools.cache
    def boot() -> str:
        """Return an ID that is new at each boot, or the time of the boot in seconds since 1970 if there is none."""
        name = Path("/proc/sys/kernel/random/boot_id")
        return name.read_text().strip() if name.is_file() else f"{psutil.boot_time():.0f}"

    def process(self, pid: int) -> Optional[ProcessInfo]:
        return _linux_process(pid) if sys.platform == "linux" else _psutil_process(pid)

    def identity(self, pid: Optional[int] = None) -> Identity:
        """Return the identity of process ``pid``, or of this process. Raises ProcessLookupError if there is none."""
        number = os.getpid() if pid is None else pid
        seen = self.process(number)
        if seen is None:
            raise ProcessLookupError(f"there is no process {number}")
        return Identity(number, seen.born, self.boot(), self.host())


def _linux_process(pid: int) -> Optional[ProcessInfo]:
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name before may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    states = {b"Z": "zombie", b"X": "zombie", b"T": "suspended"}
    return ProcessInfo(float(words[19]), states.get(words[0], "running"))


def _psutil_process(pid: int) -> Optional[ProcessInfo]:
    try:
        process = psutil.Process(pid)
        states = {psutil.STATUS_ZOMBIE: "zombie", psutil.STATUS_STOPPED: "suspended"}
        return ProcessInfo(process.create_time(), states.get(process.status(), "running"))
    except psutil.ZombieProcess:
        return ProcessInfo(0.0, "zombie")
    except psutil.NoSuchProcess:
        return None


# -- whether a process is alive ----------------------------------------------------------------------------------------


def check_process(identity: Identity, machine: System) -> Fact:
    """Return what happened to a process. A zombie counts as dead, because it does nothing any more."""
    if identity.host != machine.host():
        return "elsewhere"
    if not _same_boot(identity.boot, machine.boot()):
        return "rebooted"
    seen = machine.process(identity.pid)
    if seen is None or seen.state == "zombie":
        return "dead"
    if seen.born != identity.born:
        return "other program"
    return "suspended" if seen.state == "suspended" else "alive"


def is_alive(identity: Identity, machine: System) -> bool:
    return check_process(identity, machine) in ("alive", "suspended")


def _same_boot(before: str, now: str) -> bool:
    if before.isdigit() and now.isdigit():
        return abs(int(before) - int(now)) <= BOOT_TOLERANCE_S
    return before == now


def processes_of_run(supervisor: Identity, token: str, machine: System) -> list[Identity]:
    """Return the living processes of a run: the supervisor, its session, and children that left the session but have
    its token."""
    return [member for member in _processes(machine) if _belongs(member, supervisor, token, machine)]


def processes_with_token(token: str, machine: System) -> list[Identity]:
    """Return all living processes that have ``token`` in the environment variable TOKEN_VARIABLE."""
    return [member for member in _processes(machine) if _has_token(member.pid, token)]


def _processes(machine: System) -> Iterator[Identity]:
    for pid in psutil.pids():
        seen = machine.process(pid)
        if seen is not None and seen.state != "zombie" and pid != os.getpid():
            yield Identity(pid, seen.born, machine.boot(), machine.host())


def _belongs(member: Identity, supervisor: Identity, token: str, machine: System) -> bool:
    if member.born < supervisor.born or not _same_boot(supervisor.boot, member.boot) or supervisor.host != member.host:
        return False
    if member.pid == supervisor.pid:
        return member.born == supervisor.born
    is_in_session = _session_of(member.pid) == supervisor.pid and not _is_number_reused(supervisor, machine)
    return is_in_session or _has_token(member.pid, token)


def _is_number_reused(supervisor: Identity, machine: System) -> bool:
    """Whether a newer process has the number of the supervisor, so that the session of this number is another one."""
    seen = machine.process(supervisor.pid)
    return seen is not None and seen.born != supervisor.born


def _session_of(pid: int) -> Optional[int]:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _has_token(pid: int, token: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(TOKEN_VARIABLE) == token
    except (psutil.Error, OSError):  # it belongs to another user, or has ended meanwhile
        return False


# -- acting ------------------------------------------------------------------------------------------------------------

_detached: list[subprocess.Popen] = []
"""Popen objects of running processes: dropping one would cause a ResourceWarning and leave a zombie."""


def spawn_detached(
    words: Sequence[str], cwd: Union[str, Path], environment: Mapping[str, str], log: Path
) -> subprocess.Popen:
    """Start a process that outlives this one and its terminal. It reads nothing, and appends its output to ``log``."""
    with open(log, "ab") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        child = subprocess.Popen(list(words), cwd=cwd, env=dict(environment), **files, start_new_session=True)
    _detached[:] = [*(before for before in _detached if before.poll() is None), child]
    return child


def lower_priority(nice: int) -> list[str]:
    """Lower the CPU and disk priority of this process. Returns a message for each step that was not possible."""
    failed = []
    try:
        os.nice(nice)
    except OSError as error:
        failed.append(f"nice {nice} was not possible: {error.strerror}")
    process = psutil.Process()
    if not hasattr(process, "ionice"):
        return [*failed, "this system has no disk priority (ionice)"]
    try:
        process.ionice(psutil.IOPRIO_CLASS_BE, 7)
    except (OSError, psutil.Error) as error:
        failed.append(f"the disk priority could not be lowered: {error}")
    return failed


def send_signal(process: Identity, number: int, machine: System) -> bool:
    """Send a signal to this process, never to one that got its number in the meantime. Returns whether it was alive.
    Raises RequirementError if the process belongs to another user."""
    try:
        if hasattr(os, "pidfd_open"):
            return _send_to_descriptor(process, number, machine)
        if is_alive(process, machine):
            os.kill(process.pid, number)
            return True
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise RequirementError(f"process {process.pid} belongs to another user; ask them to stop it") from error
    return False


def _send_to_descriptor(process: Identity, number: int, machine: System) -> bool:
    descriptor = os.pidfd_open(process.pid)  # refers to the same process from here on, even if its number is reused
    try:
        if not is_alive(process, machine):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)
