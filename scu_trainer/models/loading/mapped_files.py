"""Release the pages of weight files that are mapped into memory: until then they count as memory of this process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

PAGE_OUT = 21
"""MADV_PAGEOUT of Linux 5.4: release pages now; a page that is needed later is read from the file again."""

SUFFIX = ".safetensors"


def release_mapped_files() -> int:
    """Release the pages of weight files that were only read to convert the weights; a weight that is used in place is
    read again. Returns the bytes of the released mappings; 0 if the system cannot release them."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    released_bytes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(SUFFIX):
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            length = end - start
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), PAGE_OUT) == 0:
                released_bytes += length
    return released_bytes
