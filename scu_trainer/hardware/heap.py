"""What the C library does with memory that a process has freed: keep it for the next step, or give it back."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable, Hashable
from typing import Optional

M_TRIM_THRESHOLD = -1  # of malloc.h, as is the next one
M_MMAP_THRESHOLD = -3
LARGEST_BYTES = 2**31 - 1  # mallopt takes an int
LARGEST_FROM_HEAP_BYTES = 31 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB, with the head of the block

TENSOR_ALIGNMENT_BYTES = 64  # of torch's CPU allocator

GRAIN_BYTES = 16 * 2**10
"""How finely it is noted where in the heap blocks have been: a few pages, of which a large heap has many."""


def give_back_freed() -> None:
    """Freed heap goes back to the system. Nothing happens where the C library has no such function (macOS, musl)."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def settle() -> None:
    """Moves glibc's thresholds at once to where the first freed block of 32 MiB would move them: smaller blocks come
    from the heap, which gives back what is free at its end beyond 64 MiB.

    Before that, a training whose blocks are all smaller may give some MiB back in every step, and gets them zeroed
    again. Takes no memory, as nothing is written to the block. Nothing happens in other C libraries.
    """
    if _function("mallopt") is None:
        return
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.free(library.malloc(ctypes.c_size_t(LARGEST_FROM_HEAP_BYTES)))


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
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except TypeError:  # on Windows a library has to be named
        return None


def _in_pages(size_bytes: int) -> int:
    """What the library maps for a block of its own: its header, and room to align it, in whole pages."""
    return math.ceil((size_bytes + 2 * TENSOR_ALIGNMENT_BYTES) / mmap.PAGESIZE) * mmap.PAGESIZE


def _is_mapped(block: ctypes.c_void_p) -> bool:
    """By malloc's own mark: bit 1 of the size that stands before each block."""
    return bool(ctypes.c_size_t.from_address(block.value - ctypes.sizeof(ctypes.c_size_t)).value & 2)


class UntouchedHeap:
    """Takes and frees the blocks that tensors would take, without ever writing to them: so they need addresses and no
    memory, and show how far this very C library lets the heap grow. It is more than what is alive at one time: freed
    blocks lie between others that are in use, and some versions (glibc before 2.38) cannot use an aligned one again.

    ``peak_bytes``: the most that would have been in use if each block had been written to: every place of the heap
    where a block has been, unless the heap has shrunk below it since (sbrk), and the blocks that the library has mapped
    one by one beside it. How much the heap grew would not tell. A process keeps small things that lie above the blocks
    of an earlier estimate, so that its heap stays large: with nothing in it, and the next blocks go there.
    At the end of the context what is left is freed.
    """

    def __init__(self) -> None:
        settle()  # as trainings do
        give_back_freed()
        self._library = ctypes.CDLL(None)
        self._library.free.argtypes = [ctypes.c_void_p]
        self._end_of_heap = self._library.sbrk
        self._end_of_heap.restype, self._end_of_heap.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        self._end = self._end_of_heap(0)
        self._grains: set[int] = set()
        self._blocks: dict[Hashable, tuple[ctypes.c_void_p, int]] = {}
        self._log: list[tuple[Hashable, Optional[int]]] = []
        self.peak_bytes = self.failed_bytes = self._mapped_bytes = 0

    @classmethod
    def is_known(cls) -> bool:
        """Whether this is glibc, whose marks on blocks are read, and the main thread, whose heap ends at sbrk."""
        return _function("malloc_trim") is not None and threading.current_thread() is threading.main_thread()

    def take(self, key: Hashable, size_bytes: int) -> None:
        """A block for ``key``. What even the address space has no room for is counted in ``failed_bytes``."""
        self._log.append((key, size_bytes))
        block = ctypes.c_void_p()
        alignment, size = ctypes.c_size_t(TENSOR_ALIGNMENT_BYTES), ctypes.c_size_t(size_bytes)
        if self._library.posix_memalign(ctypes.byref(block), alignment, size):
            self.failed_bytes += size_bytes
            return
        before, self._end = self._end, self._end_of_heap(0)
        if self._end < before:
            self._grains = {grain for grain in self._grains if grain * GRAIN_BYTES < self._end}
        mapped_bytes = _in_pages(size_bytes) if _is_mapped(block) else 0
        if not mapped_bytes:
            behind = math.ceil((block.value + size_bytes) / GRAIN_BYTES)
            self._grains.update(range(block.value // GRAIN_BYTES, behind))
        self._blocks[key] = block, mapped_bytes
        self._mapped_bytes += mapped_bytes
        self.peak_bytes = max(self.peak_bytes, len(self._grains) * GRAIN_BYTES + self._mapped_bytes)

    def give(self, key: Hashable) -> None:
        self._log.append((key, None))
        block, mapped_bytes = self._blocks.pop(key, (None, 0))
        if block is not None:
            self._mapped_bytes -= mapped_bytes
            self._library.free(block)

    def repeat(self, times: int) -> None:
        """What was taken and given back so far, again in the same order; what has stayed is there already."""
        taken: dict[Hashable, int] = {}
        steps: list[tuple[int, Optional[int]]] = []
        for key, size_bytes in self._log:
            if size_bytes is not None:
                taken[key] = len(steps)
            steps.append((taken.pop(key, -1) if size_bytes is None else len(steps), size_bytes))
        given = {number for number, size_bytes in steps if size_bytes is None}
        for _ in range(times):
            for number, size_bytes in steps:
                if size_bytes is None:
                    self.give(("repeated", number))
                elif number in given:
                    self.take(("repeated", number), size_bytes)

    def __enter__(self) -> UntouchedHeap:
        return self

    def __exit__(self, *exception: object) -> None:
        for key in list(self._blocks):
            self.give(key)
        give_back_freed()
