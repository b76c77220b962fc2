"""Measure how far many tensors are from where they began, at the speed of memory.

With hundreds of small tensors, one operation per tensor costs more than its arithmetic; and a difference as large as a
weight would have to be allocated at every step. So small tensors are concatenated, and large ones are processed in
blocks, so that a difference is summed while it is in the cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

import torch

Pair = tuple[torch.Tensor, Optional[torch.Tensor]]
"""A tensor and where it began; None stands for zero."""

BLOCK_VALUES = {"cpu": 1 << 18}  # 1 MiB of float32
OTHER_BLOCK_VALUES = 1 << 22  # 16 MiB, because a GPU needs few and large kernels


class SquaredDistances:
    """||tensor - start||^2 of pairs, as a few partial sums: float32 scalars on the pairs' devices.

    Uses ``torch.sum``, which adds pairwise; ``vector_norm`` adds one by one in float32 on the CPU and is 2 % too small
    at 1e8 values. Keeps one block of memory per device.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.device, torch.Tensor] = {}

    def __call__(self, pairs: Iterable[Pair]) -> Iterator[torch.Tensor]:
        pending: list[Pair] = []
        pending_values = 0
        for pair in pairs:
            tensor, size = pair[0], _block_values(pair[0])
            if tensor.numel() >= size:
                yield from self._sum_in_blocks(*pair)
                continue
            pending.append(pair)
            pending_values += tensor.numel()
            if pending_values >= size:
                yield from _sum_concatenated(pending)
                pending, pending_values = [], 0
        yield from _sum_concatenated(pending)

    def _sum_in_blocks(self, tensor: torch.Tensor, start: Optional[torch.Tensor]) -> Iterator[torch.Tensor]:
        size = _block_values(tensor)
        if tensor.device not in self._scratch:
            self._scratch[tensor.device] = torch.empty(size, device=tensor.device)
        flat, flat_start = _flatten_alike(tensor, start)
        blocks = flat.split(size)
        starts = [None] * len(blocks) if flat_start is None else flat_start.split(size)
        for block, block_start in zip(blocks, starts, strict=True):
            difference = self._scratch[tensor.device][: len(block)]
            if block_start is None:
                difference.copy_(block)
            else:
                torch.sub(_in_float32(block), block_start, out=difference)
            yield difference.square_().sum()


def exact_squares(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums of squares of the tensor's blocks in float64, on the CPU if the tensor is on Apple's GPU. In blocks,
    because a whole embedding in float64 would take gigabytes of an almost full GPU."""
    for block in tensor.reshape(-1).split(_block_values(tensor)):
        yield (block.cpu() if block.device.type == "mps" else block).double().square().sum()


def read_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors`` on the host, with one wait for each device: they are copied as the bytes of one tensor."""
    found: dict[int, torch.Tensor] = {}
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for number in sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size()):  # keeps alignment
        by_device[tensors[number].device].append(number)
    for members in by_device.values():
        parts = [tensors[number].detach().reshape(-1).view(torch.uint8) for number in members]
        read = torch.cat(parts).cpu().split([len(part) for part in parts])
        for number, part in zip(members, read, strict=True):
            found[number] = part.view(tensors[number].dtype).reshape(tensors[number].shape)
    return [found[number] for number in range(len(tensors))]


def _block_values(tensor: torch.Tensor) -> int:
    return BLOCK_VALUES.get(tensor.device.type, OTHER_BLOCK_VALUES)


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32 or better, because a difference in bfloat16 is rounded to 8 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flatten_alike(tensor: torch.Tensor, start: Optional[torch.Tensor]) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Return vectors with matching values; views if both have the same memory layout, for instance channels last."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1), None if start is None else start.permute(order).reshape(-1)


def _sum_concatenated(pairs: list[Pair]) -> Iterator[torch.Tensor]:
    by_kind: dict[tuple, list[Pair]] = defaultdict(list)
    for tensor, start in pairs:
        by_kind[tensor.device, tensor.dtype, start is None].append((_in_float32(tensor), start))
    for (_, _, from_zero), members in by_kind.items():
        tensors = [tensor for tensor, _ in members]
        differences = tensors if from_zero else torch._foreach_sub(tensors, [start for _, start in members])
        yield torch.cat([difference.reshape(-1) for difference in differences]).float().square_().sum()
