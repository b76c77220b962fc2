"""A heap of blocks that nobody writes to: it grows as the real one would, takes no memory, and is gone afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from scu_trainer.hardware.heap import (
    GRAIN_BYTES,
    LARGEST_FROM_HEAP_BYTES,
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    UntouchedHeap,
    keep_freed,
)
from scu_trainer.hardware.probe import resident_bytes


def bytes_of_addresses():
    return psutil.Process().memory_info().vms


pytestmark = pytest.mark.skipif(not UntouchedHeap.is_known(), reason="this C library does not tell its heap's size")

MEBIBYTE = 2**20


@pytest.fixture(autouse=True)
def _gives_back():
    """A recipe for images may have told the library to keep what is freed, in the process of these tests."""
    with UntouchedHeap() as heap:
        heap.take("large", 40 * MEBIBYTE)
        is_kept = heap._mapped_bytes == 0
    change = ctypes.CDLL(None).mallopt
    if is_kept:
        change(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP_BYTES), change(M_TRIM_THRESHOLD, 2 * LARGEST_FROM_HEAP_BYTES)
    yield
    if is_kept:
        keep_freed()


def test_it_grows_by_what_lives_at_one_time():
    with UntouchedHeap() as heap:
        heap.take("first", MEBIBYTE)
        kept_before = heap.peak_bytes - MEBIBYTE  # by this process, of what it freed earlier
        for number in range(8):
            heap.take(number, 64 * MEBIBYTE)
        for number in range(8):
            heap.give(number)
        heap.take("after", 64 * MEBIBYTE)
        assert 8 * 64 * MEBIBYTE <= heap.peak_bytes <= kept_before + 8.1 * 64 * MEBIBYTE
        assert not heap.failed_bytes


def test_what_came_and_went_is_repeated_beside_what_stayed():
    """As three passes would be: 4 + 1 blocks at a time in the first, the one that stays is there already later."""
    taken = []

    class Watched(UntouchedHeap):
        def take(self, key, size_bytes):
            taken.append(size_bytes // MEBIBYTE)
            super().take(key, size_bytes)

    with Watched() as heap:
        heap.take("stays", 64 * MEBIBYTE)
        for number in range(4):  # the same keys come again, as addresses do
            heap.take(number % 2, (number + 1) * 64 * MEBIBYTE)
            heap.give(number % 2)
        once, taken[:] = list(taken), []
        heap.repeat(2)
        assert taken == 2 * once[1:] and list(heap._blocks) == ["stays"]
        assert 5 * 64 * MEBIBYTE <= heap.peak_bytes


def test_it_takes_no_memory():
    before = resident_bytes(Path("/proc/self"))
    with UntouchedHeap() as heap:
        for number in range(64):
            heap.take(number, 64 * MEBIBYTE)
        assert resident_bytes(Path("/proc/self")) - before < 16 * MEBIBYTE
        assert heap.peak_bytes >= 63 * 64 * MEBIBYTE


def test_what_is_left_is_freed_at_the_end_also_after_an_error():
    before_bytes = bytes_of_addresses()
    for number in range(2):
        with pytest.raises(ZeroDivisionError), UntouchedHeap() as heap:
            heap.take(number, 512 * MEBIBYTE)
            assert bytes_of_addresses() - before_bytes >= 512 * MEBIBYTE
            raise ZeroDivisionError
    assert not heap._blocks
    assert bytes_of_addresses() - before_bytes < 64 * MEBIBYTE


WRITTEN = """
import ctypes, sys
from pathlib import Path
from scu_trainer.hardware.heap import UntouchedHeap
from scu_trainer.hardware.probe import resident_bytes

size_bytes, most = int(sys.argv[1]), 0
with UntouchedHeap() as heap:
    before = resident_bytes(Path("/proc/self"))
    for number in range(max(10, min(5_000, 2**27 // size_bytes))):
        heap.take(number, size_bytes)
        ctypes.memset(heap._blocks[number][0], 1, size_bytes)
        most = max(most, resident_bytes(Path("/proc/self")) - before)
        if number % 3 == 0:
            heap.give(number)
    print(heap.peak_bytes, most)
"""


@pytest.mark.parametrize("size_bytes", [1_000, 70_000, 3 * MEBIBYTE, 40 * MEBIBYTE])
def test_it_says_what_blocks_take_that_are_written(size_bytes):
    """In a process of its own: where much was freed before, what is written to was resident already."""
    words = [sys.executable, "-c", WRITTEN, str(size_bytes)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) == pytest.approx(int(told[1]), rel=0.02, abs=2 * MEBIBYTE)


def test_the_size_that_an_earlier_heap_has_left_is_not_counted():
    above = UntouchedHeap()
    with UntouchedHeap() as heap:
        for number in range(64):
            heap.take(number, MEBIBYTE)
        above.take("kept by the process", 20 * MEBIBYTE)
    with above, UntouchedHeap() as heap:
        heap.take("next", MEBIBYTE)
        assert MEBIBYTE <= heap.peak_bytes < 2 * MEBIBYTE


def test_what_the_heap_has_given_back_is_not_counted_beside_what_came_later():
    """How far the heap shrinks depends on what this process keeps above the blocks, so its end is said here."""
    with UntouchedHeap() as heap:
        for number in range(8):
            heap.take(number, 20 * MEBIBYTE)
        for number in range(8):
            heap.give(number)
        lowest = min(grain * GRAIN_BYTES for grain in heap._grains)
        heap._end_of_heap = lambda _: lowest
        heap.take("mapped by itself", 100 * MEBIBYTE)
        assert 160 * MEBIBYTE <= heap.peak_bytes < 170 * MEBIBYTE


def test_a_thread_cannot_follow_the_heap_of_the_main_one():
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(UntouchedHeap.is_known).result()


def test_what_has_no_addresses_is_counted_as_failed():
    with UntouchedHeap() as heap:
        heap.take("huge", 2**60)
        heap.give("huge")
        assert heap.failed_bytes == 2**60 and heap.peak_bytes == 0


def test_freeing_what_is_not_there_does_nothing():
    with UntouchedHeap() as heap:
        heap.give("nothing")
