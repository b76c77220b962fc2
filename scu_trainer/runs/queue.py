"""A queue for each device, without a daemon: one run trains at a time, and each waiting run polls for its turn.

    CACHE/queue/HOST/gpu-0/line.lock      held briefly while a run joins or leaves the queue
                           turn.lock      held by the run that trains; the system releases it however that run ends
                           00000007.json  a place in the queue: its process and its run

The lowest number comes first. A place whose process is dead is ignored, and is removed by the next run that joins.
A record lock survives ``exec``, so a launcher that replaces the waiting process still holds the lock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.json_types import misfit
from scu_trainer.run_files import read_json, write_json
from scu_trainer.runs.process import Identity, System, is_alive

LOOK_EVERY_S = 0.5
ROOM_EVERY_S = 5.0
"""Seconds between two checks of the memory of the machine and the GPU."""


def default_folder() -> Path:
    """Return the folder of the queues of this machine, in the cache of this user: machines may share a home."""
    cache = Path(os.environ.get("SCU_TRAINER_CACHE") or "~/.cache/scu_trainer").expanduser().absolute()
    return cache / "queue" / platform.node()


class FileLock:
    """A lock on ``path`` that is released when the process ends. Raises StorageError if the file cannot be opened.

    On POSIX systems, closing any other descriptor of the file would release the lock, so nothing else may open it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}; check the path and its permissions") from error

    def acquire(self, wait: bool = False) -> bool:
        """Return whether this process holds the lock now. ``wait``: block until it does."""
        import fcntl

        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):  # POSIX allows either error if another process holds the lock
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


@dataclass(frozen=True)
class QueueEntry:
    """A place in a queue. ``run``: the directory of the run."""

    number: int
    process: Identity
    run: str


class DeviceQueue:
    """The queue of one device."""

    def __init__(self, device: str, folder: Optional[Path] = None, machine: Optional[System] = None) -> None:
        self.device, self.folder = device, (folder or default_folder()) / device
        self._machine = machine or System()
        self._turn: Optional[FileLock] = None

    def join(self, process: Identity, run: Path) -> QueueEntry:
        """Add a place at the end. Places of dead processes are removed here only, so that no number is used twice."""
        with FileLock(self.folder / "line.lock"):
            places = self._places()
            for place in places:
                if not is_alive(place.process, self._machine):
                    self._file(place.number).unlink()
            place = QueueEntry(1 + max((place.number for place in places), default=0), process, str(run.absolute()))
            write_json(self._file(place.number), asdict(place))
        return place

    def waiting(self) -> list[QueueEntry]:
        """Return the places whose processes are alive, in order. The first one has its turn."""
        return [place for place in self._places() if is_alive(place.process, self._machine)]

    def take_turn(self, place: QueueEntry) -> bool:
        """Take the turn if ``place`` is first, and return whether this process has it now. ``leave``, or the end of the
        process, gives it up."""
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

    def leave(self, place: QueueEntry) -> None:
        """Give up the place and the turn, for a process that does something else afterwards."""
        with FileLock(self.folder / "line.lock"):
            self._file(place.number).unlink(missing_ok=True)
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def keep_through_exec(self) -> None:
        if self._turn is not None:
            self._turn.keep_through_exec()

    def _places(self) -> list[QueueEntry]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")) if self.folder.is_dir() else ():
            try:
                content = read_json(path)
            except StorageError:
                if path.exists():
                    raise
                continue  # it left the queue in the meantime
            wrong = misfit(content, QueueEntry, "it", null_is_nan=False)
            if wrong is not None:
                raise StorageError(f"{path} is not a place in the queue of {self.device} ({wrong}); delete it")
            found.append(QueueEntry(content["number"], Identity(**content["process"]), content["run"]))
        return found

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def wait_for_turn(
    queue: DeviceQueue,
    place: QueueEntry,
    lacks: Callable[[], Optional[str]],
    tell: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Wait until it is the turn of ``place`` and ``lacks`` returns None. ``tell`` gets each new reason for waiting."""
    last_reason = ""
    while True:
        is_turn = queue.take_turn(place)
        reason = lacks() if is_turn else f"for {queue.device}"
        if reason is None:
            return
        if reason != last_reason:
            tell(reason)
            last_reason = reason
        sleep(ROOM_EVERY_S if is_turn else LOOK_EVERY_S)
