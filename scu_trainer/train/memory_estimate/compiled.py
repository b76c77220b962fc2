"""Memory that oneDNN keeps for compiled matrix products, in half precision on a CPU (see ``compiles_shapes``)."""

from __future__ import annotations

from typing import Any

import torch

from scu_trainer.hardware.heap import LARGEST_FROM_HEAP_BYTES

PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))

KERNEL_BYTES = round(0.82 * 2**20)
"""Bytes per product and shape. This and the next two values were measured with torch 2.13 on two cores with AMX, as the
growth per new number of tokens of Llamas with hidden sizes of 256 and 1,024, in full tuning and with LoRA."""

HOLE_BESIDE_WEIGHT, HOLE_OF_GRADIENT = 0.25, 0.7
"""Unusable holes that compiling leaves in the heap, as shares of the bytes of a weight: for a product with the weight,
and for the product that computes its gradient."""


class CompiledProducts:
    """Collects products that are compiled again for another number of tokens; ``size_bytes``: memory that they keep."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: dict[Any, int] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self._found.values())

    def record_product(self, function: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
        left, right = args[-2:]
        shapes = tuple(left.shape), tuple(right.shape)
        if result.dtype.itemsize != 2 or self._tokens not in (*shapes[0], *shapes[1]):
            return
        makes_gradient = left.shape[-1] == self._tokens  # a gradient is a sum over tokens
        weight, share = (result, HOLE_OF_GRADIENT) if makes_gradient else (right, HOLE_BESIDE_WEIGHT)
        size_bytes = weight.numel() * weight.itemsize
        hole = share * size_bytes if size_bytes <= LARGEST_FROM_HEAP_BYTES else 0  # larger blocks are mapped separately
        self._found[function, shapes] = round(KERNEL_BYTES + hole)
