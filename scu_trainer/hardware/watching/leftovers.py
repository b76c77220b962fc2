"""What of ours takes room on the disk and is used by nobody: caches, and what killed runs left behind.

Finding removes nothing; ``remove`` looks again before it does. An entry is in use while a living process has a file of
it open or mapped, or has locked it, or where that is not known.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from scu_trainer.errors import StorageError
from scu_trainer.safe_paths import remove_inside

PROC = Path("/proc")
TEMPORARY_NAME = "[a-z0-9_]{8}"
"""What Python's tempfile puts after a prefix."""

TEST_RUN = "scu-test-run-"
SCRATCH = (TEST_RUN, "scu-variants-")
"""How the temporary folders of our commands begin."""

CACHE_ENTRY = re.compile(r"[\w.-]+")
PART = ".part"
OUR_COMMAND = re.compile(r"scu[-_]trainer|scripts/train\.py")


class InUse(Exception):
    """Somebody took an entry between finding and removing it. The message says who."""


Lock = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Leftover:
    """One entry ``name`` of ``folder``. ``kind``: what it is, for people. ``pattern``: what its name must be.

    ``size_bytes``: of the disk that its removal frees. ``used_by``: why it stays; None where it may go. ``lock``:
    makes a context in which nobody else can begin to use it; raises InUse. ``aside``: another name that nobody takes
    for a whole entry, so that a removal that is interrupted leaves none that is half there. ``may_be_opened``: by any
    process of ours that lives, at any moment.
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
    """Which files living processes have open or mapped. ``ours``: other processes of this project, by pid.

    ``is_complete``: False where the system does not tell, or not of all processes that may use our files."""

    files: dict[Path, int]
    ours: dict[int, str]
    is_complete: bool

    def of(self, path: Path) -> Optional[str]:
        """Who uses ``path`` or a file below it, in words; None for nobody."""
        if not self.is_complete:
            return "this system does not tell who uses it"
        resolved = path.resolve()
        pid = next((pid for file, pid in self.files.items() if file == resolved or resolved in file.parents), None)
        return None if pid is None else f"in use by process {pid}"

    def any_of_ours(self) -> Optional[str]:
        """A process that may be about to open what it has prepared; None where there is none."""
        if not self.is_complete:
            return "this system does not tell who uses it"
        pid = next(iter(self.ours), None)
        return None if pid is None else f"may be in use by process {pid} ({self.ours[pid]})"


def users(proc: Path = PROC) -> Users:
    """``proc``: the folder in which the system describes its processes. What other users' processes have open is not to
    be seen; what is found here belongs to this user."""
    import psutil

    # Whoever started this command, such as a shell, has its words in the command line.
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
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        except PermissionError:
            hidden = hidden or _may_use_our_files(folder)
            continue
        if "python" in command and OUR_COMMAND.search(command) and pid not in ancestors:
            ours[pid] = command[:60]
    return Users(files, ours, is_complete=bool(folders) and not hidden)


def _may_use_our_files(process: Path) -> bool:
    """Of a process whose open files are hidden: whether it is this user's, and runs Python."""
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
    """Of the regular files, links not followed; a file with other names elsewhere frees nothing."""
    if not path.is_dir() or path.is_symlink():
        found = path.lstat()
        return found.st_size if found.st_nlink == 1 and path.is_file() and not path.is_symlink() else 0
    return sum(size_bytes(Path(entry.path)) for entry in os.scandir(path))


def cached(cache_dir: Path, kinds: Sequence[str], who: Users) -> Iterator[Leftover]:
    """Entries of our cache: ``cache_dir``/kind/name. They are made again when they are needed."""
    for kind in kinds:
        folder = cache_dir / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() and CACHE_ENTRY.fullmatch(path.name):
                whole = path.name.removesuffix(PART)
                lock = functools.partial(_file_lock, folder / f"{whole}.lock")
                used_by = who.any_of_ours() or who.of(path) or locked_by(lock)
                sizes = (CACHE_ENTRY, size_bytes(path))
                yield Leftover(f"cache: {kind}", folder, path.name, *sizes, used_by, lock, f"{whole}{PART}", True)


@contextlib.contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """That of ``data.store.built_once``: nobody builds the entry while we hold it."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise InUse("it is being made") from None


def scratch(folder: Path, prefixes: Iterable[str], who: Users) -> Iterator[Leftover]:
    """Temporary folders of ours, of processes that were killed."""
    for prefix in prefixes:
        pattern = re.compile(re.escape(prefix) + TEMPORARY_NAME)
        for path in sorted(folder.glob(f"{prefix}*")):
            if pattern.fullmatch(path.name) and path.is_dir() and path.stat().st_uid == os.getuid():
                used_by = who.any_of_ours() or who.of(path)
                sizes = (pattern, size_bytes(path))
                yield Leftover("scratch folder", folder, path.name, *sizes, used_by, may_be_opened=True)


def build_locks(folders: Iterable[Path], who: Users) -> Iterator[Leftover]:
    """Files ``lock`` of torch's extension builds that were killed: the next build would wait for them forever."""
    for folder in folders:
        for path in sorted(folder.glob("**/lock")):
            if path.is_file():
                yield Leftover("build lock", path.parent, "lock", re.compile("lock"), size_bytes(path), who.of(path))


def offloaded(folders: Iterable[Path], pattern: re.Pattern, marker: str) -> Iterator[Leftover]:
    """Weights that killed runs had moved to the disk. A living run holds a lock on the file ``marker``."""
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if pattern.fullmatch(path.name) and (path / marker).is_file():
                lock = functools.partial(_flock, path / marker)
                used_by = locked_by(lock)
                yield Leftover("offloaded weights", folder, path.name, pattern, size_bytes(path), used_by, lock)


def locked_by(lock: Lock) -> Optional[str]:
    """Who keeps us from taking it; None for nobody."""
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
            raise InUse("in use by a run that is alive") from None
        yield


# -- removing ----------------------------------------------------------------------------------------------------------


def remove(item: Leftover, who: Callable[[], Users] = users) -> int:
    """Remove it and return how many bytes that freed. Raises InUse where somebody has taken it since, StorageError
    where it cannot be removed."""
    if item.used_by is not None:
        raise InUse(item.used_by)
    with item.lock():
        living = who()
        current = (living.any_of_ours() if item.may_be_opened else None) or living.of(item.path)
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
