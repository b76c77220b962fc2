"""Weights that no optimizer trains, but user code may write to: a teacher that is an average of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.train.loss.rows.model_loss import PUBLIC, comes_from, has_sharded_weights

ONCE = "which must happen once per batch"
WRITES = f"writes to weights that the optimizer does not train (a teacher?), {ONCE}"
LOSS_WRITES = f"the model or its loss {WRITES}"

METRICS = "torchmetrics"
"""Its modules keep sums over rows in attributes, which are the same however batches are split."""


class KeptTensor(NamedTuple):
    """A tensor that a module keeps. ``number``: of the root (model, or module of its trainer) that has ``name``."""

    number: int
    name: str
    is_buffer: bool


class WrittenWeights(TorchDispatchMode):
    """Copy those of the ``weights`` that are written to before they change; copies of all would not fit in memory.

    Every operation is checked, because ``.data`` writes without increasing the version counter. ``keeps_values``:
    False to copy nothing and only record writes.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Sequence[torch.Tensor], keeps_values: bool = True) -> None:
        super().__init__()
        self._keeps_values = keeps_values
        self._weights = [(weight, weight.detach(), weight._version) for weight in weights]
        self._places: dict[int, list[torch.Tensor]] = defaultdict(list)
        for _, values, _ in self._weights:
            self._places[values.untyped_storage().data_ptr()].append(values)
        self._copies: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise torch.compile silently never compiles what it first sees inside this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _written_tensors(func, args, kwargs or {}):
            place = tensor.untyped_storage().data_ptr()
            if place in self._places and place not in self._copies:
                self._copies[place] = [values.clone() for values in self._places[place]] if self._keeps_values else []
        return func(*args, **(kwargs or {}))

    @property
    def are_written(self) -> bool:
        """Whether any was written to, also outside of this mode, as far as that shows."""
        return bool(self.written)

    @property
    def written(self) -> list[int]:
        """Positions of the weights that were written to."""
        return [
            position
            for position, (weight, values, version) in enumerate(self._weights)
            if weight._version != version
            or weight.data_ptr() != values.data_ptr()
            or values.untyped_storage().data_ptr() in self._copies
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the copied values. By ``data``, because a backward may still need these weights with old values."""
        for weight, values, _ in self._weights:
            if weight.data_ptr() != values.data_ptr():
                weight.data = values
        for place, copies in self._copies.items():
            for values, copy in zip(self._places[place], copies, strict=True):
                values.data.copy_(copy)


def _written_tensors(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    schema = getattr(func, "_schema", None)  # higher-order operators have none; what they run comes here separately
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
                    yield tensor


def frozen_weights(model: nn.Module, owner: Any = None) -> list[torch.Tensor]:
    """Return the frozen weights of ``model`` and of modules that its trainer ``owner`` holds; none for public code."""
    kinds = {type(module) for module in model.modules()}.union(() if owner is None else type(owner).__mro__)
    own_loss = getattr(owner, "compute_loss_func", None) is not None
    if has_sharded_weights(model) or not (own_loss or any(not comes_from(kind, *PUBLIC) for kind in kinds)):
        return []
    trained = {p for p in model.parameters() if p.requires_grad}
    found = dict.fromkeys(p for one in _root_modules(model, owner) for p in one.parameters() if p not in trained)
    return [p for p in found if type(p) is nn.Parameter and p.is_floating_point() and _has_values(p)]


def written_buffer(model: nn.Module, owner: Any, ask: Callable[[], Any], ask_one: Callable[[], Any]) -> Optional[str]:
    """Name a buffer or attribute that keeps something of each batch; None if there is none.

    That is a buffer that every ``ask``, of the same rows, changes, such as "the buffer norm.mean" (a running mean and
    not a cache), or one that has other values after ``ask_one``, of one of these rows. A number that goes up by one
    counts calls; ``CallCounters`` reports those.
    """
    ask()
    before = _buffers(model, owner)
    numbers = {key: buffer.item() for key, buffer in before.items() if buffer.numel() == 1}
    # An attribute may be scratch memory that each forward fills, so its values are compared, not the writes.
    keys, kept = [key for key in before if key.is_buffer], {k: v.clone() for k, v in before.items() if not k.is_buffer}
    written = WrittenWeights([before[key] for key in keys], keeps_values=False)
    with written:
        ask()
    after = _buffers(model, owner)
    found = [keys[position] for position in written.written] + _changed_keys({**before, **kept}, after)
    moved = [key for key in found if key not in numbers or after[key].item() != numbers[key] + 1]
    if not moved:
        ask_one()
        # Only buffers: a layer may keep its term of the loss in an attribute, which it sets in each forward.
        after_one_row = {key: one for key, one in _buffers(model, owner).items() if key.is_buffer and key not in found}
        moved = [key for key in _changed_keys(after, after_one_row) if after[key].shape == after_one_row[key].shape]
    return next((f"the {'buffer' if key.is_buffer else 'attribute'} {key.name}" for key in moved), None)


def _changed_keys(
    before: Mapping[KeptTensor, torch.Tensor], after: Mapping[KeptTensor, torch.Tensor]
) -> list[KeptTensor]:
    """Return the keys for which another tensor has other values."""
    return [key for key in before if key in after and not _is_equal(before[key], after[key])]


def _buffers(model: nn.Module, owner: Any) -> dict[KeptTensor, torch.Tensor]:
    """Return the buffers of all modules, and tensors that user modules keep as attributes."""
    found = {}
    for number, one in enumerate(_root_modules(model, owner)):
        for path, module in one.named_modules():
            is_metric = any(comes_from(kind, METRICS) for kind in type(module).__mro__)
            kept = {} if is_metric or comes_from(type(module), *PUBLIC) else vars(module)
            for name, value in (*kept.items(), *module._buffers.items()):
                if type(value) is torch.Tensor and not value.requires_grad and _has_values(value):
                    found[KeptTensor(number, f"{path}.{name}" if path else name, name in module._buffers)] = value
    return found


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, treating NaN as equal to NaN."""
    if one is other:
        return True
    if (one.device, one.dtype, one.shape) != (other.device, other.dtype, other.shape):
        return False
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)


def _root_modules(model: nn.Module, owner: Any) -> list[nn.Module]:
    """Return ``model`` and the modules that its trainer ``owner`` holds."""
    held = [] if owner is None else [one for one in vars(owner).values() if isinstance(one, nn.Module)]
    return [model, *held]


def _has_values(weight: torch.Tensor) -> bool:
    return not weight.is_meta and weight.layout is torch.strided and not weight.is_inference() and weight.numel() > 0
