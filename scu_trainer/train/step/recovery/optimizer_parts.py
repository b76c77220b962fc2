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

    copied: everything that the update writes is copied first; otherwise one kernel does the update, which can fail only
    before it writes.
    groups: the indices of the optimizer's groups that hold the parameters; None if unknown.
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
    """Step counters: all that is written before a kernel runs, which may fail because the driver loads it late."""

    def __init__(self, optimizer: Optimizer, part: ParameterGroupPart) -> None:
        entries = [optimizer.state.get(parameter, {}) for parameter, _ in part.pairs]
        counted = [(entry, entry["step"]) for entry in entries if "step" in entry]
        self._numbers = [(entry, step) for entry, step in counted if isinstance(step, int)]
        self._counters = [step for _, step in counted if isinstance(step, torch.Tensor)]
        # Copied as one tensor, because reading each would wait for the device.
        self._copies = torch.stack(self._counters) if self._counters else ()

    def restore(self) -> None:
        for entry, number in self._numbers:
            entry["step"] = number
        for counter, copy in zip(self._counters, self._copies, strict=True):
            counter.copy_(copy)


class SavedPart:
    """Everything that updating a part may change: weights, state, and the gradients if they are written."""

    def __init__(self, optimizer: Optimizer, part: ParameterGroupPart) -> None:
        self._state = optimizer.state
        self._parameters = [parameter for parameter, _ in part.pairs]
        self._entries = {p: _protected_entry(self._state[p]) for p in self._parameters if p in self._state}
        state = (
            tensor for entry in self._entries.values() for value in entry.values() for tensor in plain_tensors_of(value)
        )
        gradients = (gradient for _, gradient in part.pairs if _writes_gradients(optimizer))
        kinds = by_device_and_dtype((*self._parameters, *state, *gradients))
        self._copies = [copy for tensors in kinds for copy in _copies(tensors, part.copy_to_host)]

    def restore(self) -> None:
        for tensor, copy in self._copies:
            _wait_for_pages((tensor,))
            tensor.copy_(copy.view_as(tensor))
        for parameter in self._parameters:
            # Remove an entry that the failed update had begun, which would look complete.
            self._state.pop(parameter, None)
        self._state.update(self._entries)


def _protected_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return ``entry`` so that a failed update cannot change it, except for its tensors. The projections of GaLore and
    APOLLO are objects, which get new tensors in the step and write to none."""
    return {name: shallow_copy(value) if hasattr(value, "ortho_matrix") else value for name, value in entry.items()}


def plain_tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of ``value``: itself, or the codes and scales of a quantized tensor."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors_of(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()


def _copies(tensors: list[torch.Tensor], to_host: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor with a flat copy, all made in one operation, because adapters have hundreds of tensors."""
    _wait_for_pages(tensors)
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    flat = torch.cat([part.cpu() for part in parts] if to_host else parts)
    return zip(tensors, flat.split([part.numel() for part in parts]), strict=True)


def is_paged(tensor: Any) -> bool:
    """Return whether ``tensor`` is a bitsandbytes state that moves between GPU and host. torch takes it for a host
    tensor, so copying it would move all of it to the host."""
    return getattr(tensor, "is_paged", False)


def _wait_for_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the device: on Windows and WSL, the host must not touch pages while the GPU computes anything."""
    if any(map(is_paged, tensors)):
        torch.accelerator.synchronize()


def _writes_gradients(optimizer: Optimizer) -> bool:
    """Return whether an update writes to the gradients. Nesterov's foreach update adds to them, fused updates under a
    GradScaler unscale them, and schedule-free optimizers (which have a ``train_mode``) compute in their memory."""
    in_groups = any(group.get("nesterov") or "train_mode" in group for group in optimizer.param_groups)
    return in_groups or getattr(optimizer, "grad_scale", None) is not None


def cut(pairs: Iterable[Pair], part_bytes: int | None) -> list[ParameterGroupPart]:
    """Return parts of at most ``part_bytes`` (a larger parameter is its own part), the largest parameters first."""
    parts: list[list[Pair]] = []
    room = 0
    for parameter, gradient in sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True):
        if not parts or parameter.nbytes > room:
            parts.append([])
            room = part_bytes or part_bytes_on(parameter.device.type)
        parts[-1].append((parameter, gradient))
        room -= parameter.nbytes
    return [ParameterGroupPart(tuple(part)) for part in parts]
