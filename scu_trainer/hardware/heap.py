"""Control what the C library does with freed memory: keep it for the next step, or return it to the system."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable, Hashable
from typing import Optional

M_TRIM_THRESHOLD = -1  # from malloc.h, like the next one
M_MMAP_THRESHOLD = -3
LARGEST_BYTES = 2**31 - 1  # mallopt takes an int
LARGEST_FROM_HEAP_BYTES = 31 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB, including the block's header

TENSOR_ALIGNMENT_BYTES = 64  # alignment of torch's CPU allocator

GRAIN_BYTES = 16 * 2**10
"""Granularity at which used places of the heap are recorded: a few pages, so that a large heap needs few records."""


def release_freed_memory() -> None:
    """Return freed heap memory to the system; does nothing if the C library cannot do that (macOS, musl)."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def settle_malloc_thresholds() -> None:
    """Set glibc's thresholds now to the values that the first freed block of 32 MiB would give them.

    Smaller blocks then come from the heap, which returns free memory at its end only beyond 64 MiB. With the initial
    thresholds, a training with only smaller blocks may return some MiB in every step, and the system zeroes them
    again. The block here takes no memory, because nothing is written to it. Does nothing in other C libraries.
    """
    if _c_function("mallopt") is None:
        return
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.free(library.malloc(ctypes.c_size_t(LARGEST_FROM_HEAP_BYTES)))


def keep_freed() -> bool:
    """Make this process keep up to 2 GiB of freed memory for later allocations, including large blocks.

    By default glibc returns blocks of some MiB to the system as soon as they are freed. A training step frees most of
    its memory, so the system would zero the same pages again in every step. ``release_freed_memory`` still works. The
    default behavior, with thresholds that adapt, cannot be restored. Returns False if the C library has no such
    settings (macOS, musl).
    """
    change = _c_function("mallopt")
    if change is None:
        return False
    return all([change(name, LARGEST_BYTES) == 1 for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)])


@functools.cache
def _c_function(name: str) -> Optional[Callable[..., int]]:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except TypeError:  # Windows needs the name of a library
        return None


def _mapped_size(size_bytes: int) -> int:
    """Return the bytes that the library maps for a separate block: with header and alignment, in whole pages."""
    return math.ceil((size_bytes + 2 * TENSOR_ALIGNMENT_BYTES) / mmap.PAGESIZE) * mmap.PAGESIZE


def _is_mapped(block: ctypes.c_void_p) -> bool:
    """Return whether malloc mapped this block separately, by its flag: bit 1 of the size stored before the block."""
    return bool(ctypes.c_size_t.from_address(block.value - ctypes.sizeof(ctypes.c_size_t)).value & 2)


class UntouchedHeap:
    """Measures how far this C library lets the heap grow for the blocks that tensors would take.

    It allocates and frees these blocks without writing to them, so they need addresses but no memory. The heap grows
    beyond what is alive at one time: freed blocks are between others that are in use, and some versions (glibc before
    2.38) cannot reuse an aligned block.

    ``peak_bytes`` is the most memory that would have been in use if each block had been written to: all places in the
    heap where a block has been, unless the heap has shrunk below them since (sbrk), plus the blocks that the library
    mapped separately. The growth of the heap would be a wrong measure: small objects above the blocks of an earlier
    estimate keep the heap of a process large but empty, and the next blocks go there. Remaining blocks are freed at the
    end of the context.
    """

    def __init__(self) -> None:
        settle_malloc_thresholds()  # a training does the same
        release_freed_memory()
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
        """Return whether this works here: only in glibc, whose flags are read, and in the main thread (sbrk)."""
        return _c_function("malloc_trim") is not None and threading.current_thread() is threading.main_thread()

    def take(self, key: Hashable, size_bytes: int) -> None:
        """Allocate a block for ``key``; if even the address space has no room, add its size to ``failed_bytes``."""
        self._log.append((key, size_bytes))
        block = ctypes.c_void_p()
        alignment, size = ctypes.c_size_t(TENSOR_ALIGNMENT_BYTES), ctypes.c_size_t(size_bytes)
        if self._library.posix_memalign(ctypes.byref(block), alignment, size):
            self.failed_bytes += size_bytes
            return
        before, self._end = self._end, self._end_of_heap(0)
        if self._end < before:
            self._grains = {grain for grain in self._grains if grain * GRAIN_BYTES < self._end}
        mapped_bytes = _mapped_size(size_bytes) if _is_mapped(block) else 0
        if not mapped_bytes:
            end_grain = math.ceil((block.value + size_bytes) / GRAIN_BYTES)
            self._grains.update(range(block.value // GRAIN_BYTES, end_grain))
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
        """Repeat all past allocations that were freed again, in the same order; other blocks are still allocated."""
        taken: dict[Hashable, int] = {}
        steps: list[tuple[int, Optional[int]]] = []
        for key, size_bytes in self._log:
            if size_bytes is not None:
                taken[key] = len(steps)
            steps.append((taken.pop(key, -1) if size_bytes is None else len(steps), size_bytes))
        freed = {number for number, size_bytes in steps if size_bytes is None}
        for _ in range(times):
            for number, size_bytes in steps:
                if size_bytes is None:
                    self.give(("repeated", number))
                elif number in freed:
                    self.take(("repeated", number), size_bytes)

    def __enter__(self) -> UntouchedHeap:
        return self

    def __exit__(self, *exception: object) -> None:
        for key in list(self._blocks):
            self.give(key)
        release_freed_memory()
