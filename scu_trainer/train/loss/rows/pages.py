"""Large tensors that live for one micro-batch, on huge pages where Linux has them.

The C library maps blocks of more than 32 MiB afresh each time, and the first touch of each of their pages waits for
the kernel: 0.7 ms per MiB in pages of 4 KiB, as long as a third of the product that fills it with logits; 0.1 in pages
of 2 MiB. A buffer kept between micro-batches would save as much and would be missing elsewhere.
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
"""Below, the C library keeps freed blocks."""


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``like.new_empty(shape, dtype=dtype)``."""
    return _mapped(shape, dtype) if _is_worth_it(like, shape, dtype) else like.new_empty(shape, dtype=dtype)


def new_zeros(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``like.new_zeros(shape, dtype=dtype)``; the kernel's pages are zeros already."""
    return _mapped(shape, dtype) if _is_worth_it(like, shape, dtype) else like.new_zeros(shape, dtype=dtype)


def _is_worth_it(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    if like.device.type != "cpu" or isinstance(like, FakeTensor) or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    return math.prod(shape) * dtype.itemsize >= SMALLEST_BYTES


def _mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Raises OSError (ENOMEM) where memory is short, which counts as out of memory."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # advice: a kernel without huge pages takes ordinary ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
