"""Cached recordings: one flat file per array, memory-mapped, so that they take no memory, however many there are.

FOLDER/visible.bin ...   all frames of all recordings, one after the other
FOLDER/index.npz         for each recording its label, a digest of its content, and where each array begins and ends
FOLDER/shapes.json       for each array the shape after its time axis
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy
import torch

from scu_trainer.data.sensors.format import ARRAY_FORMATS
from scu_trainer.data.store import storage_errors
from scu_trainer.errors import StorageError

Sample = tuple[int, dict[str, numpy.ndarray]]
"""A label, and arrays by name as ``format.read_arrays`` returns them, without those of missing branches."""


def write_store(folder: Path, names: Sequence[str], samples: Iterable[Sample]) -> None:
    """Write ``samples`` one by one; only one is in memory at a time."""
    labels, digests = [], []
    lengths: dict[str, list[int]] = {name: [] for name in names}
    shapes: dict[str, list[int]] = {}
    with contextlib.ExitStack() as files:
        with storage_errors(folder, "recordings"):
            outputs = {name: files.enter_context(open(folder / f"{name}.bin", "wb")) for name in names}
        for label, arrays in samples:
            labels.append(label)
            digests.append(_digest(arrays))
            for name in names:
                array = arrays.get(name)
                lengths[name].append(0 if array is None else len(array))
                if array is not None:
                    shapes[name] = list(array.shape[1:])
                    with storage_errors(folder, "recordings"):
                        outputs[name].write(numpy.ascontiguousarray(array).data)
    ends = {name: numpy.cumsum([0, *counts]) for name, counts in lengths.items()}
    numpy.savez(folder / "index.npz", labels=numpy.array(labels), digests=numpy.array(digests, dtype="S40"), **ends)
    (folder / "shapes.json").write_text(json.dumps(shapes))


def _digest(arrays: dict[str, numpy.ndarray]) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for name, array in arrays.items():
        digest.update(f"{name} {array.shape}".encode())
        digest.update(numpy.ascontiguousarray(array).data)
    return digest.hexdigest()


class Store:
    """A folder written by ``write_store``. ``labels``: shape (recordings,). ``shapes``: for each array that a recording
    has, the shape after its time axis. Raises StorageError if its files are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with open(folder / "index.npz", "rb") as file, numpy.load(file, allow_pickle=False) as index:
                self._ends = {name: index[name] for name in index.files}
            shapes = json.loads((folder / "shapes.json").read_text())
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise _damaged(folder, str(error)) from error
        self.labels, self.digests = self._ends.pop("labels"), self._ends.pop("digests")
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._maps: dict[str, numpy.ndarray] = {}
        for name in self.shapes:
            self._require_whole(name)

    def _require_whole(self, name: str) -> None:
        path = self.folder / f"{name}.bin"
        items = int(self._ends[name][-1]) * math.prod(self.shapes[name])
        expected_bytes = items * numpy.dtype(ARRAY_FORMATS[name].kept_as).itemsize
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != expected_bytes:
            raise _damaged(self.folder, f"{path.name} has {found_bytes:,} of {expected_bytes:,} bytes")

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a worker maps the files itself: pickling would copy them

    def arrays(self, number: int) -> dict[str, numpy.ndarray]:
        """Return views of the arrays that a recording has."""
        bounds = {name: (int(ends[number]), int(ends[number + 1])) for name, ends in self._ends.items()}
        return {name: self._map(name)[start:end] for name, (start, end) in bounds.items() if end > start}

    def _map(self, name: str) -> numpy.ndarray:
        if name not in self._maps:
            shape = (int(self._ends[name][-1]), *self.shapes[name])
            self._maps[name] = numpy.memmap(self.folder / f"{name}.bin", ARRAY_FORMATS[name].kept_as, "r", shape=shape)
        return self._maps[name]


def _damaged(folder: Path, reason: str) -> StorageError:
    return StorageError(f"cached recordings in {folder} cannot be read ({reason}); delete that folder")


class Recordings(torch.utils.data.Dataset):
    """Some recordings of a store. A row has ``labels`` (a number) and the arrays of the recording, read on access.
    ``keys``: the name that each recording has everywhere. ``reports``: the report of each, "" for none. ``report_ids``:
    the word ids of the reports; once they are set, rows have them too."""

    def __init__(self, store: Store, numbers: numpy.ndarray, keys: Sequence[str], reports: Sequence[str]) -> None:
        self.store, self.numbers, self._keys, self.reports = store, numbers, keys, reports
        self.report_ids: Optional[Sequence[numpy.ndarray]] = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(self.numbers[index])
        row = {**self.store.arrays(number), "labels": int(self.store.labels[number])}
        return row if self.report_ids is None else {**row, "report_ids": self.report_ids[index]}

    def keys(self) -> list[str]:
        """One per row, in order. Keys do not depend on the branches that are read."""
        return list(self._keys)

    @property
    def labels(self) -> numpy.ndarray:
        return self.store.labels[self.numbers]

    @property
    def digests(self) -> numpy.ndarray:
        return self.store.digests[self.numbers]
