"""What a chunk changes beside its result, so that a failed one can be taken back: RNG, buffers, gradients."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import nn


class ChangingBuffers:
    """The buffers of a model that forward passes change, such as BatchNorm's statistics.

    Which they are is found out in the first window: all are watched then, afterwards only those that changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._first: Optional[list[tuple[int, int]]] = self._fingerprints()

    def _fingerprints(self) -> list[tuple[int, int]]:
        return [(id(module._buffers[name]), module._buffers[name]._version) for module, name in self._watched]

    def forget_constant_ones(self) -> None:
        """After a window in which every part of the model has run."""
        if self._first is not None:
            pairs = zip(self._watched, self._first, self._fingerprints(), strict=True)
            # By module: batch_norm's kernels write the statistics without counting; num_batches_tracked does count.
            changing = {module for (module, _), before, now in pairs if before != now}
            self._watched = [place for place in self._watched if place[0] in changing]
            self._first = None

    def copies(self) -> list[torch.Tensor]:
        return [module._buffers[name].clone() for module, name in self._watched]

    @torch.no_grad()
    def restore(self, copies: Sequence[torch.Tensor]) -> None:
        for (module, name), copy in zip(self._watched, copies, strict=True):
            now = module._buffers[name]
            if now.shape == copy.shape and now.dtype == copy.dtype:
                now.copy_(copy)
            else:
                module._buffers[name] = copy.clone()


@dataclass
class Mark:
    """The state of RNG, buffers and gradients before a chunk. ``parameters``: the trainable ones."""

    rng: list[tuple[Callable[[Any], None], Any]]
    buffers: ChangingBuffers
    copies: list[torch.Tensor]
    parameters: Sequence[nn.Parameter]
    gradients: list[tuple[int, int]]

    @classmethod
    def take(cls, devices: Sequence[str], buffers: ChangingBuffers, parameters: Sequence[nn.Parameter]) -> Mark:
        rng: list[tuple[Callable[[Any], None], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (np.random.set_state, np.random.get_state()),
            (random.setstate, random.getstate()),
        ]
        rng += [_device_rng(torch.device(name)) for name in devices if torch.device(name).type not in ("cpu", "meta")]
        return cls(rng, buffers, buffers.copies(), parameters, _versions(parameters))

    def restore_surroundings(self) -> None:
        """RNG and buffers as they were; gradients are the caller's."""
        for restore, state in self.rng:
            restore(state)
        self.buffers.restore(self.copies)

    def gradients_touched(self) -> bool:
        """Whether a backward has reached any gradient since."""
        return self.gradients != _versions(self.parameters)


def _device_rng(device: torch.device) -> tuple[Callable[[Any], None], Any]:
    generators = getattr(torch, device.type)
    if device.index is None:
        return generators.set_rng_state, generators.get_rng_state()
    return functools.partial(generators.set_rng_state, device=device), generators.get_rng_state(device)


def _versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    # Identity and version, not values: no gradient is read, nothing waits for a device.
    return [(0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]
