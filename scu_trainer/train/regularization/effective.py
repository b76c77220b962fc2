"""Measure how far effective weights have moved, for adapters with an update that is not just scale * B A.

DoRA computes with m * (W + scale B A) / ||W + scale B A||, with a length for each row of the weight (Liu et al. 2024);
VeRA with diag(b) B diag(d) A, where b and d are trained (Kopiczko et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import torch
from torch import nn

from scu_trainer.errors import ControlError

Values = Sequence[torch.Tensor]

VARIANTS_OF_ONE_UPDATE = ("ALoraLinearVariant", "VeloraLinearVariant")
"""Variants in peft that change how, or for which tokens, scale * B A is computed, but not the update itself."""


class DoraUpdate:
    """Update of a DoRA layer. Parameters in the order of ``indices``: A (r, inputs), B (outputs, r), m (outputs,)."""

    def __init__(self, layer: nn.Module, scale: float, indices: Sequence[int]) -> None:
        self._layer, self._scale, self.indices = layer, scale, tuple(indices)

    def squared_distance(self, values: Values, starts: Optional[Values]) -> torch.Tensor:
        """Return ||W' - W'0||^2 of the effective weight in float32; with ``starts`` None, W'0 is the base weight."""
        weight = self._base_weight()
        now = self._effective_weight(weight, *values)
        return (now - (weight if starts is None else self._effective_weight(weight, *starts))).square().sum()

    def _base_weight(self) -> torch.Tensor:
        """Return the base weight, (outputs, inputs) in float32."""
        from peft.utils.integrations import dequantize_module_weight

        base = self._layer.get_base_layer()
        if base.weight.is_meta:
            raise ControlError(
                "DoRA's effective update needs the base weights, but device_map placed them on another device; set "
                "scu_measure: factors, or drop device_map"
            )
        weight = dequantize_module_weight(base).float()
        return weight.T if getattr(self._layer, "fan_in_fan_out", False) else weight

    def _effective_weight(
        self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor
    ) -> torch.Tensor:
        moved = weight + self._scale * (b.float() @ a.float())
        return moved * (magnitude.float() / torch.linalg.norm(moved, dim=1))[:, None]


class VeraUpdate:
    """Update of a VeRA layer. Parameters in the order of ``indices``: b (outputs,), d (r,)."""

    def __init__(self, layer: nn.Module, adapter: str, indices: Sequence[int]) -> None:
        self._layer, self._adapter, self.indices = layer, adapter, tuple(indices)

    def squared_distance(self, values: Values, starts: Optional[Values]) -> torch.Tensor:
        """Return ||diag(b) B diag(d) A - diag(b0) B diag(d0) A0||^2 in float32; needs r x r products only."""
        left, right = self._factors(*values)
        if starts is not None and bool(starts[0].any()):
            left_start, right_start = self._factors(*starts)
            # as for LoRA: avoids the difference of large, nearly equal norms
            left, right = torch.cat([left - left_start, left_start], 1), torch.cat([right, right - right_start], 0)
        return ((left.T @ left) * (right @ right.T)).sum()

    def _factors(self, b: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, rank = self._layer, len(d)
        shared_a = layer.vera_A[self._adapter][:rank, : layer.in_features].to(d.device).float()
        shared_b = layer.vera_B[self._adapter][: layer.out_features, :rank].to(d.device).float()
        return b.float()[:, None] * shared_b, d.float()[:, None] * shared_a


def low_rank_pairs(model: nn.Module, position: Mapping[int, int]) -> Iterator[tuple[int, int, float]]:
    """Yield (index of A, index of B, scale) of every trainable LoRA pair in linear, convolutional and embedding layers.
    DoRA's are in ``other_updates``. Raises ControlError for kinds of LoRA with another update."""
    for module, adapter, scale, a, b in _lora_layers(model):
        trained = [weight for weight in (a, b) if id(weight) in position]
        if not trained or _magnitude(module, adapter) is not None:
            continue
        other = "LoRA with A or B frozen" if len(trained) == 1 else _unsupported_kind(module, adapter)
        if other is not None:
            raise ControlError(
                f"the effective update is measured for LoRA, DoRA and VeRA, and not for {other}; set scu_measure: "
                "factors"
            )
        yield position[id(a)], position[id(b)], scale


def other_updates(model: nn.Module, position: Mapping[int, int]) -> Iterator[DoraUpdate | VeraUpdate]:
    """Yield the updates of DoRA on linear layers and of VeRA. Raises ControlError for DoRA on other layers."""
    for module, adapter, scale, a, b in _lora_layers(model):
        magnitude = _magnitude(module, adapter)
        if magnitude is None or id(a) not in position:
            continue
        if a.dim() != 2 or not _is_plain_linear(module):
            raise ControlError(
                f"the effective update of DoRA is measured on linear layers, not on {type(module).__name__}; set "
                "scu_measure: factors, or use_dora: false"
            )
        yield DoraUpdate(module, scale, [position[id(weight)] for weight in (a, b, magnitude)])
    for module in model.modules():
        for adapter, b in dict(getattr(module, "vera_lambda_b", {})).items():
            d = module.vera_lambda_d[adapter]
            if id(b) in position and id(d) in position:
                yield VeraUpdate(module, adapter, [position[id(b)], position[id(d)]])


def _lora_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, float, nn.Parameter, nn.Parameter]]:
    """Yield (module, adapter name, scale, A, B) of every LoRA adapter in the model."""
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if not isinstance(scaling, dict):
            continue
        for adapter, scale in scaling.items():
            a, b = _pair(module, adapter)
            if a is not None:
                yield module, adapter, float(scale), a, b


def _pair(module: nn.Module, adapter: str) -> tuple[Optional[nn.Parameter], Optional[nn.Parameter]]:
    for a_name, b_name in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        a_side, b_side = getattr(module, a_name, {}), getattr(module, b_name, {})
        if adapter in a_side and adapter in b_side:
            a, b = a_side[adapter], b_side[adapter]
            return getattr(a, "weight", a), getattr(b, "weight", b)
    return None, None


def _unsupported_kind(module: nn.Module, adapter: str) -> Optional[str]:
    """Return peft's name for a LoRA layer that computes something else than scale * B A; None if it does not."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    if variant is not None and type(variant).__name__ not in VARIANTS_OF_ONE_UPDATE:
        return type(variant).__name__
    if hasattr(module, "lora_E"):
        return "AdaLoRA"
    return f"target_parameters of {module.num_experts} experts" if getattr(module, "num_experts", 1) > 1 else None


def _magnitude(module: nn.Module, adapter: str) -> Optional[nn.Parameter]:
    found = getattr(module, "lora_magnitude_vector", {})
    return found[adapter].weight if adapter in found else None


def _is_plain_linear(module: nn.Module) -> bool:
    from scu_trainer.models.quantize import stored_bits

    base = module.get_base_layer()
    return stored_bits(base) is not None or (not isinstance(base, nn.Embedding) and base.weight.dim() == 2)
