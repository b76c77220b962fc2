"""Weights that no optimizer moves, but code of somebody's own may: a teacher that is an average of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.train.loss.rows.model_loss import PUBLIC, comes_from, has_sharded_weights

ONCE = "which must happen once per batch"
WRITES = f"writes to weights that the optimizer does not train (a teacher?), {ONCE}"
LOSS_WRITES = f"the model or its loss {WRITES}"


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


def written_buffer(model: nn.Module, owner: Any, ask: Callable[[], Any]) -> Optional[str]:
    """Name of one to which each ``ask``, of the same rows, writes: a running mean, and no cache. What goes up by one
    counts calls, which ``CallCounters`` names."""
    ask()
    before = _buffers(model, owner)
    numbers = {key: buffer.item() for key, buffer in before.items() if buffer.numel() == 1}
    written = WrittenWeights(list(before.values()), keeps_values=False)
    with written:
        ask()
    keys, after = list(before), _buffers(model, owner)
    found = [keys[position] for position in written.written]
    found += [key for key in keys if key in after and not _is_equal(before[key], after[key])]  # others in their place
    return next((key[1] for key in found if key not in numbers or after[key].item() != numbers[key] + 1), None)


def _buffers(model: nn.Module, owner: Any) -> dict[tuple[int, str], torch.Tensor]:
    """By the number of the module that has them, and their names in it."""
    named = {
        (number, name): buffer for number, one in enumerate(_held(model, owner)) for name, buffer in one.named_buffers()
    }
    return {key: buffer for key, buffer in named.items() if type(buffer) is torch.Tensor and _has_values(buffer)}


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.device == other.device and torch.equal(one, other))


def _held(model: nn.Module, owner: Any) -> list[nn.Module]:
    """``model``, and modules that its trainer ``owner`` holds beside it."""
    beside = [] if owner is None else [one for one in vars(owner).values() if isinstance(one, nn.Module)]
    return [model, *beside]


def _has_values(weight: torch.Tensor) -> bool:
    return not weight.is_meta and weight.layout is torch.strided and not weight.is_inference() and weight.numel() > 0
