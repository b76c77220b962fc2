"""A trained update, scaled: the weights W0 + s (W - W0) between a base (s = 0) and what was tuned from it (s = 1).

Known as WiSE-FT (Wortsman et al. 2022, https://arxiv.org/abs/2109.01903). An adapter's update is scaled where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.adapters import active_configs, takes_from_base

Moved = tuple[torch.Tensor, Callable[[float], torch.Tensor]]
"""A weight, and its value by the share of the update."""

SCALED = ("LORA", "ADALORA", "VERA")
"""Kinds of peft's adapters that begin at 0 and are a product, of which one factor can be scaled."""

REFUSED = {
    "lora_magnitude_vector": "DoRA, whose update is not a product that can be scaled",
    "trainable_tokens_delta": "rows of new tokens, which the base does not have",
}


class ScaledUpdate:
    """The weights of ``model`` at any share of its update. ``base``: what it was tuned from, in memory as well; None:
    ``model`` is an adapter of peft, which brings its base.

    Raises ModelError for what cannot be scaled: DoRA, rows of new tokens, trained biases, adapters that do not begin at
    0 (PiSSA, OLoRA), other kinds of adapters, a base of other shapes.
    """

    def __init__(self, model: nn.Module, base: nn.Module | None = None) -> None:
        self.model = model
        self._moved = list(_of_adapter(model)) if base is None else list(_of_weights(model, base))
        if not self._moved:
            raise ModelError(f"{type(model).__name__} has no update that could be scaled; give an adapter, or its base")

    @property
    def size_bytes(self) -> int:
        """Of the weights that a share changes."""
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
        """``model`` with that share of its update, as ``save_pretrained`` writes it."""
        with self.at(share):
            self.model.save_pretrained(folder, **options)


def _of_adapter(model: nn.Module) -> Iterator[Moved]:
    """Each factor B of LoRA, b of VeRA, and module that was trained whole beside them."""
    for name, _ in model.named_parameters():
        part = next((part for part in REFUSED if f".{part}." in f".{name}."), None)
        if part is not None:
            raise ModelError(f"{name} is of {REFUSED[part]}; merge the adapter, and give the merged model with --base")
    for config in active_configs(model):
        _require_scalable(config)
    for module in model.modules():
        for side in ("lora_B", "lora_embedding_B", "vera_lambda_b"):
            for held in dict(getattr(module, side, {})).values():
                for weight in held.parameters() if isinstance(held, nn.Module) else [held]:  # of lora_bias as well
                    yield _toward(weight, None)
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            start = dict(module.original_module.named_parameters())
            for saved in module.modules_to_save.values():
                yield from (_toward(weight, start[name]) for name, weight in saved.named_parameters())


def _require_scalable(config: Any) -> None:
    """``config``: of an adapter."""
    if getattr(config, "bias", "none") != "none":
        raise ModelError(f"biases were trained (bias: {config.bias}), and adapters keep no biases of the base")
    kind, why = getattr(config, "peft_type", SCALED[0]), None
    if kind not in SCALED:
        why = f"is of peft_type {getattr(kind, 'value', kind)}, whose update is not a product that can be scaled"
    elif takes_from_base(config):
        why = f"has init_lora_weights: {config.init_lora_weights}, which takes what it begins with out of the base"
    if why is not None:
        raise ModelError(f"the adapter {why}; merge it, and give the merged model with --base")


def _of_weights(model: nn.Module, base: nn.Module) -> Iterator[Moved]:
    start, trained = dict(base.named_parameters()), dict(model.named_parameters())
    for name, weight in trained.items():
        if name not in start or start[name].shape != weight.shape:
            found = "lacks it" if name not in start else f"has {tuple(start[name].shape)}"
            raise ModelError(
                f"{name} has shape {tuple(weight.shape)} and the base {found}; it is not the base of this model"
            )
        is_offloaded = weight.is_meta  # only frozen weights are
        if not is_offloaded and not torch.equal(weight.to(start[name].device), start[name]):
            yield _toward(weight, start[name])


def _toward(weight: torch.Tensor, start: torch.Tensor | None) -> Moved:
    """``weight`` at a share of its distance from ``start`` (None: from 0), computed in float32."""
    trained = weight.detach().clone()
    begin = torch.zeros((), device=weight.device) if start is None else start.detach().to(weight.device)

    def at(share: float) -> torch.Tensor:
        return trained if share == 1.0 else begin.float() + share * (trained.float() - begin.float())

    return weight, at
