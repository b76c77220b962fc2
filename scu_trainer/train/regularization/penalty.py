"""The description length of trained weights, and the two ways in which lambda acts on them.

With a Gaussian prior of standard deviation sigma around w0, describing weights w costs ||w - w0||^2 / (2 sigma^2) nats,
up to a constant that training cannot change. Spread over N tokens, in bits:

    ParamBPT = ||w - w0||^2 / (2 sigma^2 N ln 2)

For low-rank adapters, the weights that count are the effective ones, so by default the distance is that of the
effective update, ||scale (B A - B0 A0)||^2. It needs r x r products only, and does not depend on how A and B share the
scale between them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional, TypeVar

import torch
from torch import nn

from scu_trainer.errors import ControlError
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.train.regularization.distances import Pair, SquaredDistances, exact_squares, read_together
from scu_trainer.train.regularization.effective import DoraUpdate, low_rank_pairs, other_updates
from scu_trainer.train.step.recovery.second_try import memory_advice, second_try

Tensors = list[torch.Tensor]
Result = TypeVar("Result")

MORE_ROOM_FOR_S = memory_advice("tuning: lora, or set scu: false")


@dataclass(frozen=True)
class LowRankGroup:
    """Adapters of equal shape, handled as one batch of small products.

    a: (r, inputs) each; b: (outputs, r) each; scales: (adapters,). ``b_starts_at_zero``: whether every prior of b is 0,
    so that B0 A0 vanishes and the distance needs one pair of products.
    """

    a_prior: Tensors
    b_prior: Tensors
    scales: torch.Tensor
    b_starts_at_zero: bool

    def squared_distance(self, a: Tensors, b: Tensors) -> torch.Tensor:
        """Return the sum over the group of ||scale (B A - B0 A0)||^2, a scalar in float32."""
        # Convolutional adapters are matrices over flattened patches.
        right = torch.stack([w.flatten(1) for w in a]).float()
        left = torch.stack([w.flatten(1) for w in b]).float()
        if not self.b_starts_at_zero:
            # B A - B0 A0 = [B - B0, B0] [A; A - A0]: avoids the difference of large, nearly equal norms.
            right_prior = torch.stack([w.flatten(1) for w in self.a_prior]).float()
            left_prior = torch.stack([w.flatten(1) for w in self.b_prior]).float()
            left, right = (
                torch.cat([left - left_prior, left_prior], dim=2),
                torch.cat([right, right - right_prior], dim=1),
            )
        inner = torch.bmm(left.transpose(1, 2), left) * torch.bmm(right, right.transpose(1, 2))
        return (inner.sum(dim=(1, 2)) * self.scales.square()).sum()


class Prior:
    """The trainable weights of a model together with the point w0 toward which lambda decays them.

    ``prior``: "init" copies the current trainable weights (memory: one copy of them), "zero" copies none.
    ``measure``: "effective" or "factors", see the module docstring. Raises ControlError if nothing is trainable, or if
    a trainable weight is in float16, where a decay of realistic size rounds to nothing.
    """

    def __init__(self, model: nn.Module, prior: str = "init", measure: str = "effective") -> None:
        # Skip empty weights of parts with zero layers (YOLOS); what sharding leaves behind has shape (0,).
        named = {
            name: p for name, p in model.named_parameters() if p.requires_grad and not (p.dim() > 1 and p.numel() == 0)
        }
        if not named:
            raise ControlError(
                "the model has no trainable weights, so there is nothing to regularize; check tuning and frozen "
                "parameters"
            )
        _reject_unusable(named)
        self.kind, self.measure = prior, measure
        self.names = list(named)
        # The parameters themselves: their storage may be replaced when the model moves or is wrapped.
        self.weights = list(named.values())
        self.starts: Tensors = []
        self._squared = SquaredDistances()
        if prior == "init":
            self.starts = [p.detach().clone() for p in named.values()]
        self._group_weights(model)

    def _group_weights(self, model: nn.Module) -> None:
        """Group low-rank pairs by shape, and separate weights with other updates and plain weights."""
        position = {id(p): i for i, p in enumerate(self.weights)}
        is_effective = self.measure == "effective"
        pairs = list(low_rank_pairs(model, position)) if is_effective else []
        self._other_updates = list(other_updates(model, position)) if is_effective else []
        if self.kind == "zero" and any(isinstance(update, DoraUpdate) for update in self._other_updates):
            raise ControlError(
                "scu_prior: zero would shrink the lengths that DoRA trains to 0, and with them the base weights; use "
                "scu_prior: init"
            )
        paired = {index for a, b, _ in pairs for index in (a, b)}
        paired |= {index for update in self._other_updates for index in update.indices}
        self._plain_indices = [i for i in range(len(self.weights)) if i not in paired]
        by_shape = defaultdict(list)
        for a, b, scale in pairs:
            left, right = self.weights[b], self.weights[a]
            by_shape[(left.shape, right.shape, left.dtype, right.dtype, left.device)].append((a, b, scale))
        self._members = list(by_shape.values())
        self._groups = [self._low_rank_group(members) for members in self._members]

    def _low_rank_group(self, members: list[tuple[int, int, float]]) -> LowRankGroup:
        b_prior = [self._start_of_weight(b) for _, b, _ in members]
        return LowRankGroup(
            a_prior=[self._start_of_weight(a) for a, _, _ in members],
            b_prior=b_prior,
            scales=torch.tensor([scale for _, _, scale in members], device=self.weights[members[0][0]].device),
            b_starts_at_zero=self.kind == "zero" or not any(bool(w.any()) for w in b_prior),
        )

    def _move_starts_to_weights(self) -> None:
        """Move w0 to the device of the weights, because DeepSpeed moves a model after this object was created."""
        if not self.starts or self.starts[0].device == self.weights[0].device:
            return
        self.starts = [start.to(weight.device) for start, weight in zip(self.starts, self.weights, strict=True)]
        self._groups = [self._low_rank_group(members) for members in self._members]

    def _start_of_weight(self, index: int) -> torch.Tensor:
        return self.starts[index] if self.starts else torch.zeros((), device=self.weights[index].device)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return w0 by parameter name; empty for the zero prior."""
        return dict(zip(self.names, self.starts, strict=False))

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Replace w0. Raises ControlError if names or shapes differ from the model's trainable weights."""
        if set(state) != set(self.state_dict()):
            missing, extra = set(self.state_dict()) - set(state), set(state) - set(self.state_dict())
            raise ControlError(
                f"the saved prior belongs to other weights: {len(missing)} missing, {len(extra)} unknown, "
                f"for instance {next(iter(missing or extra))}; resume with the model and adapter settings of the run"
            )
        for name, start in zip(self.names, self.starts, strict=False):
            if state[name].shape != start.shape:
                raise ControlError(f"the saved prior of {name} has shape {tuple(state[name].shape)}, not {start.shape}")
            start.copy_(state[name])
        self._groups = [self._low_rank_group(members) for members in self._members]

    def fingerprint(self) -> float:
        """Return the sum of squares of w0, a cheap check that two runs decay toward the same point."""
        return math.fsum(float(square) for w in self.starts for square in exact_squares(w))

    # -- measuring -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def squared_distance(self) -> torch.Tensor:
        """Return ||w - w0||^2 over all trainable weights, a float64 scalar on the CPU (one device synchronization)."""
        return self.squared_distance_with(())[0]

    @torch.no_grad()
    def squared_distance_with(self, others: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Tensors]:
        """Return ``squared_distance`` and ``others`` on the CPU, with a single device synchronization."""
        self._move_starts_to_weights()

        def read() -> tuple[torch.Tensor, Tensors]:
            parts = list(self._distances(self._value))
            found = read_together([*parts, *others])
            return torch.stack(found[: len(parts)]).double().sum(), found[len(parts) :]

        return self._with_retry(read, "measuring S")

    def _with_retry(self, function: Callable[[], Result], doing: str) -> Result:
        """Call ``function``, which only reads what training needs, and call it again if it runs out of memory."""
        return second_try(function, doing, MORE_ROOM_FOR_S)

    def _value(self, index: int) -> torch.Tensor:
        """Return the weight as training keeps it; a copy if that is not the model's own tensor."""
        return self.weights[index]

    def _distances(self, value: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield squared distances that add up to the total. ``value``: returns a weight by its index."""
        for group, members in zip(self._groups, self._members, strict=True):
            yield group.squared_distance([value(a) for a, _, _ in members], [value(b) for _, b, _ in members])
        for update in self._other_updates:
            starts = [self.starts[i] for i in update.indices] if self.starts else None
            yield update.squared_distance([value(i) for i in update.indices], starts)
        yield from self._squared((value(i), self._start_or_none(i)) for i in self._plain_indices)

    def _start_or_none(self, index: int) -> Optional[torch.Tensor]:
        return self.starts[index] if self.starts else None

    @torch.no_grad()
    def measured_gain(self, shrink: float = 0.01) -> Optional[float]:
        """Return -d ln||w - w0||^2 / d(-ln(1 - u)), measured by decaying copies of the weights in their own precision.

        2 if the weights can follow; near 0 if rounding swallows the decay. None while w still equals w0.
        """
        before = float(self.squared_distance())
        if before == 0.0:
            return None

        def decayed(index: int) -> torch.Tensor:
            return _decayed_copy(self._value(index), self._start_of_weight(index), shrink)

        after = self._with_retry(lambda: _total(self._distances(decayed)), "checking whether lambda can act")
        return -math.log(max(after, 1e-300) / before) / -math.log1p(-shrink)

    # -- acting --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decay(self, shrink: float, seed: int = 0) -> None:
        """Set w <- w + shrink * (w0 - w), in place. ``seed``: for the rounding of bfloat16 weights, the same on all
        ranks."""
        exact = [i for i, w in enumerate(self.weights) if w.dtype != torch.bfloat16]
        rounded = [i for i, w in enumerate(self.weights) if w.dtype == torch.bfloat16]
        if exact and self.starts:
            torch._foreach_lerp_([self.weights[i] for i in exact], [self.starts[i] for i in exact], shrink)
        elif exact:
            torch._foreach_mul_([self.weights[i] for i in exact], 1.0 - shrink)
        generators: dict[torch.device, torch.Generator] = {}
        for i in rounded:
            weight = self.weights[i]
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
            self._decay_rounded(weight, self._start_of_weight(i), shrink, generators[weight.device])

    def _decay_rounded(
        self, weight: torch.Tensor, start: torch.Tensor, shrink: float, generator: torch.Generator
    ) -> None:
        """Like ``decay_stochastically``, but a repetition after running out of memory uses the same random numbers."""
        noise = self._with_retry(functools.partial(_rounding_noise, weight, generator), "decaying the weights")
        self._with_retry(functools.partial(_decay_by_noise, weight, start, shrink, noise), "decaying the weights")

    @torch.no_grad()
    def add_penalty_gradient(self, coefficient: float) -> None:
        """Set grad <- grad + coefficient * (w - w0), the gradient of coefficient/2 * ||w - w0||^2, for weights that
        have a gradient."""
        for i, parameter in enumerate(self.weights):
            if parameter.grad is not None:
                distance = self._with_retry(functools.partial(self._offset, i), "adding the penalty's gradient")
                parameter.grad.add_(distance, alpha=coefficient)  # in place, so it never remains half done

    def _offset(self, index: int) -> torch.Tensor:
        return self.weights[index] - self.starts[index] if self.starts else self.weights[index]

    @torch.no_grad()
    def gradient_norms(self) -> tuple[float, float]:
        """Return (norm of the gradients, norm of w - w0) over the weights that have a gradient."""
        moved = [i for i, weight in enumerate(self.weights) if weight.grad is not None]
        if not moved:
            return 0.0, 0.0
        gradients = [(self.weights[i].grad, None) for i in moved]
        distances = [(self.weights[i], self._start_or_none(i)) for i in moved]
        return self._norm(gradients), self._norm(distances)

    def _norm(self, pairs: Sequence[Pair]) -> float:
        return math.sqrt(
            self._with_retry(lambda: _total(self._squared(pairs)), "comparing the penalty with the gradient")
        )


def _total(parts: Iterator[torch.Tensor]) -> float:
    return float(torch.stack(read_together(list(parts))).double().sum())


def param_bpt(squared_distance: float, sigma: float, tokens: float) -> float:
    """Return ||w - w0||^2 / (2 sigma^2 N ln 2), in bits per token."""
    return squared_distance / (2.0 * sigma**2 * tokens * NATS_PER_BIT)


def penalty_coefficient(lam: float, sigma: float, tokens: float) -> float:
    """Return lambda / (sigma^2 N): this times (w - w0) is the gradient of the penalty lambda * ||w - w0||^2 /
    (2 sigma^2 N), in nats per token."""
    return lam / (sigma**2 * tokens)


def decay_stochastically(weight: torch.Tensor, start: torch.Tensor, shrink: float, generator: torch.Generator) -> None:
    """Move ``weight`` (bfloat16) toward ``start``, in expectation by exactly ``shrink``.

    bfloat16 keeps 8 bits of mantissa: w * (1 - u) rounds back to w for u below about 2e-3, so no weight would ever
    move. Rounding up with the probability of the cut-off fraction keeps the mean right (Gupta et al., ICML 2015).
    """
    _decay_by_noise(weight, start, shrink, _rounding_noise(weight, generator))


def _rounding_noise(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << 16, weight.shape, dtype=torch.int32, device=weight.device, generator=generator)


def _decay_by_noise(weight: torch.Tensor, start: torch.Tensor, shrink: float, noise: torch.Tensor) -> None:
    exact = torch.lerp(weight.float(), start.float().expand_as(weight), shrink)
    # bfloat16 is the upper half of float32: noise in the lower half, then cut off, rounds the magnitude up at random.
    weight.copy_(((exact.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32))


def _decayed_copy(weight: torch.Tensor, start: torch.Tensor, shrink: float) -> torch.Tensor:
    copy = weight.clone()
    if copy.dtype == torch.bfloat16:
        decay_stochastically(copy, start, shrink, torch.Generator(copy.device).manual_seed(0))
        return copy
    return copy.lerp_(start.to(copy.dtype).expand_as(copy), shrink)


def _reject_unusable(named: dict[str, nn.Parameter]) -> None:
    for name, parameter in named.items():
        if parameter.dtype == torch.float16:
            raise ControlError(
                f"trainable weight {name} is float16, where small decays round to zero; keep trainable weights in "
                "float32 (adapters: autocast_adapter_dtype=True, the default; full tuning: dtype float32 with fp16: "
                "true)"
            )
        if not parameter.is_floating_point() or parameter.is_meta or parameter.numel() == 0:
            raise ControlError(
                f"trainable weight {name} has no local floating-point values ({parameter.dtype}, {parameter.device}, "
                f"{tuple(parameter.shape)}): sharded (ZeRO-3, FSDP) or offloaded weights cannot be regularized, use "
                "scu: false"
            )
