"""A folder of our own inside the user's ``offload_folder``: two runs never write over each other, and nothing stays."""

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
    """A new folder ``path`` inside ``outer``, there as long as this object is: a model keeps the one that it reads.

    Folders of runs that were killed are removed first. Raises StorageError if ``outer`` cannot be written.
    """

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
    if os.getpid() != pid:  # a forked worker's copy of the object
        return
    shutil.rmtree(path, ignore_errors=True)  # files that a remote disk still holds: the next run removes them
    os.close(lock)


def _remove_abandoned(inside: Path) -> None:
    """The system drops a lock with the process that held it, however that ended."""
    for marker in (found for found in inside.glob(f"{PREFIX}*/{MARKER}") if OURS.fullmatch(found.parent.name)):
        with open(marker) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            logger.info("offload_folder: %s was left behind by a killed run, and is removed", marker.parent)
            remove_inside(inside, marker.parent.name, OURS)
