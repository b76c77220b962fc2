"""Adapters on a model whose weights accelerate fetches layer by layer: where they lie, how they are read back.

An offloaded weight is a tensor without memory (device "meta") but while its layer runs. peft puts a new adapter beside
the weight that it adapts, and so drops what it has just drawn; it reads saved adapters by dispatching the whole model
again, which fails on models that are on disk. Both are mended here.
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
    """Where inputs go: the device that computes the first layer. Its weights may lie elsewhere."""
    import torch

    weight = next(model.parameters())
    if not weight.is_meta:
        return weight.device
    return torch.device(next(module._hf_hook.execution_device for _, module, _ in _offloaded(model)))


def _offloaded(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(name of the weight in its module, module, weight) of each weight that lies elsewhere."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                yield name, module, weight


@contextlib.contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, each offloaded weight shows its shape on the device that computes it, without memory of its own.

    Adapters that are made inside lie on that device and hold the numbers that they would without offloading.
    """
    import torch
    from torch import nn

    away = list(_offloaded(model))
    for name, module, weight in away:
        shape = torch.zeros((), dtype=weight.dtype, device=module._hf_hook.execution_device).expand(weight.shape)
        module._parameters[name] = nn.Parameter(shape, requires_grad=False)
    try:
        yield
    finally:
        for name, module, weight in away:
            module._parameters[name] = weight.requires_grad_(False)


def adapt(model: nn.Module, config: Any) -> nn.Module:
    """``peft.get_peft_model``, for a model with or without offloaded weights."""
    from peft import get_peft_model

    with stand_ins(model):
        adapted = get_peft_model(model, config)
    if has_offloaded_weights(adapted):
        # The Trainer reads checkpoints through this method, when it resumes and for load_best_model_at_end.
        adapted.load_adapter = functools.partial(load_adapter, adapted)
    return adapted


def adapt_as_saved(model: nn.Module, folder: Path) -> nn.Module:
    """The adapter in ``folder``, to be trained on. Raises ModelError if it lacks weights."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    adapted = adapt(model, config)
    load_adapter(adapted, folder)
    return adapted


def load_adapter(
    model: nn.Module, model_id: Union[str, Path], adapter_name: str = "default", is_trainable: bool = True
) -> Any:
    """Read weights saved in the folder ``model_id`` into an adapter that the model has; nothing else is touched.

    ``is_trainable``: as ``PeftModel.load_adapter`` has it; the adapter stays as it is. Raises ModelError if weights are
    missing.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    loaded = set_peft_model_state_dict(model, load_peft_weights(str(model_id), device="cpu"), adapter_name)
    missing = [name for name in loaded.missing_keys if f".{adapter_name}" in name]
    if missing:
        raise ModelError(
            f"the adapter {model_id} lacks {len(missing)} weights of this model's, for instance {missing[0]}; give the "
            "folder of an adapter of the same shape"
        )
    return loaded
