"""Loader workers live as long as their run wants them: no shorter, and no longer.

Ctrl-C and a batch queue's SIGTERM reach every process of the group. Workers that obeyed would be missing in the step
that the run still finishes. So they leave both to the run, which ends them by torch's own means; a run that was killed
leaves them alone, which torch's workers notice within seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import weakref
from collections import UserDict
from collections.abc import Callable
from types import FrameType
from typing import Any, Optional

from torch.utils.data import DataLoader

from scu_trainer.hardware.heap import give_back_freed
from scu_trainer.train.marks import host_generators
from scu_trainer.train.out_of_memory import forget_traceback, is_out_of_memory


class LeaveSignals:
    """A ``worker_init_fn`` that runs ``inner`` too. A second SIGTERM is obeyed: it is the run's, to one that hangs."""

    def __init__(self, inner: Optional[Callable[[int], Any]]) -> None:
        self.inner = inner
        self._asked = False

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._receive)
        if self.inner is not None:
            self.inner(worker_id)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        if self._asked:
            os._exit(128 + number)
        self._asked = True


def shield(loader: Any) -> Any:
    """``loader``, whose workers leave signals to the run."""
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders are shells
    if isinstance(inner, DataLoader) and inner.num_workers > 0:
        inner.worker_init_fn = LeaveSignals(inner.worker_init_fn)
        _shielded[inner] = os.getpid()
    return loader


class CollatesAgain:
    """``collate``, once more where it runs out of memory: a batch is a function of its rows, and none of them is lost.

    The second time gets the rows as they were (some collators write into them) and random numbers as they were. Raises
    what ``collate`` raises.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        kept, generators = _copied(rows), host_generators()
        try:
            return self.collate(rows)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            forget_traceback(error)
        gc.collect()  # no cache of a device: this may be a worker
        give_back_freed()
        for put_back, state in generators:
            put_back(state)
        return self.collate(kept)


def _copied(rows: Any) -> Any:
    """Rows in containers of their own; what they hold is shared."""
    if isinstance(rows, (list, tuple)) and type(rows) in (list, tuple):
        return type(rows)([_copied(row) for row in rows])
    return rows.copy() if isinstance(rows, (dict, UserDict)) else rows


def collating_again(loader: Any) -> Any:
    """``loader``, whose collator survives running out of memory, in this process and in workers."""
    inner = getattr(loader, "base_dataloader", loader)
    if isinstance(inner, DataLoader) and inner.collate_fn is not None:
        inner.collate_fn = CollatesAgain(inner.collate_fn)
    return loader


_shielded: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
"""By process: a fork inherits the loaders, and their workers are not its own to end."""


@atexit.register
def _end_persistent() -> None:
    """Before the exit of multiprocessing, which sends one SIGTERM and then waits: persistent workers would leave it."""
    for loader, process in list(_shielded.items()):
        iterator = getattr(loader, "_iterator", None)  # what a loader keeps between epochs
        if iterator is not None and process == os.getpid():
            iterator._shutdown_workers()
