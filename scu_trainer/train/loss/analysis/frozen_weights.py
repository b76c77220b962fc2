"""Weights that no optimizer moves, but code of somebody's own may: a teacher that is an average of the model."""

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


class Kept(NamedTuple):
    """What a module keeps. ``number``: of the module that is trained, or held beside it, in which it has ``name``."""

    number: int
    name: str
    is_buffer: bool


class WrittenWeights(TorchDispatchMode):
    """Inside, those of the ``weights`` that are written to are copied first: copies of all would not fit beside a large
    model. Operations are looked at, as ``.data`` writes without counting. ``keeps_values`` False: nothing is copied."""

    supports_higher_order_operators = True

    def __init__(self, weights: Sequence[torch.Tensor], keeps_values: bool = True) -> None:
        super().__init__()
        self._keeps_values = keeps_values
        self._weights = [(weight, weight.detach(), weight._version) for weight in weights]
        self._places: dict[int, list[torch.Tensor]] = defaultdict(list)
        for _, values, _ in self._weights:
            self._places[values.untyped_storage().data_ptr()].append(values)
        self._kept: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else what torch.compile first sees inside of a mode is never compiled afterwards, without a word."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _written(func, args, kwargs or {}):
            place = tensor.untyped_storage().data_ptr()
            if place in self._places and place not in self._kept:
                self._kept[place] = [values.clone() for values in self._places[place]] if self._keeps_values else []
        return func(*args, **(kwargs or {}))

    @property
    def are_written(self) -> bool:
        """Also outside of this mode, where that shows."""
        return bool(self.written)

    @property
    def written(self) -> list[int]:
        """Positions of those that are."""
        return [
            position
            for position, (weight, values, version) in enumerate(self._weights)
            if weight._version != version
            or weight.data_ptr() != values.data_ptr()
            or values.untyped_storage().data_ptr() in self._kept
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """What was kept. By ``data``: a backward may still need these weights, with the values of before."""
        for weight, values, _ in self._weights:
            if weight.data_ptr() != values.data_ptr():
                weight.data = values
        for place, copies in self._kept.items():
            for values, copy in zip(self._places[place], copies, strict=True):
                values.data.copy_(copy)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    schema = getattr(func, "_schema", None)  # what higher operators run comes here by itself
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
                    yield tensor


def frozen_weights(model: nn.Module, owner: Any = None) -> list[torch.Tensor]:
    """Of ``model`` and of modules that its trainer ``owner`` holds beside it. None where all code is public."""
    kinds = {type(module) for module in model.modules()}.union(() if owner is None else type(owner).__mro__)
    own_loss = getattr(owner, "compute_loss_func", None) is not None
    if has_sharded_weights(model) or not (own_loss or any(not comes_from(kind, *PUBLIC) for kind in kinds)):
        return []
    trained = {p for p in model.parameters() if p.requires_grad}
    found = dict.fromkeys(p for one in _held(model, owner) for p in one.parameters() if p not in trained)
    return [p for p in found if type(p) is nn.Parameter and p.is_floating_point() and _has_values(p)]


def written_buffer(model: nn.Module, owner: Any, ask: Callable[[], Any], ask_one: Callable[[], Any]) -> Optional[str]:
    """One to which each ``ask``, of the same rows, writes, such as "the buffer norm.mean": a running mean, no cache; or
    one that holds other values after ``ask_one``, of one of these rows: a figure of the batch. What goes up by one
    counts calls, which ``CallCounters`` names."""
    ask()
    before = _buffers(model, owner)
    numbers = {key: buffer.item() for key, buffer in before.items() if buffer.numel() == 1}
    # What is no buffer may be room that each forward fills again: its values decide, not that it is written to.
    keys, kept = [key for key in before if key.is_buffer], {k: v.clone() for k, v in before.items() if not k.is_buffer}
    written = WrittenWeights([before[key] for key in keys], keeps_values=False)
    with written:
        ask()
    after = _buffers(model, owner)
    found = [keys[position] for position in written.written] + _replaced({**before, **kept}, after)
    moved = [key for key in found if key not in numbers or after[key].item() != numbers[key] + 1]
    if not moved:
        ask_one()
        # A layer that keeps its term of the loss in an attribute, to be added up behind it, does so in each forward.
        as_long = {key: one for key, one in _buffers(model, owner).items() if key.is_buffer and key not in found}
        moved = [key for key in _replaced(after, as_long) if after[key].shape == as_long[key].shape]
    return next((f"the {'buffer' if key.is_buffer else 'attribute'} {key.name}" for key in moved), None)


def _replaced(before: Mapping[Kept, torch.Tensor], after: Mapping[Kept, torch.Tensor]) -> list[Kept]:
    """Those in whose place another tensor has other values."""
    return [key for key in before if key in after and not _is_equal(before[key], after[key])]


def _buffers(model: nn.Module, owner: Any) -> dict[Kept, torch.Tensor]:
    """Those of all modules, and tensors that modules of somebody's own keep as attributes."""
    found = {}
    for number, one in enumerate(_held(model, owner)):
        for path, module in one.named_modules():
            is_metric = any(comes_from(kind, METRICS) for kind in type(module).__mro__)
            kept = {} if is_metric or comes_from(type(module), *PUBLIC) else vars(module)
            for name, value in (*kept.items(), *module._buffers.items()):
                if type(value) is torch.Tensor and not value.requires_grad and _has_values(value):
                    found[Kept(number, f"{path}.{name}" if path else name, name in module._buffers)] = value
    return found


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """With the same entries NaN."""
    if one is other:
        return True
    if (one.device, one.dtype, one.shape) != (other.device, other.dtype, other.shape):
        return False
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)


def _held(model: nn.Module, owner: Any) -> list[nn.Module]:
    """``model``, and modules that its trainer ``owner`` holds beside it."""
    beside = [] if owner is None else [one for one in vars(owner).values() if isinstance(one, nn.Module)]
    return [model, *beside]


def _has_values(weight: torch.Tensor) -> bool:
    return not weight.is_meta and weight.layout is torch.strided and not weight.is_inference() and weight.numel() > 0
