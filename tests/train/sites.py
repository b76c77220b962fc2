"""The places of a training at which memory can run out: counted, named, and made to fail one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps

import torch
from transformers import TrainerCallback

from scu_trainer.control.memory_values import State
from tests.faults import OutOfMemoryAt, oom


class Sites(OutOfMemoryAt):
    """Operations inside the calls in which a step does its work; nothing outside of them is counted or fails.

    ``failed_kinds``: beside ``raised``, where it was: forward, backward, marks (what a failed piece is taken back to),
    clip, optimizer, or what ``watch`` was told.
    """

    def __init__(self, k: int | Collection[int] = (), error: Callable[[], BaseException] = oom) -> None:
        super().__init__(k, self._failure)
        self.failed_kinds: list[str] = []
        self._make_error, self._call = error, ""

    def _failure(self) -> BaseException:
        in_backward = torch._C._current_graph_task_id() != -1
        self.failed_kinds.append("backward" if in_backward else self._call)
        return self._make_error()

    def watch(self, trainer, **more: str) -> None:
        """Count forward, backward, clipping and optimizer steps of the next training.

        ``more``: methods of ``trainer.chunked`` and what to call operations inside of them.
        """
        for name, call in {"_work_off": "forward", **more}.items():
            self._count_in(trainer.chunked, name, call)
        self._count_in(trainer, "_clip_grad_norm", "clip")
        sites = self

        class WatchOptimizer(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                sites._count_in(trainer.optimizer, "step", "optimizer")
                for name in ("mark", "keep_gradients", "restore"):
                    sites._count_in(trainer.chunked._place, name, "marks")

        trainer.add_callback(WatchOptimizer())

    def _count_in(self, owner, name: str, call: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def counted(*args, **kwargs):
            with self._inside(call):
                return function(*args, **kwargs)

        setattr(owner, name, counted)

    @contextlib.contextmanager
    def _inside(self, call: str) -> Iterator[None]:
        outer, self._call = self._call, call
        is_over = 0 <= max(self.numbers, default=-1) < self.count
        with contextlib.nullcontext() if outer or is_over else self:  # counting makes every operation slow
            yield
        self._call = outer


class OneFaultPerStep(TrainerCallback):
    """Step i fails at its operation number ``numbers[i - 1]``. Every step begins as if none had failed before."""

    def __init__(self, trainer, sites: Sites, numbers: Sequence[int]) -> None:
        self.trainer, self.sites, self.numbers = trainer, sites, numbers
        sites.watch(trainer)

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.chunked.loop.state = State()
        self.sites.count, self.sites.numbers = 0, frozenset([self.numbers[state.global_step]])
