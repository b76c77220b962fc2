"""The files of a run directory. They are written during training, and any program can read them at any moment.

- ``write_json``, ``write_state``: write a file atomically, so that it is never incomplete.
- ``History``: a JSON array to which rows are appended, and which is valid JSON after each of them.
- ``RunStatus``: run.json, the state of a run in one small object.
- ``require_room``, ``require_writable``: check the disk before the work starts.

NaN and infinity are written as ``null``, because JSON does not have them, and strict readers (browsers, jq) reject the
whole file. ``write_state`` keeps them, for programs that read their own state. Tokens and passwords are written as
``***``, see secrets.py. This module uses only the standard library, so that programs which only read a run start
quickly.
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
from typing import Any, BinaryIO, Optional, Union

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
"""Size to which run.json is padded with spaces, so that the final status of a run needs no new block on a full disk."""

_CLOSING = b"\n]"
_BETWEEN_ROWS = re.compile(r"\s*,?\s*")
MOST_DIGITS = 300
"""Most digits of a whole number in a JSON file: arithmetic with numbers that no float can hold (309 digits) fails."""


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds a whole number of {len(digits)} digits; {MOST_DIGITS} are allowed")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def write_json(path: AnyPath, data: Any) -> None:
    """Replace ``path`` by ``data`` as JSON. After a crash the file has the old or the new content, never a part.

    Raises StorageError if the directory is not writable or is full, and TypeError if ``data`` is not JSON-compatible.
    """
    _replace(Path(path), _as_json(data))


def write_state(path: AnyPath, state: Any) -> None:
    """Like ``write_json``, for a state that its writer reads back: NaN and infinity are kept, as transformers does in
    trainer_state.json. Raises TypeError if the state is not a dict or has keys that are not strings, because it would
    read back as something else."""
    _replace(Path(path), state_text(state).encode())


def state_text(state: Any) -> str:
    """Return the text that ``write_state`` writes. Raises the same TypeError."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a {type(state).__name__} is not a dict")
    return json.dumps(_plain(state, exact=True), indent=2) + "\n"


def _as_json(data: Any) -> bytes:
    return json.dumps(_plain(data), indent=2, allow_nan=False).encode() + b"\n"


def write_text(path: AnyPath, text: str) -> None:
    """Replace the content of ``path`` by ``text`` atomically, as ``write_json`` does. Raises StorageError."""
    _replace(Path(path), redact(text).encode())


def read_json(path: AnyPath) -> Any:
    """Return the content of a JSON file. Raises StorageError if the file is missing or is not valid JSON."""
    with _as_storage_error(Path(path), "read"):
        content = read_regular(path)
    try:
        return json.loads(content, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON ({error}); delete it or restore it from a copy") from error


def read_object(path: AnyPath) -> dict[str, Any]:
    """Return the content of a JSON file. Raises StorageError if it is missing or is not a JSON object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise StorageError(f"{path} does not hold an object; delete it or restore it from a copy")
    return found


def read_object_or_empty(path: AnyPath) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no file. Raises StorageError for other content."""
    return read_object(path) if Path(path).is_file() else {}


def read_object_or_none(path: Path) -> Optional[dict[str, Any]]:
    """Return the JSON object in a regular file; None for anything else, such as a pipe, on which reading would wait."""
    try:
        return read_object(path)
    except StorageError:
        return None


def read_status(path: AnyPath) -> dict[str, Any]:
    """Return the content of run.json. Other programs may write it too: raises StorageError if it is missing, is not a
    JSON object, or has a field of the wrong type."""
    found = read_object(path)
    texts, numbers = ("status", "error", "unit"), ("pid", "step", "max_steps", "loss", "eta_s")
    kinds = {**dict.fromkeys(texts, str), **dict.fromkeys(numbers, (int, float)), "notices": list}
    for name, kind in kinds.items():
        if found.get(name) is not None and not isinstance(found[name], kind):
            raise StorageError(f"{path} holds {found[name]!r} as its {name}, which no run writes; move it away")
    return found


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe or a device, which may have no end."""
    file = open(path, "rb", opener=_open_nonblocking)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return file


def read_regular(path: AnyPath, most_bytes: Optional[int] = None) -> bytes:
    """Return the content of a file. Raises OSError for a pipe or a device, which may have no end, and for a file larger
    than ``most_bytes``."""
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if most_bytes is not None and state.st_size > most_bytes:
            raise OSError(
                errno.EFBIG,
                f"it has {format_bytes(state.st_size)}, which is too much for a file of its kind",
                str(path),
            )
        return file.read()


NOT_FETCHED = "holds only the address of its content, as git writes it without LFS: type git lfs pull in its folder"


def is_not_fetched(path: AnyPath) -> bool:
    """Whether a regular file is a Git LFS pointer, so that its content has not been fetched yet."""
    with open(path, "rb") as file:
        return file.read(64).startswith(b"version https://git-lfs.github.com/spec/")


def _open_nonblocking(path: AnyPath, flags: int) -> int:
    """Open without blocking: opening a pipe that has no writer would block."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_rows(path: AnyPath) -> list[Row]:
    """Return all complete rows of a history file, even if it is torn or being written. Never changes the file.

    Warns about damaged rows. Raises StorageError if the file is missing or does not hold an array of objects.
    """
    with _as_storage_error(Path(path), "read"):
        content = read_regular(path)
    rows, torn_bytes = _parse_rows(content, Path(path))
    if torn_bytes and content.rstrip().endswith(_CLOSING.strip()):  # a row that is being written has none after it
        logger.warning("%s holds damaged rows (%d bytes), which are left out", path, torn_bytes)
    return rows


class History:
    """A file with rows of a run as a JSON array, one row per line, for one writer and any number of readers.

    An append is one ``pwrite`` over the closing bracket, so a killed writer leaves a valid array. Only a crash of the
    machine can leave a torn last row. Opening the file keeps all complete rows and takes out the rest, with a warning.
    ``torn_bytes`` is the number of bytes that were taken out.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        self._descriptor = -1
        content = self._open()
        rows, self.torn_bytes = _parse_rows(content, self.path)
        if self.torn_bytes:
            logger.warning("%s held torn or damaged rows (%d bytes), which are taken out", self.path, self.torn_bytes)
        if content == _array_json(rows):
            self._row_count, self._closing_offset = len(rows), len(content) - len(_CLOSING)
        else:
            self._rewrite(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Raises StorageError if the disk is full; the file then keeps its earlier rows."""
        self.append_many([row])

    def append_many(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows in one write. After a kill the file has either all of them or none."""
        lines = [_row_json(row) for row in rows]
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
        """Drop the rows with a "step" above ``step``, which a resumed run writes again. Rows without a step are kept.

        Returns the number of dropped rows, for the caller to report.
        """
        rows = read_rows(self.path)
        kept = [row for row in rows if row.get("step") is None or row["step"] <= step]
        if len(kept) < len(rows):
            self._rewrite(kept)
        return len(rows) - len(kept)

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> bytes:
        if not self.path.exists():
            _replace(self.path, _array_json([]))  # created atomically: an empty file would not be valid JSON
        with _as_storage_error(self.path, "open"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            return self.path.read_bytes()

    def _rewrite(self, rows: list[Row]) -> None:
        _replace(self.path, _array_json(rows))
        self.close()  # the descriptor still refers to the file that was just replaced
        self._row_count, self._closing_offset = len(rows), len(self._open()) - len(_CLOSING)

    def _close_array(self) -> None:
        """Undo an incomplete write. On a full disk, truncating it frees the space that the bracket needs."""
        os.ftruncate(self._descriptor, self._closing_offset)
        _pwrite_all(self._descriptor, _CLOSING, self._closing_offset)


class RunStatus:
    """The file run.json of one run. Other programs may set fields too; these are kept, unless they are set here again.

    Progress is written at most once in ``min_interval_s`` seconds; a new status or error is written immediately.
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
        """Set fields of run.json, and return whether they were written now. Pass ``status`` only to change it.

        Raises ValueError for an unknown status, and TypeError for an unknown field.
        """
        unknown = sorted(set(changes) - set(STATUS_FIELDS))
        if unknown:
            raise TypeError(f"run.json has no field {', '.join(unknown)}; it has {', '.join(STATUS_FIELDS)}")
        if changes.get("status", STATUSES[0]) not in STATUSES:
            raise ValueError(f"status is {changes['status']!r}; allowed: {', '.join(STATUSES)}")
        self._pending.update(changes)
        # A negative difference means that the clock was set back.
        is_due = not 0 <= self._clock() - self._written_at_s < self._min_interval_s
        news = [name for name in ("status", "error") if name in changes and changes[name] != self._written.get(name)]
        if is_due or news:
            self.flush()
            return True
        return False

    def flush(self) -> None:
        """Write the changes that ``update`` has not written yet."""
        now_s = self._clock()
        now = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        on_disk = read_object(self.path) if self.path.exists() else {}
        content = {**dict.fromkeys(STATUS_FIELDS), "status": "queued", **on_disk, **self._pending, "updated": now}
        content["started"] = content["started"] or now
        _replace_or_overwrite(self.path, content)
        self._written, self._written_at_s, self._pending = content, now_s, {}


def free_bytes(path: AnyPath) -> int:
    """Return how many bytes this user can still write at ``path``, or at its nearest existing parent."""
    return shutil.disk_usage(nearest_existing(Path(path))).free


def free_space_hint() -> str:
    """Return what to do when a file could not be written. A limit on the file size is mentioned whenever there is one,
    because libraries lose the error number that would tell whether it was exceeded."""
    with contextlib.suppress(ImportError):  # only POSIX systems have it
        import resource

        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return "raise the limit on the size of a file (ulimit -f), free some space"
    return "free some space"


def require_room(path: AnyPath, needed_bytes: int, setting: str = "output_dir") -> None:
    """Raise StorageError if the disk at ``path``, the value of ``setting``, has less than ``needed_bytes`` free."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise StorageError(
            f"{path} has {format_bytes(free)} free, {format_bytes(needed_bytes)} are needed; "
            f"free {format_bytes(needed_bytes - free)} there or set {setting} to a directory on a larger disk"
        )


def require_writable(path: AnyPath, setting: str = "output_dir") -> None:
    """Raise StorageError if the directory ``path`` is not writable, or could not be created. Leaves no files behind."""
    # A broken link counts as existing, because no directory can be created at its path.
    existing = nearest_existing(Path(path), os.path.lexists)
    if not existing.is_dir():
        what = f"a link to {os.readlink(existing)}, which does not exist" if existing.is_symlink() else "a file"
        what = "a file" if existing.is_file() else what
        raise StorageError(f"{existing} is {what} where a directory is needed; set {setting} to another path")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise StorageError(
            f"{existing} is not writable ({error.strerror}); change its permissions or set {setting} to another path"
        ) from error


def _array_json(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"[" + b",".join(b"\n" + _row_json(row) for row in rows) + _CLOSING


def _row_json(row: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(row), allow_nan=False).encode()


def _plain(value: Any, exact: bool = False) -> Any:
    """Return a copy of ``value`` in which all secrets are ``***`` and, unless ``exact``, all NaN and infinities are
    None. ``exact``: raise TypeError for a key that is not a string, which JSON would convert."""
    if isinstance(value, float):
        return value if exact or math.isfinite(value) else None
    if isinstance(value, Mapping):
        converted = [key for key in value if not isinstance(key, str)] if exact else ()
        if converted:
            raise TypeError(f"the key {converted[0]!r} is not a string, and would be read back as one")
        return {key: _plain(item, exact) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, exact) for item in value]
    return redact(value) if isinstance(value, str) else value


def _parse_rows(content: bytes, path: Path) -> tuple[list[Row], int]:
    """Return the complete rows in ``content``, and the number of bytes of torn or damaged ones."""
    text = content.decode(errors="replace")
    if text and not text.startswith("["):
        raise StorageError(f"{path} does not hold a JSON array, so it is not a history; move it away")
    rows: list[Row] = []
    torn_bytes = 0
    position = _BETWEEN_ROWS.match(text, 1).end() if text else 0
    while text.startswith("{", position):
        try:
            row, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):  # also of a number with too many digits, which is no JSONDecodeError
            next_row = text.find("\n{", position) + 1 or len(text)
            torn_bytes += len(text[position:next_row].encode())
            position = next_row
            continue
        rows.append(row)
        position = _BETWEEN_ROWS.match(text, end).end()
    rest = text[position:].strip()
    if rest not in ("", "]"):
        raise StorageError(f"{path} holds {rest[:20]!r} after {len(rows)} rows, so it is not a history; move it away")
    return rows, torn_bytes


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
    """Replace run.json atomically, padded with spaces. On a full disk, overwrite the old file with one write into the
    blocks that it already has; if the content does not fit there, the notices are dropped and the error says only that
    the disk is full. Raises StorageError if even that does not fit, and for any other error."""
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
    """Flush a file, or the renames in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(files: Iterable[Path]) -> None:
    """Give the safetensors among ``files`` the usual mode, which follows from the umask. Their library makes them
    readable by their owner only, but a server or a backup may run as another user. Links and files with another mode
    are left alone, because somebody chose that mode."""
    mask = os.umask(0o077)  # it can only be read by setting it; a strict one, in case another thread creates a file now
    os.umask(mask)
    for path in files:
        with contextlib.suppress(OSError):  # a disk without modes, or a file of another user
            if path.suffix == ".safetensors" and path.lstat().st_mode == stat.S_IFREG | 0o600:
                path.chmod(0o666 & ~mask)


def _pwrite_all(descriptor: int, content: bytes, offset: int) -> None:
    """Write with one ``pwrite``, or with more if the system wrote only a part, as on a nearly full disk."""
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
    """Return a StorageError with a message for the user. ``action``: what failed at ``path``, such as "read"."""
    if _is_full(error):
        return StorageError(
            f"the disk is full: {path} cannot be written, {format_bytes(free_bytes(path))} are free; free some space"
        )
    return StorageError(f"cannot {action} {path}: {error.strerror}; check the path and its permissions")


def nearest_existing(path: Path, exists: Callable[[Path], bool] = Path.exists) -> Path:
    """Return ``path``, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(filter(exists, (path, *path.parents)))


def resolve_from_run(name: str, folder: Path, is_wanted: Callable[[Path], bool] = Path.exists) -> str:
    """Resolve the relative path ``name``, which a file in ``folder`` holds.

    A run is usually started in a folder above its own, and later used from anywhere, so the folders above are searched
    too. Returns ``name`` unchanged if it is absolute, lies in the current directory, or is found nowhere, as a Hub id.
    """
    if Path(name).expanduser().is_absolute():
        return name
    folder = folder.resolve()  # compared below: a run in runs/gpt2 must not be taken for its own base model gpt2
    here, above = Path.cwd(), folder.parents
    places = (here, *above) if here in above else (*above, here)
    place = next((place for place in places if (place / name).resolve() != folder and is_wanted(place / name)), here)
    return name if place == here else _warn_found_above(name, os.path.normpath(place / name))


@functools.cache
def _warn_found_above(name: str, path: str) -> str:
    logger.warning("%s is read from %s, which is above the folder of the run that names it", name, path)
    return path


def format_bytes(size_bytes: float) -> str:
    """Format a number of bytes: "1.5 GiB", "0.3 MiB"."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def format_gib(size_bytes: float) -> str:
    """Format a number of bytes in GiB, for figures in a column."""
    return f"{size_bytes / 2**30:.2f} GiB"
