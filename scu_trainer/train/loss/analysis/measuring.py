"""What the loss of some rows says of itself: value and gradient, without noise, and how wholes follow from parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from transformers import Trainer

from scu_trainer.data.random_states import States, put_back
from scu_trainer.hardware.precision import AMPERE
from scu_trainer.models.asking import float32_settings
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, has_drawn, rng_state
from scu_trainer.train.loss.rows.known import Call, LossCalls
from scu_trainer.train.step.batches.reduction import Targets, row_items
from scu_trainer.train.step.batches.rows import placed
from scu_trainer.train.step.recovery.snapshot import generators

EXACT = 5e-5
"""Largest relative difference that counts as equal in float32."""

ROUGH = 2e-2
"""The same where matrices are multiplied in 16 bits or less."""

ROUGH_TF32 = 2e-3
"""The same where factors are rounded to TF32, which keeps 11 bits: by up to 5e-4 each."""

MOST_GRADIENT_ENTRIES = 2**18
MOST_GRADIENT_TENSORS = 24
"""Of the trained weights whose gradient is compared: the smallest ones, which lie in all layers."""

FEW_ITEMS = 8.0
"""The count that a loss is given: by that of a window a small loss would drown in rounding."""

LossOf = Callable[[Any, Optional[torch.Tensor]], torch.Tensor]
"""(inputs, num_items_in_batch) -> loss; inputs are copied before, because a loss may take its labels out of them."""


@dataclass
class Meter:
    """``weights``: to take gradients by. ``is_noisy``: whether a forward draws numbers, None before the first."""

    loss_of: LossOf
    num_items: Any
    model: nn.Module
    weights: list[torch.Tensor]
    is_noisy: Optional[bool] = None
    _start: States = field(default_factory=list)

    def first(self, inputs: Any, gradient: bool) -> tuple[torch.Tensor, list[Call]]:
        """(as ``measure``, public loss functions that were called); finds out whether there is noise."""
        if self.is_noisy is None:
            self._start = generators({p.device for p in self.model.parameters()})
            before = rng_state(self.model)
            found = self._first(inputs, gradient)
            self.is_noisy = has_drawn(self.model, before)
            if not self.is_noisy:
                return found
        return self._first(inputs, gradient)

    def _first(self, inputs: Any, gradient: bool) -> tuple[torch.Tensor, list[Call]]:
        with LossCalls() as seen:
            return self.measure(inputs, gradient), seen.calls

    def loss(self, inputs: Any, items: float = FEW_ITEMS) -> float:
        with torch.no_grad():
            return float(self._value(inputs, items))

    def measure(self, inputs: Any, gradient: bool = True) -> torch.Tensor:
        """The loss and its gradient by ``weights``, as one vector (1 + entries,) in float64."""
        if not (gradient and self.weights):
            return torch.tensor([self.loss(inputs)], dtype=torch.float64)
        with torch.enable_grad():
            loss = self._value(inputs, FEW_ITEMS)
            with self._without_noise():
                return with_gradient(loss, self.weights)

    def _value(self, inputs: Any, items: float) -> torch.Tensor:
        with self._without_noise():
            return self.as_it_is(inputs, items)

    def as_it_is(self, inputs: Any, items: float = FEW_ITEMS) -> torch.Tensor:
        """The loss with whatever is drawn."""
        device = getattr(self.num_items, "device", None)
        given = None if self.num_items is None else torch.as_tensor(items, device=device)
        return self.loss_of(type(inputs)(inputs), given)

    @contextlib.contextmanager
    def _without_noise(self) -> Iterator[None]:
        """The same draws in every trial; where draws are made at all their means stand for them."""
        if self.is_noisy is None:
            yield
            return
        put_back(self._start)
        with WithoutNoise() if self.is_noisy else contextlib.nullcontext():
            yield


def with_gradient(loss: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """``loss`` and its gradient by ``weights``, as one vector (1 + entries,) in float64."""
    found = [None] * len(weights)
    if loss.requires_grad and weights:
        found = torch.autograd.grad(loss.reshape(()), weights, allow_unused=True)
    parts = [
        torch.zeros_like(weight) if gradient is None else gradient
        for weight, gradient in zip(weights, found, strict=True)
    ]
    # On the host, for Apple's GPUs know no float64.
    return torch.cat([part.detach().reshape(-1).cpu().double() for part in (loss, *parts)])


def gradient_error(whole: torch.Tensor, shared: list[torch.Tensor]) -> float:
    """How far the gradient of a whole is from the sum of its parts, relative to the largest; as ``with_gradient`` gives
    them. Infinite where only a part is not finite (root of the variance of one row), 0 where the whole is not."""
    difference = float((torch.stack(shared).sum(dim=0) - whole)[1:].norm())
    if not math.isfinite(difference):
        return math.inf if bool(whole.isfinite().all()) else 0.0
    scale = max(float(one[1:].norm()) for one in (whole, *shared))
    return difference / scale if scale else 0.0


@dataclass(frozen=True, eq=False)
class Observation:
    """``whole``, ``parts``: what was measured of rows together and of each alone."""

    inputs: Any
    rows: int
    whole: torch.Tensor
    parts: list[torch.Tensor]

    def shares(self, kind: str, targets: Optional[Targets] = None) -> list[float]:
        """By how much each part enters the whole."""
        if kind in ("sum", "num_items"):
            return [1.0] * self.rows
        items = row_items(kind, self.inputs, self.rows, targets)
        return [round(item / (sum(items) or 1.0), 9) for item in items]

    def error(self, kind: str, targets: Optional[Targets] = None) -> float:
        """Relative, the larger one of value and gradient."""
        shared = [
            share * part for share, part in zip(self.shares(kind, targets), self.parts, strict=True) if share != 0.0
        ]
        if not shared:
            return math.inf
        difference = sum(float(one[0]) for one in shared) - float(self.whole[0])
        of_value = abs(difference) / max(abs(float(one[0])) for one in (self.whole, *shared))
        error = max(of_value, gradient_error(self.whole, shared))
        return error if math.isfinite(error) else math.inf


@contextlib.contextmanager
def measured_weights(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Leaves that stand inside for some trained weights, the smallest ones, and share their memory: hooks on weights
    are not for us. None for sharded ones, whose gradients only all ranks together can take."""
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
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in trained):
        return []
    chosen, entries = [], 0
    for weight in sorted(trained, key=lambda weight: weight.numel())[:MOST_GRADIENT_TENSORS]:
        entries += weight.numel()
        if entries > MOST_GRADIENT_ENTRIES:
            break
        if type(weight) is nn.Parameter:  # a subclass knows more of itself than a plain leaf would
            chosen.append(weight)
    return chosen


def tolerance(model: nn.Module, low_precision: bool) -> float:
    low = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    if low or low_precision:
        return ROUGH
    card = next((p.device for p in model.parameters() if p.is_cuda), None)
    return ROUGH_TF32 if card is not None and rounds_to_tf32(model, card) else EXACT


def training_loss(trainer: Trainer, inputs: Any, items: Any) -> torch.Tensor:
    """As the training step computes it. ``inputs``: on any device."""
    with trainer.compute_loss_context_manager():
        prepared = trainer._prepare_inputs(placed(inputs, trainer.args.device))
        return trainer.compute_loss(trainer.model, prepared, num_items_in_batch=items)


def tolerance_of(trainer: Trainer) -> float:
    """Of losses and gradients as this trainer computes them."""
    return tolerance(trainer.model, trainer.accelerator.mixed_precision != "no")


def rounds_to_tf32(model: nn.Module, device: torch.device) -> bool:
    """Whether ``device`` is a card that rounds the factors of some products of ``model`` to TF32: those of convolutions
    and recurrent cells by default, of matrices where it is asked for."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        return False
    # Not get_float32_matmul_precision: it raises where torch.backends.fp32_precision was set, as transformers does.
    return any(setting.fp32_precision == "tf32" for setting in float32_settings(model))
