"""Add and load adapters on a model with offloaded weights, which accelerate fetches layer by layer.

An offloaded weight is on the meta device except while its layer runs. peft creates a new adapter on the device of the
weight that it adapts, and so loses the values that it has just drawn. It loads saved adapters by dispatching the whole
model again, which fails for models on disk. This module works around both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn


def has_offloaded_weights(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def input_device(model: nn.Module) -> torch.device:
    """Return the device for inputs: the one that computes the first layer, although its weights may be offloaded."""
    import torch

    weight = next(model.parameters())
    if not weight.is_meta:
        return weight.device
    return torch.device(next(module._hf_hook.execution_device for _, module, _ in _offloaded_weights(model)))


def _offloaded_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield (name of the weight in its module, module, weight) of each offloaded weight."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                yield name, module, weight


@contextlib.contextmanager
def placeholders_for_offloaded(model: nn.Module) -> Iterator[None]:
    """Replace each offloaded weight by a tensor of its shape on the device that computes it, which takes no memory.
    Adapters that are created inside this context are on that device, with the same values as without offloading."""
    import torch
    from torch import nn

    offloaded = list(_offloaded_weights(model))
    for name, module, weight in offloaded:
        shape = torch.zeros((), dtype=weight.dtype, device=module._hf_hook.execution_device).expand(weight.shape)
        module._parameters[name] = nn.Parameter(shape, requires_grad=False)
    try:
        yield
    finally:
        for name, module, weight in offloaded:
            module._parameters[name] = weight.requires_grad_(False)


def adapt(model: nn.Module, config: Any) -> nn.Module:
    """Like ``peft.get_peft_model``, for a model with or without offloaded weights."""
    from peft import get_peft_model

    with placeholders_for_offloaded(model):
        adapted = get_peft_model(model, config)
    if has_offloaded_weights(adapted):
        # The Trainer loads checkpoints with this method, when it resumes and for load_best_model_at_end.
        adapted.load_adapter = functools.partial(load_adapter, adapted)
    return adapted


def adapt_as_saved(model: nn.Module, folder: Path) -> nn.Module:
    """Add the adapter saved in ``folder`` to ``model``, trainable. Raises ModelError if it lacks weights."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    adapted = adapt(model, config)
    load_adapter(adapted, folder)
    return adapted


def load_adapter(
    model: nn.Module, model_id: Union[str, Path], adapter_name: str = "default", is_trainable: bool = True
) -> Any:
    """Load the weights in the folder ``model_id`` into an existing adapter and change nothing else; ``is_trainable``,
    of ``PeftModel.load_adapter``, has no effect. Raises ModelError if weights are missing."""
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    loaded = set_peft_model_state_dict(model, load_peft_weights(str(model_id), device="cpu"), adapter_name)
    missing = [name for name in loaded.missing_keys if f".{adapter_name}" in name]
    if missing:
        raise ModelError(
            f"the adapter {model_id} lacks {len(missing)} weights that this model's adapter has, for instance "
            f"{missing[0]}; give the folder of an adapter of the same shape"
        )
    return loaded
