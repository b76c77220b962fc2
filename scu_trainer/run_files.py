"""The files of a run directory: written while the run goes, readable at any moment, by any program.

- ``write_json``, ``write_state``: a file that is there whole or not at all.
- ``History``: a JSON array that gains rows one by one and stays valid JSON after each of them.
- ``RunStatus``: run.json, the state of a run in one small object.
- ``require_room``, ``require_writable``: find out before the work starts, not after it.

NaN and infinity are written as ``null``: they are not JSON, and strict readers (browsers, jq) refuse the whole file.
``write_state`` keeps them, for a program that reads its own state.
Tokens and passwords are written as ``***``, see secrets.py.
Only the standard library is used, so that programs which only read a run start at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Optional, Union

from scu_trainer.errors import StorageError
from scu_trainer.secrets import redact

logger = logging.getLogger("scu_trainer")

AnyPath = Union[str, os.PathLike]
Row = dict[str, Any]

STATUSES = ("queued", "running", "stopping", "stopped", "finished", "failed")
STATUS_FIELDS = (
    "status",
    "pid",
    "step",
    "max_steps",
    "loss",
    "eta_s",
    "started",
    "updated",
    "error",
    "notices",
    "unit",
)

RESERVE_BYTES = 4096
"""Size of run.json, with spaces at its end: on a full disk the last words of a run take no new block."""

_CLOSING = b"\n]"
_BETWEEN_ROWS = re.compile(r"\s*,?\s*")
_DECODER = json.JSONDecoder()


def write_json(path: AnyPath, data: Any) -> None:
    """Replace ``path`` by ``data`` as JSON: after a crash it holds the old content or the new one, never a part.

    Raises StorageError if the directory cannot be written or is full, TypeError if ``data`` is not JSON.
    """
    _replace(Path(path), _as_json(data))


def write_state(path: AnyPath, state: Any) -> None:
    """As ``write_json``, for what its writer reads back: NaN and infinity stay, as in the trainer_state.json of
    transformers. Raises TypeError also for what would come back as another thing: no dict, a key that is no text.
    """
    _replace(Path(path), state_text(state).encode())


def state_text(state: Any) -> str:
    """What ``write_state`` writes, and the TypeError that it raises."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a {type(state).__name__} is not a dict")
    return json.dumps(_plain(state, exact=True), indent=2) + "\n"


def _as_json(data: Any) -> bytes:
    return json.dumps(_plain(data), indent=2, allow_nan=False).encode() + b"\n"


def write_text(path: AnyPath, text: str) -> None:
    """Replace ``path`` by ``text``, whole or not at all, as ``write_json`` does. Raises StorageError."""
    _replace(Path(path), redact(text).encode())


def read_json(path: AnyPath) -> Any:
    """Content of a JSON file. Raises StorageError if it is missing or is not JSON."""
    with _as_storage_error(Path(path), "read"):
        content = Path(path).read_bytes()
    try:
        return json.loads(content)
    except ValueError as error:
        raise StorageError(f"{path} is not valid JSON ({error}); delete it or restore it from a copy") from error


def read_status(path: AnyPath) -> dict[str, Any]:
    """Content of run.json, which other programs write, too, with other things in it. Raises StorageError for these."""
    found = read_json(path)
    if not isinstance(found, Mapping):
        raise StorageError(f"{path} does not hold an object; delete it or restore it from a copy")
    texts, numbers = ("status", "error", "unit"), ("pid", "step", "max_steps", "loss", "eta_s")
    kinds = {**dict.fromkeys(texts, str), **dict.fromkeys(numbers, (int, float)), "notices": list}
    for name, kind in kinds.items():
        if found.get(name) is not None and not isinstance(found[name], kind):
            raise StorageError(f"{path} holds {found[name]!r} as its {name}, which no run writes; move it away")
    return dict(found)


def read_regular(path: AnyPath, most_bytes: Optional[int] = None) -> bytes:
    """Content of a file. Raises OSError for a pipe or a device, which may have no end or never begin, and for a file of
    more than ``most_bytes``."""
    with open(path, "rb", opener=_without_waiting) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, no file", str(path))
        if most_bytes is not None and state.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {readable(state.st_size)}, too much for what it is", str(path))
        return file.read()


NOT_FETCHED = "holds only the address of its content, as git writes it without LFS: type git lfs pull in its folder"


def is_not_fetched(path: AnyPath) -> bool:
    """Whether a regular file stands for one that Git LFS has yet to fetch."""
    with open(path, "rb") as file:
        return file.read(64).startswith(b"version https://git-lfs.github.com/spec/")


def _without_waiting(path: AnyPath, flags: int) -> int:
    """A pipe that nobody writes to would keep ``open`` waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_rows(path: AnyPath) -> list[Row]:
    """All complete rows of a history file, also of one that is torn or being written. Never changes the file.

    Raises StorageError if the file is missing or does not hold an array of objects.
    """
    with _as_storage_error(Path(path), "read"):
        content = Path(path).read_bytes()
    return _parse_rows(content, Path(path))[0]


class History:
    """Rows of a run as a JSON array, one row per line. One writer; any number of readers at the same time.

    An append is one ``pwrite`` over the closing bracket, so a killed writer leaves a valid array. Only a machine that
    goes down can leave a torn last row. Opening the file again keeps every complete row and cuts the rest;
    ``torn_bytes`` says how much that was, for the caller to report.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        self._descriptor = -1
        content = self._open()
        rows, self.torn_bytes = _parse_rows(content, self.path)
        if content == _array(rows):
            self._row_count, self._closing_offset = len(rows), len(content) - len(_CLOSING)
        else:
            self._rewrite(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Raises StorageError if the disk is full; the file then still holds the rows before it."""
        self.append_many([row])

    def append_many(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows in one write: after a kill either all of them are there or none."""
        lines = [_line(row) for row in rows]
        if not lines:
            return
        added = (b",\n" if self._row_count else b"\n") + b",\n".join(lines)
        try:
            _pwrite_all(self._descriptor, added + _CLOSING, self._closing_offset)
        except OSError as error:
            self._close_array()
            raise storage_error(self.path, "write", error) from error
        self._row_count += len(lines)
        self._closing_offset += len(added)

    def truncate_after(self, step: int) -> int:
        """Drop the rows whose "step" is above ``step`` (a resumed run writes them again); rows without one stay.

        Returns the number of rows dropped, for the caller to report.
        """
        rows = read_rows(self.path)
        kept = [row for row in rows if row.get("step") is None or row["step"] <= step]
        if len(kept) < len(rows):
            self._rewrite(kept)
        return len(rows) - len(kept)

    def close(self) -> None:
        """Give the file back; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> bytes:
        if not self.path.exists():
            _replace(self.path, _array([]))  # nobody may see it empty, not even at birth
        with _as_storage_error(self.path, "open"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            return self.path.read_bytes()

    def _rewrite(self, rows: list[Row]) -> None:
        _replace(self.path, _array(rows))
        self.close()  # the descriptor still refers to the file that was just replaced
        self._row_count, self._closing_offset = len(rows), len(self._open()) - len(_CLOSING)

    def _close_array(self) -> None:
        """Undo a write that stopped half-way. Cutting it off makes the room that the bracket needs on a full disk."""
        os.ftruncate(self._descriptor, self._closing_offset)
        _pwrite_all(self._descriptor, _CLOSING, self._closing_offset)


class RunStatus:
    """run.json of one run. Other programs may set fields too: what they wrote is kept unless it is set here again.

    Progress is written at most once in ``min_interval_s`` seconds; a new status or error at once.
    """

    def __init__(self, path: AnyPath, clock: Callable[[], float] = time.time, min_interval_s: float = 1.0) -> None:
        """``clock`` returns seconds since 1970, as ``time.time`` does."""
        self.path = Path(path)
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._written_at_s = -math.inf
        self._written: Row = {}
        self._pending: Row = {}

    def update(self, **changes: Any) -> bool:
        """Set fields of run.json and say whether they were written now. Name ``status`` only to change it.

        Raises ValueError for an unknown status, TypeError for an unknown field.
        """
        unknown = sorted(set(changes) - set(STATUS_FIELDS))
        if unknown:
            raise TypeError(f"run.json has no field {', '.join(unknown)}; it has {', '.join(STATUS_FIELDS)}")
        if changes.get("status", STATUSES[0]) not in STATUSES:
            raise ValueError(f"status is {changes['status']!r}; allowed: {', '.join(STATUSES)}")
        self._pending.update(changes)
        is_due = not 0 <= self._clock() - self._written_at_s < self._min_interval_s  # also when the clock was set back
        news = [name for name in ("status", "error") if name in changes and changes[name] != self._written.get(name)]
        if is_due or news:
            self.flush()
            return True
        return False

    def flush(self) -> None:
        """Write what ``update`` held back."""
        now_s = self._clock()
        now = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        on_disk = read_json(self.path) if self.path.exists() else {}
        content = {**dict.fromkeys(STATUS_FIELDS), "status": "queued", **on_disk, **self._pending, "updated": now}
        content["started"] = content["started"] or now
        _replace_or_overwrite(self.path, content)
        self._written, self._written_at_s, self._pending = content, now_s, {}


def free_bytes(path: AnyPath) -> int:
    """Bytes that this user may still write at ``path``, or at its nearest parent that exists."""
    return shutil.disk_usage(nearest_existing(Path(path))).free


def make_room() -> str:
    """What to do where something could not be written. Libraries lose the number of the error, so a limit on the size
    of a file is named wherever there is one."""
    with contextlib.suppress(ImportError):  # of POSIX
        import resource

        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return "raise the limit on the size of a file (ulimit -f), free some space"
    return "free some space"


def require_room(path: AnyPath, needed_bytes: int, setting: str = "output_dir") -> None:
    """Raise StorageError if the disk at ``path``, which ``setting`` names, has less than ``needed_bytes`` free."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise StorageError(
            f"{path} has {readable(free)} free, {readable(needed_bytes)} are needed; "
            f"free {readable(needed_bytes - free)} there or set {setting} to a directory on a larger disk"
        )


def require_writable(path: AnyPath, setting: str = "output_dir") -> None:
    """Raise StorageError if the directory ``path`` cannot be written, or could not be made. Leaves nothing behind."""
    # A link that leads nowhere counts: no directory can be made in its place.
    existing = nearest_existing(Path(path), os.path.lexists)
    if not existing.is_dir():
        what = f"a link to {os.readlink(existing)}, which is not there" if existing.is_symlink() else "a file"
        what = "a file" if existing.is_file() else what
        raise StorageError(f"{existing} is {what} where a directory is needed; set {setting} to another path")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise StorageError(
            f"{existing} is not writable ({error.strerror}); change its permissions or set {setting} to another path"
        ) from error


def _array(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"[" + b",".join(b"\n" + _line(row) for row in rows) + _CLOSING


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(row), allow_nan=False).encode()


def _plain(value: Any, exact: bool = False) -> Any:
    """``value`` with every secret replaced by ``***`` and, unless ``exact``, every NaN and infinity by None, at any
    depth. ``exact``: raises TypeError for a key that JSON would make a text of."""
    if isinstance(value, float):
        return value if exact or math.isfinite(value) else None
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)] if exact else ()
        if odd:
            raise TypeError(f"the key {odd[0]!r} would come back as a text")
        return {key: _plain(item, exact) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, exact) for item in value]
    return redact(value) if isinstance(value, str) else value


def _parse_rows(content: bytes, path: Path) -> tuple[list[Row], int]:
    """The complete rows at the start of ``content``, and the number of bytes of a torn row after them."""
    text = content.decode(errors="replace")
    if text and not text.startswith("["):
        raise StorageError(f"{path} does not hold a JSON array, so it is not a history; move it away")
    rows: list[Row] = []
    position = _BETWEEN_ROWS.match(text, 1).end() if text else 0
    while text.startswith("{", position):
        try:
            row, end = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError:
            return rows, len(text[position:].encode())
        rows.append(row)
        position = _BETWEEN_ROWS.match(text, end).end()
    rest = text[position:].strip()
    if rest not in ("", "]"):
        raise StorageError(f"{path} holds {rest[:20]!r} after {len(rows)} rows, so it is not a history; move it away")
    return rows, 0


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with _as_storage_error(path, "write"):
        try:
            with open(beside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        sync(path.parent)


def _replace_or_overwrite(path: Path, content: Row) -> None:
    """As ``write_json``, with a reserve at the end. Where a full disk takes no new file, in the place of the old one:
    one write into the blocks that it has."""
    text = _as_json(content)
    try:
        _replace(path, text.ljust(RESERVE_BYTES))
    except StorageError as error:
        room_bytes = path.stat().st_size if path.is_file() and _is_full(error.__cause__) else 0
        shortened = (
            text if len(text) <= room_bytes else _as_json({**content, "error": "the disk is full", "notices": None})
        )
        if len(shortened) > room_bytes:
            raise
        with _as_storage_error(path, "write"), open(path, "r+b") as file:
            _pwrite_all(file.fileno(), shortened.ljust(room_bytes), 0)


def _is_full(error: Optional[BaseException]) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_usual_mode(files: Iterable[Path]) -> None:
    """Let those read the safetensors among ``files`` who may read what else lies beside them: their library makes them
    for their owner alone, whatever the umask says, and a server or a backup may belong to somebody else. A file of
    another mode, or behind a link, has it from somebody who meant it."""
    mask = os.umask(0o077)  # it can only be read by setting it; strictly, for what another thread makes meanwhile
    os.umask(mask)
    for path in files:
        with contextlib.suppress(OSError):  # a disk that has no modes, or a file of somebody else
            if path.suffix == ".safetensors" and path.lstat().st_mode == stat.S_IFREG | 0o600:
                path.chmod(0o666 & ~mask)


def _pwrite_all(descriptor: int, content: bytes, offset: int) -> None:
    """One ``pwrite``; more only if the system took less than all of it (a nearly full disk)."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


@contextlib.contextmanager
def _as_storage_error(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(path, action, error) from error


def storage_error(path: AnyPath, action: str, error: OSError) -> StorageError:
    """What a person is to read in the place of ``error``. ``action``: what was done to ``path``, as "read"."""
    if _is_full(error):
        return StorageError(
            f"the disk is full: {path} cannot be written, {readable(free_bytes(path))} are free; free some"
        )
    return StorageError(f"cannot {action} {path}: {error.strerror}; check the path and its permissions")


def nearest_existing(path: Path, exists: Callable[[Path], bool] = Path.exists) -> Path:
    """``path``, or the nearest of its parents that is there."""
    path = path.absolute()
    return next(filter(exists, (path, *path.parents)))


def found_above(name: str, folder: Path, is_wanted: Callable[[Path], bool] = Path.exists) -> str:
    """Where the relative path ``name`` leads that a file in ``folder`` holds: a run is most often started in a folder
    above its own, and used from anywhere. As it is where nothing wanted has that name, as with a Hub id."""
    if Path(name).expanduser().is_absolute():
        return name
    folder = folder.resolve()  # a run in runs/gpt2 is not its own base
    here, above = Path.cwd(), folder.parents
    places = (here, *above) if here in above else (*above, here)
    place = next((place for place in places if (place / name).resolve() != folder and is_wanted(place / name)), here)
    return name if place == here else _said_found(name, os.path.normpath(place / name))


@functools.cache
def _said_found(name: str, path: str) -> str:
    logger.warning("%s is taken from %s, above the folder whose files name it", name, path)
    return path


def readable(size_bytes: float) -> str:
    """Bytes in words: "1.5 GiB", "0.3 MiB"."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def gib(size_bytes: float) -> str:
    """As ``readable``, for figures below each other."""
    return f"{size_bytes / 2**30:.2f} GiB"
