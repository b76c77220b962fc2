"""A private folder inside the user's ``offload_folder``, so that two runs never overwrite each other. It is removed
when it is no longer used; the next run removes one that a killed run left behind."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

from scu_trainer.run_files import require_writable
from scu_trainer.safe_paths import remove_inside

logger = logging.getLogger("scu_trainer")

PREFIX = "scu-trainer-"
OURS = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
MARKER = "in_use"


class OffloadFolder:
    """A new folder ``path`` inside ``outer`` that is deleted with this object; a model keeps the object that it reads.
    Folders that killed runs left behind are removed first. Raises StorageError if ``outer`` cannot be written."""

    def __init__(self, outer: str) -> None:
        require_writable(outer, "offload_folder")
        inside = Path(outer).expanduser().absolute()
        inside.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(inside)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=inside))
        lock = os.open(self.path / MARKER, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        weakref.finalize(self, _release, self.path, lock, os.getpid())


def _release(path: Path, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked worker has a copy of the object
        return
    shutil.rmtree(path, ignore_errors=True)  # the next run removes files that a remote disk still holds
    os.close(lock)


def _remove_abandoned(inside: Path) -> None:
    """Remove the folders whose lock is free: the system releases a lock when its process ends, however it ends."""
    for marker in (found for found in inside.glob(f"{PREFIX}*/{MARKER}") if OURS.fullmatch(found.parent.name)):
        with open(marker) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            logger.info("offload_folder: removing %s, which a killed run left behind", marker.parent)
            remove_inside(inside, marker.parent.name, OURS)
