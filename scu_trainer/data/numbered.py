"""Number the rows of a dataset: ``sample_index`` passes from the dataset through workers and collator to the batch."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import numpy
import torch

from scu_trainer.data.random_states import GENERATORS, generator_restorer, preserve_rng_states, seeded_generators
from scu_trainer.errors import DataError

SAMPLE_INDEX = "sample_index"
ROWS_PER_READ = 10_000
ROWS_TO_CHECK = 16


class Numbered(torch.utils.data.Dataset):
    """Wraps ``rows`` (any map-style dataset) to return pairs (number, row), which ``NumberedCollator`` splits again.

    Random numbers drawn while a batch is read depend only on ``seed``, ``epoch`` and the batch, not on what was read
    before: loaders read ahead and a resumed run has new workers, so the state of their generators means nothing. The
    generators of the process are restored. ``is_shared``: persistent workers see the epoch change. Raises DataError if
    there is no shared memory for it.
    """

    def __init__(self, rows: Any, seed: int = 0, is_shared: bool = True) -> None:
        self.rows, self._seed = rows, seed
        self._epoch = torch.zeros(1, dtype=torch.int64)
        if is_shared:
            _share(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the user's dataset, so that code that reads ``loader.dataset`` finds it."""
        if name.startswith("_") or name == "rows":  # these do not exist yet while the object is unpickled
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        many = getattr(self.rows, "__getitems__", None)
        with self.generators(indices):
            rows = many(indices) if callable(many) else [self.rows[index] for index in indices]
        return list(zip(indices, rows, strict=True))

    def generators(self, indices: Sequence[int], use: int = 0) -> AbstractContextManager[None]:
        """Seed the generators for the batch of ``indices``. ``use``: 0 to read its rows, 1 to collate them."""
        return seeded_generators((self._seed, int(self._epoch), int(indices[0])), use)


def _share(epoch: torch.Tensor) -> None:
    try:
        epoch.share_memory_()
    except RuntimeError as error:
        raise DataError(
            f"loader workers need shared memory (/dev/shm), which is missing or cannot be written: {error}; mount "
            "it, or set dataloader_num_workers: 0"
        ) from error


class NumberedCollator:
    """Wraps any collator and adds ``sample_index`` to its batch: int64, shape (rows,). Its random numbers depend on the
    same as those of the rows of ``numbered``. Raises DataError if the batch does not have one entry per row, because
    losses could not be attributed to rows."""

    def __init__(self, collator: Callable[[list[Any]], Any], numbered: Numbered) -> None:
        self.collator, self._numbered = collator, numbered

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> Any:
        indices, rows = zip(*numbered, strict=True)
        with self._numbered.generators(indices, 1):
            batch = self.collator(list(rows))
        inner = getattr(self.collator, "data_collator", self.collator)  # unwraps transformers' RemoveColumnsCollator
        name = getattr(inner, "__name__", type(inner).__name__)
        if not isinstance(batch, Mapping):
            raise DataError(f"{name} returns a {type(batch).__name__}; a curriculum needs a mapping of tensors")
        first = next((value for value in batch.values() if torch.is_tensor(value) and value.dim() > 0), None)
        if first is None or first.size(0) != len(rows):
            shape = "no tensor with rows" if first is None else f"{first.size(0)} rows"
            raise DataError(
                f"{name} makes {shape} of {len(rows)} samples, but a curriculum needs one row per sample: use a "
                "collator that pads (in TRL padding_free=False, and packing_strategy='wrapped' if it packs), or pack "
                "the data beforehand (packing: true). If samples are pairs of rows (DPO, reward models), they cannot "
                "be told apart: leave the curriculum out"
            )
        batch[SAMPLE_INDEX] = torch.tensor(indices, dtype=torch.int64)
        return batch


def lengths_of(rows: Any, length_column: str = "length") -> numpy.ndarray:
    """The tokens of every row, int32 of shape (rows,): the length column, else of ``input_ids``, else 1 (images)."""
    if len(rows) == 0:
        return numpy.zeros(0, dtype=numpy.int32)
    columns = getattr(rows, "column_names", None)
    if isinstance(columns, list) and (length_column in columns or "input_ids" in columns):
        return _arrow_lengths(rows, length_column)
    first = rows[0]
    if not (isinstance(first, Mapping) and "input_ids" in first):
        return numpy.ones(len(rows), dtype=numpy.int32)
    return numpy.fromiter((len(rows[i]["input_ids"]) for i in range(len(rows))), dtype=numpy.int32, count=len(rows))


def content_crc32(rows: Any) -> Optional[int]:
    """Return a checksum of a few rows, to detect other data of the same size; None if reading a row twice gives
    different values (random augmentation). RNG states are restored."""
    if not len(rows):
        return None
    with preserve_rng_states():
        numbers = numpy.linspace(0, len(rows) - 1, num=min(ROWS_TO_CHECK, len(rows)), dtype=int).tolist()
        first, again = (_crc32_of([rows[number] for number in part]) for part in (numbers[:2], numbers[:2]))
        return _crc32_of([rows[number] for number in numbers]) if first == again else None


def is_random_per_read(rows: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether rows give another batch when they are read again. RNG states and those of generators that are attributes
    of ``rows`` are restored, and ``collate`` is copied."""
    restorers = [generator_restorer(value) for value in vars(rows).values() if isinstance(value, GENERATORS)]
    with preserve_rng_states():
        batches = [copy.deepcopy(collate)([rows[i] for i in range(min(len(rows), ROWS_TO_CHECK))]) for _ in range(2)]
    for put_back in filter(None, restorers):
        put_back()
    return _crc32_of(batches[:1]) != _crc32_of(batches[1:])


def _crc32_of(rows: Sequence[Any]) -> int:
    checksum = 0
    for row in rows:
        for name in sorted(row) if isinstance(row, Mapping) else ():
            checksum = zlib.crc32(_bytes_of(row[name]), checksum)
    return checksum


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of a value, which are the same in every process; empty for objects that cannot be serialized."""
    if torch.is_tensor(value):
        return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if hasattr(value, "__array_interface__"):  # arrays and images
        array = numpy.asarray(value)
        return array.tobytes() if array.dtype != object else _bytes_of(array.tolist())
    try:
        return json.dumps(value, sort_keys=True).encode()
    except TypeError:
        return b""


def _arrow_lengths(rows: Any, length_column: str) -> numpy.ndarray:
    """Read the lengths block by block, without converting tokens or lengths to Python numbers."""
    import pyarrow.compute as compute

    has_lengths = length_column in rows.column_names
    column = length_column if has_lengths else "input_ids"
    lengths, start = numpy.empty(len(rows), dtype=numpy.int32), 0
    for table in rows.select_columns([column]).with_format("arrow").iter(batch_size=ROWS_PER_READ):
        block = table[column] if has_lengths else compute.list_value_length(table[column])
        lengths[start : start + len(block)] = block.to_numpy()
        start += len(block)
    return lengths
