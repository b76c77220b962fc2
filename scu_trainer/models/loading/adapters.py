"""Which layers of a model LoRA can act on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import ModelError, nearest

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("scu_trainer")


def adapter_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers that LoRA can act on: all of them, as peft's ``all-linear``, but for the output head
    and for projections whose weight is handed to a fused kernel instead of being called (an adapter there would train
    on a CPU and do nothing on a GPU)."""
    bypassed = set(bypassed_projections(model))
    head = _output_head_name(model)
    usable = [name for name in _linear_names(model) if name not in bypassed and name != head]
    if not usable:
        raise ModelError(f"{type(model).__name__} has no linear layers for LoRA; use tuning: full")
    excluded_leaves = {_leaf(name) for name in bypassed | {head or ""}}
    # Short names where they are unambiguous: adapter_config.json stays readable.
    return sorted({name if _leaf(name) in excluded_leaves else _leaf(name) for name in usable})


def bypassed_projections(model: nn.Module) -> Iterator[str]:
    """Full names of mamba projections whose weights the fused kernels take as arguments: the output projection, and in
    the first mamba those of the state. peft refuses LoRA on the former for the families it knows, and Granite's hybrid
    is not yet among them."""
    for name, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "conv1d"):
            yield from (f"{name}.{leaf}" for leaf in ("out_proj", "x_proj", "dt_proj") if hasattr(module, leaf))


def _linear_names(model: nn.Module) -> list[str]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _output_head_name(model: nn.Module) -> Optional[str]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def checked_targets(model: nn.Module, wanted: Optional[Iterable[str]]) -> Optional[list[str]]:
    """``wanted`` if the model has them all, None if nothing is wanted. Raises ModelError with the nearest name."""
    if not wanted:
        return None
    if list(wanted) == ["all-linear"]:
        return adapter_targets(model)
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            leaves = sorted({_leaf(name) for name in _linear_names(model)})
            raise ModelError(
                f"lora_target_modules: the model has no module {target!r}; its linear layers: {', '.join(leaves)}"
                f"{nearest(target, leaves)}"
            )
    ineffective = [n for n in bypassed_projections(model) if any(n == t or n.endswith(f".{t}") for t in wanted)]
    if ineffective:
        logger.warning(
            "lora_target_modules names %d mamba projections (for instance %s): the fused GPU kernels read that weight "
            "directly and ignore adapters on it",
            len(ineffective),
            ineffective[0],
        )
    return list(wanted)
