"""Measure the loss of some rows and its gradient without noise, and predict the loss of a whole from its parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from transformers import Trainer

from scu_trainer.data.random_states import RngStates, restore_rng_states
from scu_trainer.hardware.precision import AMPERE
from scu_trainer.models.asking import float32_settings
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, has_drawn, rng_state
from scu_trainer.train.loss.rows.known import Call, LossCalls
from scu_trainer.train.step.batches.reduction import SUMS, Targets, row_items
from scu_trainer.train.step.batches.rows import placed
from scu_trainer.train.step.recovery.snapshot import generators

EXACT = 5e-5
"""Maximum relative difference that counts as equal in float32."""

ROUGH = 2e-2
"""The same if matrices are multiplied in 16 bits or less."""

ROUGH_TF32 = 2e-3
"""The same if factors are rounded to TF32, which keeps 11 bits: by up to 5e-4 each."""

MOST_GRADIENT_ENTRIES = 2**18
MOST_GRADIENT_TENSORS = 24
"""Limits for the trained weights whose gradients are compared: the smallest ones, which occur in all layers."""

FEW_ITEMS = 8.0
"""The item count passed to a loss. Divided by the count of a whole window, a small loss would be lost in rounding."""

LossOf = Callable[[Any, Optional[torch.Tensor]], torch.Tensor]
"""(inputs, num_items_in_batch) -> loss; called with a copy of inputs, because a loss may remove labels from them."""


@dataclass
class Meter:
    """Measures losses. ``weights``: for gradients. ``is_noisy``: whether a forward draws random numbers; None before
    the first one."""

    loss_of: LossOf
    num_items: Any
    model: nn.Module
    weights: list[torch.Tensor]
    is_noisy: Optional[bool] = None
    _start: RngStates = field(default_factory=list)

    def first(self, inputs: Any, gradient: bool) -> tuple[torch.Tensor, list[Call]]:
        """Return (the result of ``measure``, calls of public loss functions), and find out whether there is noise."""
        if self.is_noisy is None:
            self._start = generators({p.device for p in self.model.parameters()})
            before = rng_state(self.model)
            found = self._measure_with_calls(inputs, gradient)
            self.is_noisy = has_drawn(self.model, before)
            if not self.is_noisy:
                return found
        return self._measure_with_calls(inputs, gradient)

    def _measure_with_calls(self, inputs: Any, gradient: bool) -> tuple[torch.Tensor, list[Call]]:
        with LossCalls() as seen:
            return self.measure(inputs, gradient), seen.calls

    def loss(self, inputs: Any, items: float = FEW_ITEMS) -> float:
        with torch.no_grad():
            return float(self._value(inputs, items))

    def measure(self, inputs: Any, gradient: bool = True, weights: Optional[list[torch.Tensor]] = None) -> torch.Tensor:
        """Return the loss and its gradient with respect to ``weights`` as one vector (1 + entries,) in float64.
        ``weights``: tensors that the forward may add, instead of those of the meter; no gradient if that has none."""
        if not (gradient and self.weights):
            return torch.tensor([self.loss(inputs)], dtype=torch.float64)
        with torch.enable_grad():
            loss = self._value(inputs, FEW_ITEMS)
            with self._without_noise():
                return with_gradient(loss, self.weights if weights is None else weights)

    def _value(self, inputs: Any, items: float) -> torch.Tensor:
        with self._without_noise():
            return self.as_it_is(inputs, items)

    def as_it_is(self, inputs: Any, items: float = FEW_ITEMS) -> torch.Tensor:
        """Return the loss with random numbers as they are drawn."""
        device = getattr(self.num_items, "device", None)
        given = None if self.num_items is None else torch.as_tensor(items, device=device)
        return self.loss_of(type(inputs)(inputs), given)

    @contextlib.contextmanager
    def _without_noise(self) -> Iterator[None]:
        """Use the same random numbers in every trial, or their means if the model draws any."""
        if self.is_noisy is None:
            yield
            return
        restore_rng_states(self._start)
        with WithoutNoise() if self.is_noisy else contextlib.nullcontext():
            yield


def with_gradient(loss: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return ``loss`` and its gradient with respect to ``weights`` as one vector (1 + entries,) in float64."""
    found = [None] * len(weights)
    if loss.requires_grad and weights:
        found = torch.autograd.grad(loss.reshape(()), weights, allow_unused=True)
    parts = [
        torch.zeros_like(weight) if gradient is None else gradient
        for weight, gradient in zip(weights, found, strict=True)
    ]
    # On the host, because Apple's GPUs have no float64.
    return torch.cat([part.detach().reshape(-1).cpu().double() for part in (loss, *parts)])


def gradient_error(whole: torch.Tensor, shared: list[torch.Tensor]) -> float:
    """Return how far the gradient of a whole is from the sum of its parts, relative to the largest of them.

    All as returned by ``with_gradient``. Infinite if only a part is not finite (root of the variance of one row), 0 if
    the whole is not finite.
    """
    difference = float((torch.stack(shared).sum(dim=0) - whole)[1:].norm())
    if not math.isfinite(difference):
        return math.inf if bool(whole.isfinite().all()) else 0.0
    scale = max(float(measured[1:].norm()) for measured in (whole, *shared))
    return difference / scale if scale else 0.0


@dataclass(frozen=True, eq=False)
class LossObservation:
    """Measurements of rows together (``whole``) and of each row (``parts``)."""

    inputs: Any
    rows: int
    whole: torch.Tensor
    parts: list[torch.Tensor]

    def shares(self, kind: str, targets: Optional[Targets] = None) -> list[float]:
        """Return the factor with which each part enters the whole, if the loss is of this ``kind``."""
        if kind in SUMS:
            return [1.0] * self.rows
        items = row_items(kind, self.inputs, self.rows, targets)
        return [round(item / (sum(items) or 1.0), 9) for item in items]

    def error(self, kind: str, targets: Optional[Targets] = None) -> float:
        """Return the relative difference from the whole; the larger one of value and gradient."""
        shared = [
            share * part for share, part in zip(self.shares(kind, targets), self.parts, strict=True) if share != 0.0
        ]
        if not shared:
            return math.inf
        difference = sum(float(measured[0]) for measured in shared) - float(self.whole[0])
        of_value = abs(difference) / max(abs(float(measured[0])) for measured in (self.whole, *shared))
        error = max(of_value, gradient_error(self.whole, shared))
        return error if math.isfinite(error) else math.inf


@contextlib.contextmanager
def measured_weights(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Replace some trained weights, the smallest ones, by leaf tensors that share their memory, and yield these. So the
    hooks on the weights do not run. Yields no leaves for sharded weights, whose gradients need all ranks."""
    chosen = _smallest_weights(model)
    leaves = {weight: nn.Parameter(weight.detach()) for weight in chosen}
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight in leaves
    ]
    for module, name, weight in places:
        module._parameters[name] = leaves[weight]
    try:
        yield list(leaves.values())
    finally:
        for module, name, weight in places:
            module._parameters[name] = weight


def _smallest_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the smallest trained weights, within the limits; none if weights are sharded."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in trained):
        return []
    chosen, entries = [], 0
    for weight in sorted(trained, key=lambda weight: weight.numel())[:MOST_GRADIENT_TENSORS]:
        entries += weight.numel()
        if entries > MOST_GRADIENT_ENTRIES:
            break
        if type(weight) is nn.Parameter:  # a subclass may carry more than a plain leaf would
            chosen.append(weight)
    return chosen


def tolerance(model: nn.Module, low_precision: bool) -> float:
    low = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    if low or low_precision:
        return ROUGH
    gpu = next((p.device for p in model.parameters() if p.is_cuda), None)
    return ROUGH_TF32 if gpu is not None and rounds_to_tf32(model, gpu) else EXACT


def training_loss(trainer: Trainer, inputs: Any, items: Any) -> torch.Tensor:
    """Return the loss as the training step computes it. ``inputs``: on any device."""
    with trainer.compute_loss_context_manager():
        prepared = trainer._prepare_inputs(placed(inputs, trainer.args.device))
        return trainer.compute_loss(trainer.model, prepared, num_items_in_batch=items)


def tolerance_of(trainer: Trainer) -> float:
    """Return the tolerance for losses and gradients as this trainer computes them."""
    return tolerance(trainer.model, trainer.accelerator.mixed_precision != "no")


def rounds_to_tf32(model: nn.Module, device: torch.device) -> bool:
    """Return whether ``device`` is a GPU that rounds factors of some products of ``model`` to TF32. By default that
    applies to convolutions and recurrent cells; to matrix products only if it is turned on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        return False
    # Not get_float32_matmul_precision: it raises where torch.backends.fp32_precision was set, as transformers does.
    return any(setting.fp32_precision == "tf32" for setting in float32_settings(model))
