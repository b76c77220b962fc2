"""What the C library does with memory that a process has freed: keep it for the next step, or give it back."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Optional

M_TRIM_THRESHOLD = -1  # of malloc.h, as is the next one
M_MMAP_THRESHOLD = -3
LARGEST_BYTES = 2**31 - 1  # mallopt takes an int

TENSOR_ALIGNMENT_BYTES = 64  # of torch's CPU allocator


def give_back_freed() -> None:
    """Freed heap goes back to the system. Nothing happens where the C library has no such function (macOS, musl)."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def keep_freed() -> bool:
    """From now on this process keeps up to 2 GiB of freed memory for whoever asks next, large blocks too.

    glibc gives blocks of some MiB back as soon as they are freed, and a training step frees most that it takes: the
    system then zeroes the same pages again in every step. ``give_back_freed`` works as before. There is no way back
    to the usual behaviour, whose thresholds move by themselves. Returns False where the C library has no such
    switches (macOS, musl).
    """
    change = _function("mallopt")
    if change is None:
        return False
    return all([change(name, LARGEST_BYTES) == 1 for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)])


@functools.cache
def _function(name: str) -> Optional[Callable[..., int]]:
    return getattr(ctypes.CDLL(None), name, None)


LOOK_EVERY_BYTES = 2**19
"""Bytes taken between two looks at the heap, which cost more than the smallest blocks."""


class _HeapFigures(ctypes.Structure):
    """mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


class UntouchedHeap:
    """Takes and frees the blocks that tensors would take, without ever writing to them: so they need addresses and no
    memory, and show how far this very C library lets the heap grow. It is more than what is alive at one time: freed
    blocks lie between others that are in use, and some versions (glibc before 2.38) cannot use an aligned one again.

    ``peak_bytes``: the most that the heap had beyond what was in use when this began, up to ``LOOK_EVERY_BYTES``. At
    the end of the context what is left is freed.
    """

    def __init__(self) -> None:
        give_back_freed()
        self._library = ctypes.CDLL(None)
        self._library.free.argtypes = [ctypes.c_void_p]
        self._figures = self._library.mallinfo2
        self._figures.restype = _HeapFigures
        begun = self._figures()
        self._before_bytes = begun.uordblks + begun.hblkhd
        self._blocks: dict[Hashable, ctypes.c_void_p] = {}
        self.peak_bytes = self.failed_bytes = self._unseen_bytes = 0

    @classmethod
    def is_known(cls) -> bool:
        """Whether the C library can say how large its heap is (glibc from 2.33 on)."""
        return _function("mallinfo2") is not None

    def take(self, key: Hashable, size_bytes: int) -> None:
        """A block for ``key``. What even the address space has no room for is counted in ``failed_bytes``."""
        block = ctypes.c_void_p()
        alignment, size = ctypes.c_size_t(TENSOR_ALIGNMENT_BYTES), ctypes.c_size_t(size_bytes)
        if self._library.posix_memalign(ctypes.byref(block), alignment, size):
            self.failed_bytes += size_bytes
            return
        self._blocks[key] = block
        self._unseen_bytes += size_bytes
        if self._unseen_bytes >= LOOK_EVERY_BYTES:
            self._unseen_bytes = 0
            now = self._figures()
            self.peak_bytes = max(self.peak_bytes, now.arena + now.hblkhd - self._before_bytes)

    def give(self, key: Hashable) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._library.free(block)

    def __enter__(self) -> UntouchedHeap:
        return self

    def __exit__(self, *exception: object) -> None:
        for key in list(self._blocks):
            self.give(key)
        give_back_freed()
