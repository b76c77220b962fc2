"""Cache folders that are either complete or absent, and memory-mapped Arrow files.

If several processes need the same folder, one builds it while the others wait. A process that is killed leaves only a
``.part`` folder, which the next builder removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scu_trainer.errors import StorageError, UserError
from scu_trainer.json_types import misfit
from scu_trainer.run_files import free_space_hint, sync

if TYPE_CHECKING:
    import datasets
    import numpy
    import pyarrow

    from scu_trainer.data.statistics import DropCounts

Statistics = TypeVar("Statistics", bound="DropCounts")

STATISTICS_FILE = "books.json"


def default_cache_dir(cache_dir: str | None) -> Path:
    """Return the setting, else the environment variable SCU_TRAINER_CACHE, else ~/.cache/scu_trainer."""
    return Path(cache_dir or os.environ.get("SCU_TRAINER_CACHE") or "~/.cache/scu_trainer").expanduser().absolute()


def digest_of(*parts) -> str:
    """Return a short hash of JSON-like values, to name cache folders by their content."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``, made by ``build(new_folder)`` if missing. Raises StorageError if it cannot be written."""
    from filelock import FileLock

    if folder.exists():
        return folder
    with storage_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    try:
        if not folder.exists():
            _build(folder, build)
    finally:
        lock.release()
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    new = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(new, ignore_errors=True)  # left by a killed process: with the lock held, no other uses it
    with storage_errors(folder.parent):
        new.mkdir()
    try:
        build(new)
        with storage_errors(folder.parent):
            # Without this, a power failure after the rename could leave a folder that looks complete with empty files.
            for path in [*(path for path in new.rglob("*") if path.is_file()), new]:
                sync(path)
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_arrow(path: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> None:
    """Write batches one by one; only one is in memory. Raises StorageError if the disk is full."""
    import pyarrow

    batches = iter(batches)
    with storage_errors(path.parent):
        writer = pyarrow.ipc.new_stream(str(path), schema)
    try:
        for batch in batches:  # outside of storage_errors: an error in making a batch is not a storage error
            with storage_errors(path.parent):
                writer.write_batch(batch)
    finally:
        with storage_errors(path.parent):
            writer.close()


def open_arrow(path: Path) -> datasets.Dataset:
    """Return the memory-mapped rows of a file written by ``write_arrow``."""
    import datasets

    with reading_cache(path.parent):
        return datasets.Dataset.from_file(str(path))


@contextmanager
def reading_cache(folder: Path) -> Iterator[None]:
    """Inside, an error that a damaged file in ``folder`` raises becomes a StorageError that names the folder."""
    try:
        yield
    except (UserError, MemoryError, ImportError):  # not of the files
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise StorageError(f"cached data in {folder} cannot be read ({error}); delete that folder") from error


def write_statistics(folder: Path, statistics: DropCounts, name: str = STATISTICS_FILE) -> None:
    (folder / name).write_text(json.dumps(statistics.as_dict()))


def read_statistics(folder: Path, kind: type[Statistics], name: str = STATISTICS_FILE) -> Statistics:
    """Return what ``write_statistics`` wrote. Raises StorageError if it is damaged."""
    with reading_cache(folder):
        return restored(kind, json.loads((folder / name).read_text()), name)


def restored(kind: type[Statistics], content: Any, name: str) -> Statistics:
    """Return the ``kind`` that ``content``, from the JSON file ``name``, describes. Raises ValueError if it is none."""
    if reason := misfit(content, kind, name):
        raise ValueError(reason)
    return kind(**content)


class StoredArrays(Mapping[str, "numpy.ndarray"]):
    """The arrays of a safetensors file. Each is read when it is accessed."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(path, framework="numpy")
        self._names = list(self._file.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> numpy.ndarray:
        if name not in self._names:  # safetensors would not raise a KeyError
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def storage_errors(folder: Path, what: str = "cached data"):
    """Turn an OSError into a StorageError that says what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {what} to {folder}: {error}; {free_space_hint()} or set cache_dir to another folder"
        ) from error
