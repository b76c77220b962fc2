"""Parts of an optimizer step: a few parameters, and a copy of what updating them writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy as shallow_copy
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from scu_trainer.hardware.optimizer_bytes import part_bytes_on

Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter and its gradient."""


@dataclass(frozen=True)
class ParameterGroupPart:
    """Parameters, each with its gradient, that are updated together.

    copied: after a copy of all that the update writes; else by one kernel, which can fail only before it writes.
    groups: those of the optimizer that the parameters are of, by number; None where that is not known.
    """

    pairs: tuple[Pair, ...]
    copied: bool = True
    copy_to_host: bool = False
    groups: Optional[tuple[int, ...]] = None

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter, _ in self.pairs)

    def show(self) -> None:
        for parameter, gradient in self.pairs:
            parameter.grad = gradient

    def hide(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None


class SavedCounters:
    """Step counters: all that is written before a kernel runs, which may fail (the driver loads it late)."""

    def __init__(self, optimizer: Optimizer, part: ParameterGroupPart) -> None:
        entries = [optimizer.state.get(parameter, {}) for parameter, _ in part.pairs]
        counted = [(entry, entry["step"]) for entry in entries if "step" in entry]
        self._numbers = [(entry, step) for entry, step in counted if isinstance(step, int)]
        self._counters = [step for _, step in counted if isinstance(step, torch.Tensor)]
        # Not read one by one: each would wait for the device.
        self._copies = torch.stack(self._counters) if self._counters else ()

    def restore(self) -> None:
        for entry, number in self._numbers:
            entry["step"] = number
        for counter, copy in zip(self._counters, self._copies, strict=True):
            counter.copy_(copy)


class SavedPart:
    """All that updating a part may change: weights, state, and the gradients where they are written."""

    def __init__(self, optimizer: Optimizer, part: ParameterGroupPart) -> None:
        self._state = optimizer.state
        self._parameters = [parameter for parameter, _ in part.pairs]
        self._entries = {p: _kept(self._state[p]) for p in self._parameters if p in self._state}
        state = (tensor for entry in self._entries.values() for value in entry.values() for tensor in stored(value))
        gradients = (gradient for _, gradient in part.pairs if _writes_gradients(optimizer))
        kinds = alike((*self._parameters, *state, *gradients))
        self._copies = [copy for tensors in kinds for copy in _copies(tensors, part.copy_to_host)]

    def restore(self) -> None:
        for tensor, copy in self._copies:
            _wait_for_pages((tensor,))
            tensor.copy_(copy.view_as(tensor))
        for parameter in self._parameters:
            # An entry that the failed update had begun would pass for a complete one.
            self._state.pop(parameter, None)
        self._state.update(self._entries)


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` as a failed update cannot change it, but for the tensors in it. The projections of GaLore and APOLLO
    are objects, which get new tensors in the step and write to none."""
    return {name: shallow_copy(value) if hasattr(value, "ortho_matrix") else value for name, value in entry.items()}


def stored(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that ``value`` consists of: itself, or the codes and scales of a quantized one; else none."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from stored(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def alike(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """By device and dtype."""
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()


def _copies(tensors: list[torch.Tensor], to_host: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with a flat copy, made by one operation for all: adapters have hundreds of small tensors."""
    _wait_for_pages(tensors)
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    flat = torch.cat([part.cpu() for part in parts] if to_host else parts)
    return zip(tensors, flat.split([part.numel() for part in parts]), strict=True)


def is_paged(tensor: Any) -> bool:
    """Whether ``tensor`` is state of bitsandbytes that moves between a card and the host. torch takes it for the
    host's, so that a copy of it moves all of it there."""
    return getattr(tensor, "is_paged", False)


def _wait_for_pages(tensors: Iterable[torch.Tensor]) -> None:
    """On Windows, and Linux inside of it, the host must not touch pages while the card computes, whatever that is."""
    if any(map(is_paged, tensors)):
        torch.accelerator.synchronize()


def _writes_gradients(optimizer: Optimizer) -> bool:
    """Nesterov's foreach update adds to the gradients; fused updates under a GradScaler unscale them; those of
    schedule-free optimizers, which have a ``train_mode``, are computed in their memory."""
    in_groups = any(group.get("nesterov") or "train_mode" in group for group in optimizer.param_groups)
    return in_groups or getattr(optimizer, "grad_scale", None) is not None


def cut(pairs: Iterable[Pair], part_bytes: int | None) -> list[ParameterGroupPart]:
    """Parts of at most ``part_bytes`` (a larger parameter is a part of its own), the largest parameters first."""
    parts: list[list[Pair]] = []
    room = 0
    for parameter, gradient in sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True):
        if not parts or parameter.nbytes > room:
            parts.append([])
            room = part_bytes or part_bytes_on(parameter.device.type)
        parts[-1].append((parameter, gradient))
        room -= parameter.nbytes
    return [ParameterGroupPart(tuple(part)) for part in parts]
