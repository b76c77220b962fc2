"""Scale the update of a training: the weights W0 + s (W - W0) between a base (s = 0) and the tuned model (s = 1).

Known as WiSE-FT (Wortsman et al. 2022, https://arxiv.org/abs/2109.01903). The update of an adapter is scaled in the
adapter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.adapters import active_configs, changes_base_weights

Moved = tuple[torch.Tensor, Callable[[float], torch.Tensor]]
"""A weight, and a function that returns its value for a share of the update."""

SCALED = ("LORA", "ADALORA", "VERA")
"""peft types of adapters that start at 0 and are a product, so scaling one factor scales the update."""

REFUSED = {
    "lora_magnitude_vector": "DoRA, whose update is not a product that can be scaled",
    "trainable_tokens_delta": "rows of new tokens, which the base does not have",
}


class ScaledUpdate:
    """Sets the weights of ``model`` to any share of its update.

    ``base`` is the loaded model that it was tuned from; None if ``model`` is a peft adapter, which includes its base.
    Raises ModelError for what cannot be scaled: DoRA, rows of new tokens, trained biases, adapters that do not start at
    0 (PiSSA, OLoRA), other types of adapters, and a base with other shapes.
    """

    def __init__(self, model: nn.Module, base: nn.Module | None = None) -> None:
        self.model = model
        self._moved = list(_moved_by_adapter(model)) if base is None else list(_moved_weights(model, base))
        if not self._moved:
            raise ModelError(f"{type(model).__name__} has no update that could be scaled; give an adapter, or its base")

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights that are scaled."""
        return sum(weight.nbytes for weight, _ in self._moved)

    @torch.no_grad()
    def set(self, share: float) -> None:
        for weight, at in self._moved:
            weight.data.copy_(at(share))

    @contextmanager
    def at(self, share: float) -> Iterator[nn.Module]:
        self.set(share)
        try:
            yield self.model
        finally:
            self.set(1.0)

    def save(self, share: float, folder: Path, **options: Any) -> None:
        """Save ``model`` with that share of its update by ``save_pretrained``, which gets ``options``."""
        with self.at(share):
            self.model.save_pretrained(folder, **options)


def _moved_by_adapter(model: nn.Module) -> Iterator[Moved]:
    """Yield each factor B of LoRA and b of VeRA, and the weights of modules that were trained in full next to them."""
    for name, _ in model.named_parameters():
        part = next((part for part in REFUSED if f".{part}." in f".{name}."), None)
        if part is not None:
            raise ModelError(f"{name} is of {REFUSED[part]}; merge the adapter, and give the merged model with --base")
    for config in active_configs(model):
        _require_scalable(config)
    for module in model.modules():
        for side in ("lora_B", "lora_embedding_B", "vera_lambda_b"):
            for factor in dict(getattr(module, side, {})).values():
                # A module also has the bias of lora_bias.
                for weight in factor.parameters() if isinstance(factor, nn.Module) else [factor]:
                    yield _moved_from(weight, None)
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            start = dict(module.original_module.named_parameters())
            for saved in module.modules_to_save.values():
                yield from (_moved_from(weight, start[name]) for name, weight in saved.named_parameters())


def _require_scalable(config: Any) -> None:
    if getattr(config, "bias", "none") != "none":
        raise ModelError(f"biases were trained (bias: {config.bias}), but adapters keep no biases of the base")
    kind, why = getattr(config, "peft_type", SCALED[0]), None
    if kind not in SCALED:
        why = f"is of peft_type {getattr(kind, 'value', kind)}, whose update is not a product that can be scaled"
    elif changes_base_weights(config):
        why = f"has init_lora_weights: {config.init_lora_weights}, which subtracts its initial value from the base"
    if why is not None:
        raise ModelError(f"the adapter {why}; merge it, and give the merged model with --base")


def _moved_weights(model: nn.Module, base: nn.Module) -> Iterator[Moved]:
    start, trained = dict(base.named_parameters()), dict(model.named_parameters())
    for name, weight in trained.items():
        if name not in start or start[name].shape != weight.shape:
            found = "lacks it" if name not in start else f"has {tuple(start[name].shape)}"
            raise ModelError(
                f"{name} has shape {tuple(weight.shape)} and the base {found}; it is not the base of this model"
            )
        is_offloaded = weight.is_meta  # only frozen weights are offloaded, so there is no update to scale
        if not is_offloaded and not torch.equal(weight.to(start[name].device), start[name]):
            yield _moved_from(weight, start[name])


def _moved_from(weight: torch.Tensor, start: torch.Tensor | None) -> Moved:
    """Return ``weight`` and its value at a share of its distance from ``start`` (None: from 0), computed in float32."""
    trained = weight.detach().clone()
    begin = torch.zeros((), device=weight.device) if start is None else start.detach().to(weight.device)

    def at(share: float) -> torch.Tensor:
        return trained if share == 1.0 else begin.float() + share * (trained.float() - begin.float())

    return weight, at
