"""What the C library does with memory that a process has freed: keep it for the next step, or give it back."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Optional

M_TRIM_THRESHOLD = -1  # of malloc.h, as is the next one
M_MMAP_THRESHOLD = -3
LARGEST_BYTES = 2**31 - 1  # mallopt takes an int


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
