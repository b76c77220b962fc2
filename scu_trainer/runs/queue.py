"""A waiting line of width 1 for each device, without a daemon: who waits looks for itself whether its turn has come.

    CACHE/queue/HOST/gpu-0/line.lock      held for an instant while somebody joins
                           turn.lock      held by the run whose turn it is; the system gives it back however that ends
                           00000007.json  a place in the line: which process, which run

The lower number comes first. A place whose process is dead counts for nothing, and is removed by the next who joins.
A record lock survives ``exec``, so a launcher that takes the place of the waiting process still holds it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.run_files import read_json, write_json
from scu_trainer.runs.process import Identity, Machine, is_alive

LOOK_EVERY_S = 0.5
ROOM_EVERY_S = 5.0
"""Seconds between two looks at the memory of machine and GPU."""


def default_folder() -> Path:
    """Below the cache of this user. Several machines may share a home: each has its own."""
    cache = Path(os.environ.get("SCU_TRAINER_CACHE") or "~/.cache/scu_trainer").expanduser().absolute()
    return cache / "queue" / platform.node()


class FileLock:
    """A lock on ``path`` that goes with the process. Raises StorageError if it cannot be opened.

    On POSIX systems closing any other descriptor of the file would give it back: nothing else opens these.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}; check the path and its rights") from error

    def acquire(self, wait: bool = False) -> bool:
        """Whether we have it now. ``wait``: until we do."""
        try:
            import fcntl
        except ImportError:
            return _windows_lock(self._descriptor, wait)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):  # POSIX allows either where another process has it
            return False
        return True

    def keep_through_exec(self) -> None:
        os.set_inheritable(self._descriptor, True)

    def release(self) -> None:
        """Releasing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FileLock:
        self.acquire(wait=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _windows_lock(descriptor: int, wait: bool) -> bool:
    import msvcrt

    try:
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class QueuePlace:
    """In the line. ``run``: its directory."""

    number: int
    process: Identity
    run: str


class Line:
    """The waiting line of one device."""

    def __init__(self, device: str, folder: Optional[Path] = None, machine: Optional[Machine] = None) -> None:
        self.device, self.folder = device, (folder or default_folder()) / device
        self._machine = machine or Machine()
        self._turn: Optional[FileLock] = None

    def join(self, process: Identity, run: Path) -> QueuePlace:
        """At the end. Dead places are cleared away: only here, so that no number is given out twice meanwhile."""
        with FileLock(self.folder / "line.lock"):
            places = self._places()
            for place in places:
                if not is_alive(place.process, self._machine):
                    self._file(place.number).unlink()
            place = QueuePlace(1 + max((place.number for place in places), default=0), process, str(run.absolute()))
            write_json(self._file(place.number), asdict(place))
        return place

    def waiting(self) -> list[QueuePlace]:
        """Who is alive in the line, the one whose turn it is first."""
        return [place for place in self._places() if is_alive(place.process, self._machine)]

    def take_turn(self, place: QueuePlace) -> bool:
        """Whether it is the turn of ``place``. It is kept until the end of this process."""
        if self._turn is not None:
            return True
        if any(other.number < place.number for other in self.waiting()):
            return False
        lock = FileLock(self.folder / "turn.lock")
        if not lock.acquire():
            lock.release()
            return False
        self._turn = lock
        return True

    def leave(self, place: QueuePlace) -> None:
        """Before the end of the process, for one that has more to do."""
        with FileLock(self.folder / "line.lock"):
            self._file(place.number).unlink(missing_ok=True)
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def keep_through_exec(self) -> None:
        if self._turn is not None:
            self._turn.keep_through_exec()

    def _places(self) -> list[QueuePlace]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")) if self.folder.is_dir() else ():
            try:
                content = read_json(path)
            except StorageError:
                if path.exists():
                    raise
                continue  # it left in between
            found.append(QueuePlace(content["number"], Identity(**content["process"]), content["run"]))
        return found

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def wait_for_turn(
    line: Line,
    place: QueuePlace,
    lacks: Callable[[], Optional[str]],
    tell: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Until it is our turn and ``lacks`` finds nothing missing. ``tell`` gets what is waited for, when that changes."""
    said = ""
    while True:
        is_turn = line.take_turn(place)
        reason = lacks() if is_turn else f"for {line.device}"
        if reason is None:
            return
        if reason != said:
            tell(reason)
            said = reason
        sleep(ROOM_EVERY_S if is_turn else LOOK_EVERY_S)
