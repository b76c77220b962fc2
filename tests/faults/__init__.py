"""Faults on demand: memory that a test scripts, and out-of-memory errors at a chosen place of a real step."""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Union

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 12.00 MiB is "
    "free. Of the allocated memory 6.90 GiB is allocated by PyTorch, and 321.96 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:True to avoid fragmentation."
)
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "20971520 bytes. Error code 12 (Cannot allocate memory)"
)

Script = Union[int, Sequence[int], Callable[[int], int]]
"""Bytes: always the same; one number per reset (the last one stays); or a function of the number of resets so far."""


def touch(mebibytes: int) -> torch.Tensor:
    """Pages of the kernel's: what malloc gives may be resident since an earlier test, and stay so when it is freed."""
    return torch.frombuffer(mmap.mmap(-1, mebibytes * 2**20), dtype=torch.uint8).fill_(1)


def oom(text: str = CUDA_TEXT) -> RuntimeError:
    """A new out-of-memory error of the type that torch raises with this text."""
    return torch.OutOfMemoryError(text) if text.startswith("CUDA out of memory") else RuntimeError(text)


class FakeGauge(Gauge):
    """Readings from a script. Sequences begin with the time after the first reset (and before it).

    ``peak_bytes`` None is ``used_bytes``. ``resets`` and ``exact_resets`` count.
    """

    def __init__(self, limit_bytes: Script, used_bytes: Script = 0, peak_bytes: Script | None = None):
        self.limit_bytes = limit_bytes
        self.used_bytes = used_bytes
        self.peak_bytes = peak_bytes
        self.resets = 0
        self.exact_resets = 0

    def reset(self, exact: bool = False) -> None:
        self.resets += 1
        self.exact_resets += exact

    def read(self) -> MemoryReading:
        used_bytes = self._now(self.used_bytes)
        return MemoryReading(
            limit_bytes=self._now(self.limit_bytes),
            used_bytes=used_bytes,
            peak_bytes=used_bytes if self.peak_bytes is None else self._now(self.peak_bytes),
            limit_name="fake",
        )

    def _now(self, script: Script) -> int:
        if callable(script):
            return script(self.resets)
        if isinstance(script, Sequence):
            return script[min(max(self.resets - 1, 0), len(script) - 1)]
        return script


class OutOfMemoryAt(TorchDispatchMode):
    """Raises instead of running operation number ``k`` (from 0), or each number in ``k``; nothing for an empty ``k``.

    Counted are operations of this thread that return a new tensor: forward, backward (the CPU's runs in the calling
    thread) and optimizer. Views and in-place operations allocate nothing. ``count`` goes on after a raise, so a place
    fails once. Nothing is counted inside ``paused()``. A dry run says how many places there are::

        with OutOfMemoryAt(()) as places:
            step()
        for k in range(places.count):
            with OutOfMemoryAt(k):
                step()
    """

    def __init__(self, k: int | Collection[int], error: Callable[[], BaseException] = oom):
        super().__init__()
        self.numbers = frozenset([k] if isinstance(k, int) else k)
        self.error = error
        self.count = 0
        self.raised: list[str] = []
        """Names of the operations that failed."""
        self._is_counting = True

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if self._is_counting and _returns_new_tensor(function):
            number, self.count = self.count, self.count + 1
            if number in self.numbers:
                self.raised.append(str(function))
                raise self.error()
        return function(*arguments, **(keywords or {}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before


@functools.cache  # this is asked at every operation
def _returns_new_tensor(function) -> bool:
    return any("Tensor" in str(item.type) and item.alias_info is None for item in function._schema.returns)


def is_training() -> bool:
    """Whether a micro-batch is being trained on, and no question asked about the loss."""
    return _is_inside("stock_training_step")


def is_no_question() -> bool:
    """Not while a loss and its gradient are asked for in order to choose a way to them."""
    return not _is_inside("agrees_padding_free")


def _is_inside(function: str) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def fail_in_forward(
    module: nn.Module,
    call: int = 0,
    error: Callable[[], BaseException] = oom,
    counts: Callable[[], bool] = lambda: True,
):
    """Raise at call number ``call`` (from 0) of the module's forward, before it runs. Yields ``.calls`` so far.

    ``counts``: which calls do; ``is_training``: none that ask about the loss.
    """
    counter, visit = _raising_at(call, error, counts)
    with _removing(module.register_forward_pre_hook(visit)):
        yield counter


@contextlib.contextmanager
def fail_in_backward(parameter: nn.Parameter, call: int = 0, error: Callable[[], BaseException] = oom):
    """Raise when the parameter's gradient is ready for the time number ``call`` (from 0), before it is added up.

    Parameters nearer to the loss have their gradients already: the middle of a backward. Yields ``.calls`` so far.
    """
    counter, visit = _raising_at(call, error, is_no_question)
    with _removing(parameter.register_hook(visit)):
        yield counter


@contextlib.contextmanager
def fail_above_tokens(model: nn.Module, tokens: int, error: Callable[[], BaseException] = oom):
    """A device of fixed size: raise whenever a batch has more than ``tokens`` padded tokens (images: rows).

    Yields the list of sizes that were tried, in order.
    """
    tried: list[int] = []

    def check(_, arguments, keywords) -> None:
        tried.append(padded_tokens({**dict(enumerate(arguments)), **keywords}))
        if tried[-1] > tokens:
            raise error()

    with _removing(model.register_forward_pre_hook(check, with_kwargs=True)):
        yield tried


def padded_tokens(batch: dict) -> int:
    """Rows x length of ``input_ids`` or ``inputs_embeds``; rows of the first tensor where there are neither."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), torch.Tensor):
            return batch[name].shape[0] * batch[name].shape[1]
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))


def _raising_at(
    call: int, error: Callable[[], BaseException], counts: Callable[[], bool] = lambda: True
) -> tuple[SimpleNamespace, Callable[..., None]]:
    counter = SimpleNamespace(calls=0)

    def visit(*_) -> None:
        if not counts():
            return
        number, counter.calls = counter.calls, counter.calls + 1
        if number == call:
            raise error()

    return counter, visit


@contextlib.contextmanager
def _removing(handle):
    try:
        yield
    finally:
        handle.remove()
