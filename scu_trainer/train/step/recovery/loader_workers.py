"""Loaders: workers that live as long as their run wants them, and batches that are not lost where memory is short.

Ctrl-C, a terminal's SIGHUP and a batch queue's SIGTERM reach every process of the group. Workers that obeyed would be
missing in the step that the run still finishes. So they leave them to the run, which ends them by torch's own means; a
run that was killed leaves them alone, which torch's workers notice within seconds.

A batch that a worker cannot send (shared memory is full, something in it cannot be pickled) would be dropped by its
queue with a traceback, and the run would wait for it forever. The error is sent in its place.
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
from scu_trainer.data.random_states import put_back, states
from scu_trainer.hardware.heap import give_back_freed
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory


class LeaveSignals:
    """A ``worker_init_fn`` that runs ``inner`` too. A second SIGTERM is obeyed: it is the run's, to one that hangs."""

    def __init__(self, inner: Optional[Callable[[int], Any]]) -> None:
        self.inner = inner
        self._asked = False

    def __call__(self, worker_id: int) -> None:
        for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._receive)
        Queue._on_queue_feeder_error = functools.partialmethod(_send_error, worker_id, Queue._on_queue_feeder_error)
        if self.inner is not None:
            self.inner(worker_id)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        if self._asked:
            os._exit(128 + number)
        self._asked = True


def _send_error(queue: Queue, worker_id: int, print_error: Callable[..., None], error: Exception, item: Any) -> None:
    """In a worker, in the thread that sends ``item``, the number of a batch and the batch, or what making it raised: an
    error of a class that cannot be pickled goes as a RuntimeError with its text."""
    number, content = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
    if isinstance(content, ExceptionWrapper) and content.exc_type is not RuntimeError:
        error = RuntimeError(content.exc_msg)
    elif number is None or isinstance(content, ExceptionWrapper):
        return print_error(error, item)
    where = f"in DataLoader worker process {worker_id}"
    queue.put((number, ExceptionWrapper((type(error), error, error.__traceback__), where)))


def shield(loader: Any) -> Any:
    """``loader``, whose workers leave signals to the run and lose no batch without a word."""
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders are shells
    if isinstance(inner, DataLoader) and inner.num_workers > 0:
        inner.worker_init_fn = LeaveSignals(inner.worker_init_fn)
        inner._get_iterator = functools.partial(_watched, inner)
    return loader


def _watched(loader: DataLoader) -> Any:
    iterator = type(loader)._get_iterator(loader)
    _with_workers[iterator] = os.getpid()
    return iterator


def collated_again(collate: Callable[[Any], Any], rows: Any) -> Any:
    """``collate(rows)``, once more where it runs out of memory: a batch is a function of its rows, and none is lost.

    The second time gets the rows as they were: some collators write into them. Raises what ``collate`` raises then.
    """
    return _again(functools.partial(collate, rows), functools.partial(collate, _copied(rows)))


class ReadsAgain:
    """Rows of a map-style dataset for a loader's fetcher, read once more where that runs out of memory."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._draws = not isinstance(rows, Numbered)  # which seeds generators for each batch and puts them back

    def __getitem__(self, index: Any) -> Any:
        return _again(functools.partial(self.rows.__getitem__, index), draws=self._draws)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return _again(functools.partial(self._all, indices), draws=self._draws)

    def _all(self, indices: Sequence[Any]) -> list[Any]:
        many = getattr(self.rows, "__getitems__", None)  # as torch's fetcher asks
        return many(indices) if many else [self.rows[index] for index in indices]


def _again(first: Callable[[], Any], second: Optional[Callable[[], Any]] = None, draws: bool = True) -> Any:
    """``first()``; where it runs out of memory ``second()`` (None: the same), with random numbers as they were.
    ``draws``: False where ``first`` leaves the generators as they are, whatever happens in it."""
    before = states() if draws else []
    with CatchOutOfMemory():
        return first()
    gc.collect()  # no cache of a device: this may be a worker
    give_back_freed()
    put_back(before)
    return (second or first)()


def _copied(rows: Any) -> Any:
    """Rows in containers of their own; what they hold is shared."""
    if type(rows) in (list, tuple):
        return type(rows)([_copied(row) for row in rows])
    return rows.copy() if isinstance(rows, (dict, UserDict)) else rows


def loading_again(loader: Any) -> Any:
    """``loader``, whose collator survives running out of memory, and in this process the reading of its rows too."""
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader):
        return loader
    if inner.collate_fn is not None:
        inner.collate_fn = functools.partial(collated_again, inner.collate_fn)
    if inner.num_workers == 0 and not isinstance(inner.dataset, IterableDataset):
        inner._get_iterator = functools.partial(_reading_again, inner)
    return loader


def _reading_again(loader: DataLoader) -> Any:
    iterator = type(loader)._get_iterator(loader)
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None:
        fetcher.dataset = ReadsAgain(fetcher.dataset)
    return iterator


_with_workers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By process: a fork inherits the iterators, and their workers are not its own to end."""


@atexit.register
def _end_workers() -> None:
    """Before the exit of multiprocessing, which sends one SIGTERM and then waits: workers would leave it, persistent
    ones, and those of an iterator that the traceback of an error holds."""
    for iterator, process in list(_with_workers.items()):
        if process == os.getpid():
            iterator._shutdown_workers()
