"""Count the bytes of live tensors while code runs, by part. Only sizes are used, so fake tensors work as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Optional, Union

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from scu_trainer.hardware.heap import LARGEST_FROM_HEAP_BYTES, UntouchedHeap
from scu_trainer.train.memory_estimate.events import ACTIVATIONS, GRADIENTS, LOGITS, PARTS, WEIGHTS, Events

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


ASK_FOR_CONTENT = torch.ops.aten._local_scalar_dense.default
ASK_FOR_DEVICE = torch.ops.prim.device.default  # two thirds of all calls, and slow in FakeTensorMode


class LiveBytes(TorchDispatchMode):
    """Counts every tensor that is created in this context until it is freed.

    ``live``: current bytes by part. ``peak``: bytes by part when their sum was highest. ``events``: allocations and
    frees since ``forget_peak``. A result with a last dimension of ``vocabulary`` entries counts as logits. Allocations
    inside kernels are not seen. ``heap``: allocates and frees blocks of the same sizes, except for weights, which may
    be mapped from files. ``products``: is notified of matrix products. A fake tensor that is asked for its value
    returns 0.
    """

    def __init__(
        self,
        vocabulary: Optional[int] = None,
        heap: Optional[UntouchedHeap] = None,
        products: Optional[CompiledProducts] = None,
    ) -> None:
        super().__init__()
        self.live = dict.fromkeys(PARTS, 0)
        self.peak, self.events = dict(self.live), Events()
        self._total = self._peak_total = 0
        self._vocabulary, self._heap, self._products = vocabulary, heap, products
        self._parts: dict[int, tuple[str, int]] = {}
        self._taken: dict[int, int] = {}
        self._watched: dict[int, weakref.ref] = {}

    def count(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count existing tensors as ``part``, or move tensors that are already counted to it."""
        for tensor in tensors:
            counted = self._parts.get(_storage_key(tensor))
            if counted is None:
                self._add(tensor, part)
            else:
                self._parts[_storage_key(tensor)] = part, counted[1]
                allocation = self._taken.get(_storage_key(tensor), -1)
                self._change(counted[0], -counted[1], allocation)
                self._change(part, counted[1], allocation)

    def hold_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[RemovableHandle]:
        """Count gradients of ``parameters`` as such once they are stored, until the returned hooks are removed."""

        def stored(weight: torch.nn.Parameter) -> None:
            self.count([weight.grad], GRADIENTS)

        return [parameter.register_post_accumulate_grad_hook(stored) for parameter in parameters]

    def forget_peak(self) -> None:
        self.peak, self._peak_total, self.events = dict(self.live), self._total, Events()
        self._taken.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if isinstance(args[0] if args else None, FakeTensor):
            if function is ASK_FOR_DEVICE:
                return args[0].fake_device
            if function is ASK_FOR_CONTENT:
                return _zero(args[0].dtype)
        result = function(*args, **(kwargs or {}))
        if self._products is not None and function in PRODUCTS:
            self._products.record_product(function, args, result)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and _storage_key(value) not in self._parts:
                self._add(value, self._part_of(value))
        return result

    def _part_of(self, tensor: torch.Tensor) -> str:
        is_logits = self._vocabulary is not None and tensor.dim() > 1 and tensor.size(-1) == self._vocabulary
        return LOGITS if is_logits else ACTIVATIONS

    def _add(self, tensor: torch.Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = _storage_key(tensor), storage.nbytes()
        self._parts[key] = part, size_bytes
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        if self._heap is not None and part != WEIGHTS:
            self._heap.take(key, size_bytes)
        self._taken[key] = len(self.events.sizes)
        self._change(part, size_bytes, self._taken[key])
        if self._total > self._peak_total:
            self.peak, self._peak_total = dict(self.live), self._total

    def _change(self, part: str, size_bytes: int, allocation: int) -> None:
        self.live[part] += size_bytes
        self._total += size_bytes
        self.events.sizes.append((part, size_bytes))
        self.events.taken.append(allocation)

    def _forget(self, key: int) -> None:
        part, size_bytes = self._parts.pop(key)
        del self._watched[key]
        self._change(part, -size_bytes, self._taken.pop(key, -1))
        if self._heap is not None:
            self._heap.give(key)


def _zero(dtype: torch.dtype) -> Union[bool, int, float]:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _storage_key(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
