"""The places of a training at which memory can run out: counted, named, and made to fail one by one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps

import torch
from transformers import TrainerCallback

from scu_trainer.control.memory_values import SizerState
from tests.faults import OutOfMemoryAt, oom


class Sites(OutOfMemoryAt):
    """Operations inside the calls in which a step does its work; nothing outside of them is counted or fails.

    ``failed_kinds``: beside ``raised``, where it was: forward, backward, snapshots (what a failed micro-batch is taken
    back to), kept and put back (gradients from before a window), clip, optimizer, or what ``watch`` was given.
    ``only``: the one kind that is counted and fails; None: all.
    ``kinds``: how many of each were counted.
    """

    def __init__(
        self, k: int | Collection[int] = (), error: Callable[[], BaseException] = oom, only: str | None = None
    ) -> None:
        super().__init__(k, self._failure)
        self.failed_kinds: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._make_error, self._call, self._only = error, "", only
        self._depth = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if self._only is not None and self._only != self._kind:
            return function(*arguments, **(keywords or {}))
        before = self.count
        try:
            return super().__torch_dispatch__(function, types, arguments, keywords)
        finally:
            self.kinds[self._kind] += self.count - before

    @property
    def _kind(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        return "backward" if in_backward and self._call == "forward" else self._call

    def _failure(self) -> BaseException:
        self.failed_kinds.append(self._kind)
        return self._make_error()

    def watch(self, trainer, **more: str) -> None:
        """Count forward, backward, clipping and optimizer steps of the next training.

        ``more``: methods of ``trainer.micro_batches`` and what to call operations inside of them.
        """
        for name, call in {"_run_micro_batches": "forward", **more}.items():
            self.count_in(trainer.micro_batches, name, call)
        self.count_in(trainer, "_clip_grad_norm", "clip")
        sites = self

        class WatchOptimizer(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                sites.count_in(trainer.optimizer, "step", "optimizer")
                places = {
                    "snapshot": "snapshots",
                    "keep_gradients": "kept",
                    "restore": "snapshots",
                    "_restore_gradients": "put back",
                }
                for name, call in places.items():
                    sites.count_in(trainer.micro_batches._place, name, call)

        trainer.add_callback(WatchOptimizer())

    def watch_all(self, trainer) -> None:
        """As ``watch``, and all that our code does beside: reading rows, collating, measuring S, averages, statistics.

        Outside stay what the stock loop does itself between our calls, and the sampler's own drawing.
        """
        self.watch(trainer, _window="reading the window", _begin="planning")
        self._watch_questions(trainer.micro_batches)
        self.count_in(trainer, "training_step", "training step")
        self.count_in(trainer, "_get_num_items_in_batch", "counting labels")
        self.count_in(trainer, "_get_grad_norm", "gradient norm")
        owners = {
            "losses of rows": (trainer.curriculum, "gather"),
            "bad numbers": (trainer.nonfinite_guard, "on_grad_norm"),
            "measuring S": (trainer.regularizer, "after_optimizer_step"),
            "penalty": (trainer.regularizer, "add_penalty"),
            "average": (trainer.loop("weight_average"), "on_optimizer_step"),
            "tokens": (trainer.loop("throughput"), "_count"),
        }
        for call, (owner, name) in owners.items():
            if owner is not None:
                self.count_in(owner, name, call)
        if trainer.nonfinite_guard is not None:
            self.count_in(trainer.nonfinite_guard, "on_step_begin", "bad numbers")

    def _watch_questions(self, micro_batches) -> None:
        """A training begins with an analysis of its own, which recovers by itself."""
        reset = micro_batches.reset

        def and_watch() -> None:
            reset()
            self.count_in(micro_batches.analysis, "_try_rows", "trials of the loss")
            self.count_in(micro_batches.analysis, "_audit", "auditing the loss")

        micro_batches.reset = and_watch

    def watch_evaluation(self, trainer) -> None:
        """Every operation of ``evaluate`` and ``predict`` between their first batch and their result."""
        self.count_in(trainer.engine, "run_evaluation", "between batches")
        self.count_in(trainer, "prediction_step", "forward")
        self.count_in(trainer.prediction, "_joined", "join")

    def inside(self, function, call: str):
        """``function`` with its operations counted: a collator, or what reads rows."""

        @wraps(function)
        def counted(*args, **kwargs):
            with self._inside(call):
                return function(*args, **kwargs)

        return counted

    def count_in(self, owner, name: str, call: str) -> None:
        setattr(owner, name, self.inside(getattr(owner, name), call))

    @contextlib.contextmanager
    def _inside(self, call: str) -> Iterator[None]:
        outer, self._call = self._call, call
        is_inner, self._depth = self._depth > 0, self._depth + 1
        is_over = 0 <= max(self.numbers, default=-1) < self.count
        try:
            with contextlib.nullcontext() if is_inner or is_over else self:  # counting makes every operation slow
                yield
        finally:
            self._call, self._depth = outer, self._depth - 1


class CountedRows(torch.utils.data.Dataset):
    """``rows`` whose reading is a place of ``sites``, called "rows"."""

    def __init__(self, rows, sites: Sites) -> None:
        self.rows, self._read = rows, sites.inside(lambda index: _cloned(rows[index]), "rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self._read(index)


def _cloned(item):
    if isinstance(item, dict):
        return {name: _cloned(value) for name, value in item.items()}
    if isinstance(item, tuple):
        return tuple(_cloned(value) for value in item)
    return item.clone() if torch.is_tensor(item) else item


class OneFaultPerStep(TrainerCallback):
    """Step i fails at its operation number ``numbers[i - 1]``. Every step begins as if none had failed before."""

    def __init__(self, trainer, sites: Sites, numbers: Sequence[int]) -> None:
        self.trainer, self.sites, self.numbers = trainer, sites, numbers
        sites.watch(trainer)

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.micro_batches.loop.state = SizerState()
        self.sites.count, self.sites.numbers = 0, frozenset([self.numbers[state.global_step]])
