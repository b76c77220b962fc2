"""What oneDNN keeps of the matrix products that it compiles: half precision on a CPU (``compiles_shapes``)."""

from __future__ import annotations

from typing import Any

import torch

from scu_trainer.hardware.heap import LARGEST_FROM_HEAP_BYTES

PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))

KERNEL_BYTES = round(0.82 * 2**20)
"""Per product and shape. This and the next two were measured with torch 2.13 on two cores with AMX, by the growth of
Llamas of size 256 and 1,024, trained whole and with LoRA, per new number of tokens."""

HOLE_BESIDE_WEIGHT, HOLE_OF_GRADIENT = 0.25, 0.7
"""Of the bytes of a weight: what compiling leaves in the heap that nothing fits into any more, for a product with the
weight, and for the one that makes its gradient."""


class CompiledProducts:
    """Which products would be compiled again for another number than ``tokens``. ``size_bytes``: what they keep."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: dict[Any, int] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self._found.values())

    def see(self, function: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
        left, right = args[-2:]
        shapes = tuple(left.shape), tuple(right.shape)
        if result.dtype.itemsize != 2 or self._tokens not in (*shapes[0], *shapes[1]):
            return
        makes_gradient = left.shape[-1] == self._tokens  # which is summed over tokens
        weight, share = (result, HOLE_OF_GRADIENT) if makes_gradient else (right, HOLE_BESIDE_WEIGHT)
        size_bytes = weight.numel() * weight.itemsize
        hole = share * size_bytes if size_bytes <= LARGEST_FROM_HEAP_BYTES else 0  # a larger block is mapped by itself
        self._found[function, shapes] = round(KERNEL_BYTES + hole)
