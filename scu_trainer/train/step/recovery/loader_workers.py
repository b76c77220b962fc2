"""Data loaders: workers that live as long as the run needs them, and batches that survive short memory.

Ctrl-C, SIGHUP of a terminal and SIGTERM of a batch queue reach every process of the group. Workers that obeyed would be
missing in the step that the run still finishes. So they ignore these signals, and the run ends them as torch does; if
the run is killed, torch's workers notice within seconds.

A batch that a worker cannot send (shared memory is full, something in it cannot be pickled) would be dropped by the
queue with a traceback, and the run would wait for it forever. The worker sends the error instead.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, Optional

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from scu_trainer.data.numbered import Numbered
from scu_trainer.data.random_states import restore_rng_states, rng_states
from scu_trainer.hardware.heap import release_freed_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory


class IgnoreSignals:
    """A ``worker_init_fn`` that ignores signals and calls ``inner``. A second SIGTERM is obeyed: the run sends it to a
    worker that hangs."""

    def __init__(self, inner: Optional[Callable[[int], Any]]) -> None:
        self.inner = inner
        self._has_received_sigterm = False

    def __call__(self, worker_id: int) -> None:
        for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._receive)
        Queue._on_queue_feeder_error = functools.partialmethod(_send_error, worker_id, Queue._on_queue_feeder_error)
        if self.inner is not None:
            self.inner(worker_id)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        if self._has_received_sigterm:
            os._exit(128 + number)
        self._has_received_sigterm = True


def _send_error(queue: Queue, worker_id: int, print_error: Callable[..., None], error: Exception, item: Any) -> None:
    """Send ``error`` instead of ``item``, a batch's number and the batch or what making it raised. Runs in the sending
    thread of a worker. An error of a class that cannot be pickled is sent as a RuntimeError with its text."""
    number, content = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
    if isinstance(content, ExceptionWrapper) and content.exc_type is not RuntimeError:
        error = RuntimeError(content.exc_msg)
    elif number is None or isinstance(content, ExceptionWrapper):
        return print_error(error, item)
    where = f"in DataLoader worker process {worker_id}"
    queue.put((number, ExceptionWrapper((type(error), error, error.__traceback__), where)))


def protect_workers(loader: Any) -> Any:
    """Return ``loader`` with workers that ignore signals and report every batch that they cannot send."""
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders wrap the real one
    if isinstance(inner, DataLoader) and inner.num_workers > 0:
        inner.worker_init_fn = IgnoreSignals(inner.worker_init_fn)
        inner._get_iterator = functools.partial(_iterator_with_workers, inner)
    return loader


def _iterator_with_workers(loader: DataLoader) -> Any:
    iterator = type(loader)._get_iterator(loader)
    _iterators[iterator] = os.getpid(), iterator._index_queues
    return iterator


def collate_with_retry(collate: Callable[[Any], Any], rows: Any) -> Any:
    """Return ``collate(rows)``; if it runs out of memory, call it once more, so that no batch is lost. The second call
    gets copies of the original rows, because some collators write into them. Raises what that call raises."""
    return _with_one_retry(functools.partial(collate, rows), functools.partial(collate, _copied(rows)))


class RetryingRows:
    """The rows of a map-style dataset for a loader's fetcher; a read that runs out of memory is repeated once."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._draws = not isinstance(rows, Numbered)  # Numbered seeds generators for each batch and restores them

    def __getitem__(self, index: Any) -> Any:
        return _with_one_retry(functools.partial(self.rows.__getitem__, index), draws=self._draws)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return _with_one_retry(functools.partial(self._all, indices), draws=self._draws)

    def _all(self, indices: Sequence[Any]) -> list[Any]:
        get_items = getattr(self.rows, "__getitems__", None)  # as torch's fetcher does
        return get_items(indices) if get_items else [self.rows[index] for index in indices]


def _with_one_retry(first: Callable[[], Any], second: Optional[Callable[[], Any]] = None, draws: bool = True) -> Any:
    """Return ``first()``; if it runs out of memory, restore the random states and return ``second()`` (None: ``first``
    again). ``draws``: False if ``first`` never changes the random states."""
    before = rng_states() if draws else []
    with CatchOutOfMemory():
        return first()
    gc.collect()  # no cache of a device is freed, because this may be a worker process
    release_freed_memory()
    restore_rng_states(before)
    return (second or first)()


def _copied(rows: Any) -> Any:
    """Return copies of the containers of ``rows``; their contents are shared."""
    if type(rows) in (list, tuple):
        return type(rows)([_copied(row) for row in rows])
    return rows.copy() if isinstance(rows, (dict, UserDict)) else rows


def loader_with_retries(loader: Any) -> Any:
    """Return ``loader`` with a collator, and in this process reads of rows, that are repeated if memory runs out."""
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader):
        return loader
    if inner.collate_fn is not None:
        inner.collate_fn = functools.partial(collate_with_retry, inner.collate_fn)
    if inner.num_workers == 0 and not isinstance(inner.dataset, IterableDataset):
        inner._get_iterator = functools.partial(_iterator_that_reads_again, inner)
    return loader


def _iterator_that_reads_again(loader: DataLoader) -> Any:
    iterator = type(loader)._get_iterator(loader)
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None:
        fetcher.dataset = RetryingRows(fetcher.dataset)
    return iterator


_iterators: weakref.WeakKeyDictionary[Any, tuple[int, list[Queue]]] = weakref.WeakKeyDictionary()
"""Iterators with workers -> their process (a fork inherits the iterators, but must not end their workers), and the
queues through which workers learn that they end: held here, they are there until the garbage collector has ended the
iterator. It would close them first, wait ten seconds for each worker, and leave it running."""


@atexit.register
def _end_workers() -> None:
    """End workers before multiprocessing's exit handler, which sends a SIGTERM that they ignore, and waits: persistent
    ones, and those of an iterator that the traceback of an error holds."""
    for iterator, (process, _) in list(_iterators.items()):
        if process == os.getpid():
            iterator._shutdown_workers()
