"""Skips work that every stock step repeats although nothing has changed, if skipping it changes nothing.

``model.train()`` walks through all modules, which takes up to a tenth of a small step, and more with adapters. The
stock loop checks twice whether LOMO is installed, each time searching all of ``sys.path``, and three times whether this
is SageMaker. LoRA in peft casts to float32 what autocast casts to half precision again: these copies took a fifth of a
step on an H100.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import optimizer as of_accelerate
from torch import nn
from transformers import PreTrainedModel
from transformers import trainer as of_transformers

from scu_trainer.train.step.recovery.snapshot import replaced

STOCK = (nn.Module.train, PreTrainedModel.train)

ASKED = ((of_accelerate, "is_lomo_available"), (of_transformers, "is_sagemaker_mp_enabled"))


@contextlib.contextmanager
def availability_checks_cached() -> Iterator[None]:
    """Inside, each function in ASKED is called only once."""
    with contextlib.ExitStack() as stack:
        for module, name in ASKED:
            if name in vars(module):  # other versions may not have it
                stack.enter_context(replaced(module, name, functools.cache(vars(module)[name])))
        yield


@contextlib.contextmanager
def redundant_casts_skipped() -> Iterator[None]:
    """Inside, LoRA layers do not cast inputs that already have the autocast type, as in the 4-bit layers of peft.

    They still cast before dropout (which would draw other values), for DoRA and similar variants (which use the inputs
    in other ways), and if several adapters are active at once (their gradients add up in float32).
    """
    linear = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    if linear is None or "_cast_input_dtype" in vars(linear):  # no adapters, or already inside of this context
        yield
        return
    stock = linear._cast_input_dtype

    def cast(layer: Any, x: Any, dtype: torch.dtype) -> Any:
        return x if torch.is_tensor(x) and _has_autocast_type(x) and _is_plain_lora(layer) else stock(layer, x, dtype)

    linear._cast_input_dtype = cast
    try:
        yield
    finally:
        del linear._cast_input_dtype


def _has_autocast_type(x: torch.Tensor) -> bool:
    device = x.device.type
    return torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)


def _is_plain_lora(layer: Any) -> bool:
    dropouts = [layer.lora_dropout[name] for name in layer.active_adapters if name in layer.lora_dropout]
    return not layer.lora_variant and len(dropouts) < 2 and all(type(dropout) is nn.Identity for dropout in dropouts)


@contextlib.contextmanager
def redundant_train_call_skipped(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the first ``model.train()`` returns at once if all of ``modules`` (those of ``model``) are in training
    mode by then and none overrides ``train``. Later calls, other modes, and calls with empty ``modules`` are
    unchanged."""
    if not modules or "train" in vars(model):
        yield
        return

    def train(mode: bool = True) -> nn.Module:
        vars(model).pop("train")
        return model if mode is True and _would_change_nothing(modules) else model.train(mode)

    vars(model)["train"] = train
    try:
        yield
    finally:
        if vars(model).get("train") is train:
            del vars(model)["train"]


def _would_change_nothing(modules: Sequence[nn.Module]) -> bool:
    if not all(module.training for module in modules):
        return False
    is_stock = all(kind.train in STOCK for kind in set(map(type, modules)))
    return is_stock and not any("train" in vars(module) for module in modules)
