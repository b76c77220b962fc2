"""A thread that samples memory for display.

It decides nothing: it misses peaks between its samples (the controllers read a gauge that keeps its own peak), and it
never resets a gauge, so it does not disturb them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

import psutil
import torch

from scu_trainer.train.step.recovery.memory import Gauge, gauge_for


class MemoryMonitor:
    """Puts a dictionary of metrics into ``metrics_queue`` every ``interval_s`` seconds, the first one immediately.

    Keys: ``time_s`` (of ``clock``), ``limit_bytes``, ``used_bytes``, ``peak_bytes`` (since the last reset by other
    code), ``free_bytes``, ``used_fraction``, ``process_rss_bytes``. When the queue holds ``queue_size`` samples the
    oldest is dropped and counted in ``dropped``. An error of the gauge ends the thread and is raised by ``stop``.

    Args:
        gauge: None measures the accelerator of this process, or main memory if there is none.
        clock: seconds since any fixed moment.
        wait: waits so many seconds and returns True once sampling should end; the default waits for ``stop``.
    """

    def __init__(
        self,
        gauge: Optional[Gauge] = None,
        interval_s: float = 0.05,
        queue_size: int = 1200,
        clock: Callable[[], float] = time.time,
        wait: Optional[Callable[[float], bool]] = None,
    ):
        if interval_s <= 0 or queue_size < 1:
            raise ValueError(f"interval_s {interval_s} must be above 0 and queue_size {queue_size} at least 1")
        # created here and not in the thread, which may have another current device
        self._gauge = gauge or gauge_for(
            torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        )
        self._interval_s = interval_s
        self._clock = clock
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._process = psutil.Process()
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[Exception] = None
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(queue_size)
        self.dropped = 0

    def start(self) -> None:
        """Start sampling. Raises RuntimeError if it is already running."""
        if self._thread is not None:
            raise RuntimeError("this memory monitor is already running; stop() it first")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="memory-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling and wait for the thread; raise the error that ended it early, if one did."""
        error = self._join()
        if error is not None:
            raise error

    def __enter__(self) -> MemoryMonitor:
        self.start()
        return self

    def __exit__(self, kind: Any, failure: Optional[BaseException], trace: Any) -> None:
        if failure is None:
            self.stop()
        elif (error := self._join()) is not None:
            failure.add_note(f"the memory monitor had failed as well: {error!r}")

    def _join(self) -> Optional[Exception]:
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self) -> None:
        try:
            self._put(self._sample())
            while not self._wait(self._interval_s):
                self._put(self._sample())
        except Exception as error:  # any error belongs to the thread that calls stop()
            self._error = error

    def _sample(self) -> dict[str, float]:
        reading = self._gauge.read()
        return {
            "time_s": self._clock(),
            "limit_bytes": reading.limit_bytes,
            "used_bytes": reading.used_bytes,
            "peak_bytes": reading.peak_bytes,
            "free_bytes": reading.free_bytes,
            "used_fraction": reading.used_fraction,
            "process_rss_bytes": self._process.memory_info().rss,
        }

    def _put(self, sample: dict[str, float]) -> None:
        while True:
            try:
                return self.metrics_queue.put_nowait(sample)
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # a reader may have emptied the queue meanwhile
                    self.metrics_queue.get_nowait()
                    self.dropped += 1
