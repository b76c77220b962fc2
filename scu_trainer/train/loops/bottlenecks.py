"""Measure the time of each part of a step: waiting for data, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer

from scu_trainer.train.loss.rows.model_loss import ReplacedFunction
from scu_trainer.train.step.costs import wait_for
from scu_trainer.train.step.recovery.snapshot import replaced

PARTS = ("data", "forward", "backward", "optimizer")


class PartTimes:
    """Wall times of the parts of a trainer's steps, from ``start`` to ``stop``. On a GPU each part waits for the
    device, but only in timed steps. ``other``, the remaining time, is the host: loops, callbacks, logs."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.is_running, self._timers = False, contextlib.ExitStack()

    def start(self) -> None:
        self.is_running, self._started_s = True, self._now()
        accelerator, compute_loss = self.trainer.accelerator, self.trainer.compute_loss
        timed = ReplacedFunction(compute_loss, self._timed("forward", compute_loss))
        self._timers.enter_context(replaced(self.trainer, "compute_loss", timed))
        self._timers.enter_context(replaced(accelerator, "backward", self._timed("backward", accelerator.backward)))

    def stop(self) -> None:
        if self.is_running:
            self.is_running, self.total_s = False, self._now() - self._started_s
            self._timers.close()

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.timing("data"):
                found = next(batches, self)
            if found is self:
                return
            yield found

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        if not self.is_running:
            yield
            return
        started_s = self._now()
        yield
        self.seconds[part] += self._now() - started_s

    def figures(self, steps: int) -> dict[str, Any]:
        """Return ``seconds_per_step`` and, for each part, ``seconds`` per step and ``share``; shares add up to 1."""
        seconds = {**self.seconds, "other": max(0.0, self.total_s - sum(self.seconds.values()))}
        total = sum(seconds.values())
        parts = {name: {"seconds": value / steps, "share": value / total} for name, value in seconds.items()}
        return {"steps": steps, "seconds_per_step": total / steps, "parts": parts}

    def _timed(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            with self.timing(part):
                return function(*given, **named)

        return timed

    def _now(self) -> float:
        wait_for(self.trainer.args.device)
        return time.perf_counter()
