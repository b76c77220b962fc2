"""Processes: which one it is, whether it lives, what belongs to it, and how it is started, slowed and ended.

A number is not a process: systems give numbers out again. Here a process is its number, when it was born, the boot of
the machine and the machine. ``Machine`` says what the system knows; ``Posix`` and ``Windows`` act. Tests give others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union

import psutil

from scu_trainer.errors import RequirementError

MARK = "SCU_TRAINER_BACKGROUND"
"""Environment variable with the token of a start: children that leave the session still have it."""

BOOT_TOLERANCE_S = 300.0
"""Where a boot has no name, only a time: setting the clock moves that."""

Fact = Literal["alive", "suspended", "dead", "other program", "rebooted", "elsewhere"]


@dataclass(frozen=True)
class Identity:
    """``born``: on Linux in ticks since the boot, which no clock moves; elsewhere in seconds since 1970."""

    pid: int
    born: float
    boot: str
    host: str


@dataclass(frozen=True)
class ProcessInfo:
    """A process that is there. ``state``: "running", "suspended" or "zombie"."""

    born: float
    state: str


class Machine:
    """What this system says of itself and of its processes."""

    def host(self) -> str:
        return platform.node()

    @staticmethod
    @functools.cache
    def boot() -> str:
        """A name that is new at each boot; where there is none the time of the boot in seconds since 1970."""
        name = Path("/proc/sys/kernel/random/boot_id")
        return name.read_text().strip() if name.is_file() else f"{psutil.boot_time():.0f}"

    def process(self, pid: int) -> Optional[ProcessInfo]:
        return _linux_process(pid) if sys.platform == "linux" else _other_process(pid)

    def identity(self, pid: Optional[int] = None) -> Identity:
        """Of this process, or of another one that is there. Raises ProcessLookupError."""
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


def _other_process(pid: int) -> Optional[ProcessInfo]:
    try:
        process = psutil.Process(pid)
        states = {psutil.STATUS_ZOMBIE: "zombie", psutil.STATUS_STOPPED: "suspended"}
        return ProcessInfo(process.create_time(), states.get(process.status(), "running"))
    except psutil.ZombieProcess:
        return ProcessInfo(0.0, "zombie")
    except psutil.NoSuchProcess:
        return None


# -- does it live ------------------------------------------------------------------------------------------------------


def look(identity: Identity, machine: Machine) -> Fact:
    """What has become of a process. A zombie is dead: it does nothing any more."""
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


def is_alive(identity: Identity, machine: Machine) -> bool:
    return look(identity, machine) in ("alive", "suspended")


def _same_boot(before: str, now: str) -> bool:
    if before.isdigit() and now.isdigit():
        return abs(int(before) - int(now)) <= BOOT_TOLERANCE_S
    return before == now


def family(supervisor: Identity, token: str, machine: Machine) -> list[Identity]:
    """All that lives of a run: the supervisor, its session, and children that left the session but have its token."""
    return [member for member in _processes(machine) if _belongs(member, supervisor, token, machine)]


def marked(token: str, machine: Machine) -> list[Identity]:
    """All that lives and was given ``token`` as its MARK, whoever started it."""
    return [member for member in _processes(machine) if _has_mark(member.pid, token)]


def _processes(machine: Machine) -> Iterator[Identity]:
    for pid in psutil.pids():
        seen = machine.process(pid)
        if seen is not None and seen.state != "zombie" and pid != os.getpid():
            yield Identity(pid, seen.born, machine.boot(), machine.host())


def _belongs(member: Identity, supervisor: Identity, token: str, machine: Machine) -> bool:
    if member.born < supervisor.born or not _same_boot(supervisor.boot, member.boot) or supervisor.host != member.host:
        return False
    if member.pid == supervisor.pid:
        return member.born == supervisor.born
    is_in_session = _session(member.pid) == supervisor.pid and not _is_taken_over(supervisor, machine)
    return is_in_session or _has_mark(member.pid, token)


def _is_taken_over(supervisor: Identity, machine: Machine) -> bool:
    """Whether a younger process bears the supervisor's number, so that the session of this number is another one."""
    seen = machine.process(supervisor.pid)
    return seen is not None and seen.born != supervisor.born


def _session(pid: int) -> Optional[int]:
    if not hasattr(os, "getsid"):
        return None
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _has_mark(pid: int, token: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(MARK) == token
    except (psutil.Error, OSError):  # another user's, or gone meanwhile
        return False


# -- acting ------------------------------------------------------------------------------------------------------------

_detached: list[subprocess.Popen] = []
"""Kept while they live: dropping the Popen of a process that runs is a ResourceWarning, and leaves its zombie."""


def _started(
    popen: Callable[..., Any],
    words: Sequence[str],
    cwd: Union[str, Path],
    environment: Mapping[str, str],
    log: Path,
    **options: Any,
) -> Any:
    with open(log, "ab") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return popen(list(words), cwd=cwd, env=dict(environment), **files, **options)


class Posix:
    """Linux and macOS."""

    def spawn(self, words: Sequence[str], cwd: Union[str, Path], environment: Mapping[str, str], log: Path) -> Any:
        """Start a process that outlives this one and its terminal. Returns its Popen."""
        child = _started(subprocess.Popen, words, cwd, environment, log, start_new_session=True)
        _detached[:] = [*(before for before in _detached if before.poll() is None), child]
        return child

    def lower_priority(self, nice: int) -> list[str]:
        """Let others go first, on processor and disk. Returns what was not possible, in words."""
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

    def ask_to_stop(self, process: Identity, machine: Machine) -> bool:
        """SIGTERM. Whether the process was there to get it."""
        return _send(process, signal.SIGTERM, machine)

    def end(self, process: Identity, machine: Machine) -> bool:
        """SIGKILL. Whether the process was there to get it."""
        return _send(process, signal.SIGKILL, machine)

    def watch_for_stop(self, request: Path) -> None:
        """Nothing to do: a signal comes by itself."""


def _send(process: Identity, number: int, machine: Machine) -> bool:
    """A signal to this process and to none that has taken its number in the meantime. Raises RequirementError."""
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


def _send_to_descriptor(process: Identity, number: int, machine: Machine) -> bool:
    descriptor = os.pidfd_open(process.pid)  # from here on it stands for the process that we look at
    try:
        if not is_alive(process, machine):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


class Windows:
    """Written by the documentation and tested by injection only: training itself was not run on Windows.

    A detached process has no console, so no Ctrl-Break reaches it: it looks for the file of the request instead and
    interrupts itself, which training answers as it answers Ctrl-C. ``popen``, ``process``, ``interrupt``: for tests.
    """

    DETACHED = 0x00000008 | 0x00000200  # DETACHED_PROCESS | CREATE_NEW_PROCESS_GROUP of the Windows API
    LOOK_EVERY_S = 0.5

    def __init__(
        self,
        popen: Callable[..., Any] = subprocess.Popen,
        process: Callable[..., Any] = psutil.Process,
        interrupt: Optional[Callable[[], None]] = None,
    ) -> None:
        self._popen, self._process = popen, process
        self._interrupt = interrupt or (lambda: signal.raise_signal(signal.SIGINT))

    def spawn(self, words: Sequence[str], cwd: Union[str, Path], environment: Mapping[str, str], log: Path) -> Any:
        return _started(self._popen, words, cwd, environment, log, creationflags=self.DETACHED)

    def lower_priority(self, nice: int) -> list[str]:
        """From 1 on below normal, from 15 on idle: Windows has classes, not numbers."""
        below, idle = 0x4000, 0x40
        if nice > 0:
            self._process().nice(idle if nice >= 15 else below)
        return []

    def ask_to_stop(self, process: Identity, machine: Machine) -> bool:
        """The request is the file, which the caller has written."""
        return is_alive(process, machine)

    def end(self, process: Identity, machine: Machine) -> bool:
        if not is_alive(process, machine):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process(process.pid).kill()
        return True

    def watch_for_stop(self, request: Path) -> None:
        """In a thread of this process: interrupts its main thread once ``request`` is there."""
        import threading

        threading.Thread(target=self.wait_and_interrupt, args=(request,), daemon=True).start()

    def wait_and_interrupt(self, request: Path) -> None:
        import time

        while not request.exists():
            time.sleep(self.LOOK_EVERY_S)
        self._interrupt()


Platform = Union[Posix, Windows]


def this_platform(name: str = sys.platform) -> Platform:
    return Windows() if name == "win32" else Posix()
