"""Loader workers live as long as their run wants them: no shorter, and no longer.

Ctrl-C and a batch queue's SIGTERM reach every process of the group. Workers that obeyed would be missing in the step
that the run still finishes. So they leave both to the run, which ends them by torch's own means; a run that was killed
leaves them alone, which torch's workers notice within seconds.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Optional

from torch.utils.data import DataLoader


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


_shielded: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
"""By process: a fork inherits the loaders, and their workers are not its own to end."""


@atexit.register
def _end_persistent() -> None:
    """Before the exit of multiprocessing, which sends one SIGTERM and then waits: persistent workers would leave it."""
    for loader, process in list(_shielded.items()):
        iterator = getattr(loader, "_iterator", None)  # what a loader keeps between epochs
        if iterator is not None and process == os.getpid():
            iterator._shutdown_workers()
