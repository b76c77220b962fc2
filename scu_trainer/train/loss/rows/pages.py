"""Allocate large tensors that live for one micro-batch on huge pages, where Linux has them.

The C library maps blocks of more than 32 MiB again each time, and the first access to each page waits for the kernel:
0.7 ms per MiB in pages of 4 KiB, a third of the time of the product that fills it with logits; 0.1 ms in pages of 2
MiB. Keeping a buffer between micro-batches would save as much time, but that memory would be missing elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

SMALLEST_BYTES = 16 * 2**20
"""For smaller tensors the C library reuses freed blocks."""


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like ``like.new_empty(shape, dtype=dtype)``, on huge pages if possible."""
    return _map_pages(shape, dtype) if _should_map(like, shape, dtype) else like.new_empty(shape, dtype=dtype)


def new_zeros(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like ``like.new_zeros(shape, dtype=dtype)``; pages from the kernel are zero already."""
    return _map_pages(shape, dtype) if _should_map(like, shape, dtype) else like.new_zeros(shape, dtype=dtype)


def _should_map(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    if like.device.type != "cpu" or isinstance(like, FakeTensor) or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    return math.prod(shape) * dtype.itemsize >= SMALLEST_BYTES


def _map_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor on newly mapped pages. Raises OSError (ENOMEM, treated as out of memory) if memory is short."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # only advice: a kernel without huge pages uses ordinary ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
