"""One run per run directory: a second start is refused while the first one is alive.

A POSIX record lock belongs to the process: the system releases it however the process ends, and loader workers, which
inherit open files, do not hold it. So a lock file that is left on the disk never blocks anyone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.run_files import free_space_hint

LOCK_FILE = "_run.lock"
"""The stock Trainer's uploads skip ``_*``: an upload reads the file, and closing it would release the lock."""

DELETED = "was deleted while it was being written"

BACKGROUND_FILES = {"run.json", "background"}
"""What a background run writes while it waits. A run that has begun also has a training_config.json."""


class RunLock:
    """Locks ``run`` until ``release``, or the end of this process. Raises StorageError if another process has it, or if
    it cannot be written.

    Creates the folder if needed; ``release`` removes it again if nothing was written to it.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._made = not run.exists()
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"{run} cannot be written ({error.strerror}); change its permissions or set another output_dir"
            ) from error
        if not _try_lock(self._descriptor):
            holder = _holder_of_lock(run)
            os.close(self._descriptor)
            raise StorageError(
                f"{run} is being written by {holder}; wait for it or stop it, or give this run another output_dir"
            )
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # the system's message does not name the file
            self.release()
            raise StorageError(
                f"{run / LOCK_FILE} cannot be written ({error.strerror}); {free_space_hint()} or set another output_dir"
            ) from error

    def lost(self) -> Optional[str]:
        """Return what happened to the folder while it was locked; None if it is still in its place."""
        own = os.fstat(self._descriptor)
        try:
            if os.path.samestat(own, os.stat(self.run / LOCK_FILE)):
                return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # it cannot be read, so nothing is known
            return None
        if not own.st_nlink:
            return DELETED
        link = Path(f"/proc/self/fd/{self._descriptor}")  # Linux only
        return f"is now at {link.readlink().parent}" if link.is_symlink() else "was renamed"

    def release(self) -> None:
        """Release the lock; calling this twice is harmless. The file stays: deleting it would race with a new start."""
        if self._descriptor < 0:
            return
        if self._made and self.lost() is None and [path.name for path in self.run.iterdir()] == [LOCK_FILE]:
            (self.run / LOCK_FILE).unlink()
            self.run.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def holds_nothing(run: Path) -> bool:
    """Return whether a folder is empty but for the lock of a start that wrote nothing, or waits for a background
    run."""
    names = {path.name for path in run.iterdir()} - {LOCK_FILE} if run.is_dir() else {"not a folder"}
    return not names or ("background" in names and names <= BACKGROUND_FILES)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either error if another process has the lock
        return False
    return True


def _holder_of_lock(run: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        pid = (run / LOCK_FILE).read_text().strip()
        if pid.isdigit():
            return f"process {pid}"
    return "another process"
