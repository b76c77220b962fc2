"""Find and remove files of this project that no process uses: caches, and what killed runs left behind.

Finding removes nothing, and ``remove`` checks again before it removes. An entry counts as in use if a living process
has one of its files open, mapped or locked, or if that cannot be determined.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.safe_paths import freed_bytes, remove_inside

PROC = Path("/proc")
TEMPORARY_NAME = "[a-z0-9_]{8}"
"""Pattern of what Python's tempfile appends to a prefix."""

TEST_RUN = "scu-test-run-"
SCRATCH = (TEST_RUN, "scu-variants-")
"""Prefixes of the temporary folders of our commands."""

CACHE_ENTRY = re.compile(r"[\w.-]+")
PART = ".part"
OUR_COMMAND = re.compile(r"scu[-_]trainer|scripts/train\.py")


class InUse(Exception):
    """Another process uses an entry, perhaps since it was found; the message says which one."""


Lock = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Leftover:
    """One entry ``name`` of ``folder`` that may be removed.

    Fields:
        kind: what it is, for the user. pattern: what its name must match.
        size_bytes: bytes of the disk that its removal frees.
        used_by: why it must stay; None if it may be removed.
        lock: returns a context in which no other process can start to use it; entering it may raise InUse.
        aside: a name that marks an incomplete entry; it is renamed to this first, so that an interrupted removal does
            not leave an entry that looks complete.
        may_be_opened: whether any living process of this project may open it at any moment.
    """

    kind: str
    folder: Path
    name: str
    pattern: re.Pattern
    size_bytes: int
    used_by: Optional[str] = None
    lock: Lock = field(default=contextlib.nullcontext, compare=False)
    aside: Optional[str] = None
    may_be_opened: bool = False

    @property
    def path(self) -> Path:
        return self.folder / self.name


@dataclass(frozen=True)
class Users:
    """Which files living processes have open or mapped, by pid, and the other processes of this project (``ours``).
    ``is_complete`` is False if the system does not report this for all processes that may use our files."""

    files: dict[Path, int]
    ours: dict[int, str]
    is_complete: bool

    def of(self, path: Path) -> Optional[str]:
        """Return which process uses ``path`` or a file below it, in words; None if none does."""
        if not self.is_complete:
            return "this system does not report which process uses it"
        resolved = path.resolve()
        pid = next((pid for file, pid in self.files.items() if file == resolved or resolved in file.parents), None)
        return None if pid is None else f"in use by process {pid}"

    def possible_user(self) -> Optional[str]:
        """Return which process of this project may be about to open an entry, in words; None if there is none."""
        if not self.is_complete:
            return "this system does not report which process uses it"
        pid = next(iter(self.ours), None)
        return None if pid is None else f"may be in use by process {pid} ({self.ours[pid]})"


def users(proc: Path = PROC) -> Users:
    """Return who uses files, from ``proc``, the folder in which the system describes its processes. The open files of
    other users' processes are not visible, but all entries found here belong to this user."""
    import psutil

    # A process that started this command, such as a shell, may have its words in its own command line.
    ancestors = {parent.pid for parent in psutil.Process().parents()}
    files: dict[Path, int] = {}
    ours: dict[int, str] = {}
    folders = [path for path in proc.glob("[0-9]*") if path.name != str(os.getpid())] if proc.is_dir() else []
    hidden = False
    for folder in folders:
        pid = int(folder.name)
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            files |= dict.fromkeys(_open_files(folder), pid)
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        except PermissionError:
            hidden = hidden or _may_use_our_files(folder)
            continue
        if "python" in command and OUR_COMMAND.search(command) and pid not in ancestors:
            ours[pid] = command[:60]
    return Users(files, ours, is_complete=bool(folders) and not hidden)


def _may_use_our_files(process: Path) -> bool:
    """Return whether a process with hidden open files may use ours: if it belongs to this user and runs Python."""
    try:
        return process.stat().st_uid == os.getuid() and b"python" in (process / "cmdline").read_bytes()
    except FileNotFoundError:
        return False
    except PermissionError:
        return True


def _open_files(process: Path) -> Iterator[Path]:
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield Path(os.readlink(link))
    for line in (process / "maps").read_text(errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            yield Path(words[5])


# -- finding -----------------------------------------------------------------------------------------------------------


def size_bytes(path: Path) -> int:
    """Return the bytes that removing ``path`` frees: those of its regular files that have no other hard links."""
    found = path.lstat()
    return sum(map(size_bytes, path.iterdir())) if stat.S_ISDIR(found.st_mode) else freed_bytes(found)


def cached(cache_dir: Path, kinds: Sequence[str], who: Users) -> Iterator[Leftover]:
    """Yield the entries of our cache, ``cache_dir``/kind/name, which are built again when they are needed."""
    for kind in kinds:
        folder = cache_dir / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() and CACHE_ENTRY.fullmatch(path.name):
                whole = path.name.removesuffix(PART)
                lock = functools.partial(_file_lock, folder / f"{whole}.lock")
                used_by = who.possible_user() or who.of(path) or locked_by(lock)
                sizes = (CACHE_ENTRY, size_bytes(path))
                yield Leftover(f"cache: {kind}", folder, path.name, *sizes, used_by, lock, f"{whole}{PART}", True)


@contextlib.contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Hold the lock of ``data.store.build_once``, so that no process builds the entry meanwhile. Raises InUse."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise InUse("another process is building it") from None


def scratch(folder: Path, prefixes: Iterable[str], who: Users) -> Iterator[Leftover]:
    """Yield temporary folders of our commands that killed processes left behind."""
    for prefix in prefixes:
        pattern = re.compile(re.escape(prefix) + TEMPORARY_NAME)
        for path in sorted(folder.glob(f"{prefix}*")):
            if pattern.fullmatch(path.name) and path.is_dir() and path.stat().st_uid == os.getuid():
                used_by = who.possible_user() or who.of(path)
                sizes = (pattern, size_bytes(path))
                yield Leftover("scratch folder", folder, path.name, *sizes, used_by, may_be_opened=True)


def build_locks(folders: Iterable[Path], who: Users) -> Iterator[Leftover]:
    """Yield the ``lock`` files of killed builds of torch extensions; the next build would wait for them forever."""
    for folder in folders:
        for path in sorted(folder.glob("**/lock")):
            if path.is_file():
                yield Leftover("build lock", path.parent, "lock", re.compile("lock"), size_bytes(path), who.of(path))


def offloaded(folders: Iterable[Path], pattern: re.Pattern, marker: str) -> Iterator[Leftover]:
    """Yield the weights that killed runs offloaded to disk; a living run holds a lock on the file ``marker``."""
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if pattern.fullmatch(path.name) and (path / marker).is_file():
                lock = functools.partial(_flock, path / marker)
                used_by = locked_by(lock)
                yield Leftover("offloaded weights", folder, path.name, pattern, size_bytes(path), used_by, lock)


def locked_by(lock: Lock) -> Optional[str]:
    """Return who holds ``lock``, in words; None if it is free."""
    try:
        with lock():
            return None
    except InUse as error:
        return str(error)


@contextlib.contextmanager
def _flock(path: Path) -> Iterator[None]:
    import fcntl

    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse("in use by a run that is still running") from None
        yield


# -- removing ----------------------------------------------------------------------------------------------------------


def remove(item: Leftover, who: Callable[[], Users] = users) -> int:
    """Remove ``item`` and return the freed bytes. Raises InUse if it is used by now, StorageError if it fails."""
    if item.used_by is not None:
        raise InUse(item.used_by)
    with item.lock():
        living = who()
        current = (living.possible_user() if item.may_be_opened else None) or living.of(item.path)
        if current is not None:
            raise InUse(current)
        if item.aside is None or item.name == item.aside:
            return remove_inside(item.folder, item.name, item.pattern)
        freed = remove_inside(item.folder, item.aside, item.pattern)
        try:
            item.path.rename(item.folder / item.aside)
        except OSError as error:
            raise StorageError(f"cannot remove {item.path}: {error.strerror}; check its permissions") from error
        return freed + remove_inside(item.folder, item.aside, item.pattern)
