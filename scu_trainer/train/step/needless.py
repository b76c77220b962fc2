"""What every stock step does although nothing has changed since the last one, left out where it would change nothing.

``model.train()`` walks through all modules: as long as a tenth of a small step, and with adapters longer. Whether LOMO
is installed is asked twice, each time by a search through all of ``sys.path``; whether this is SageMaker, three times.
LoRA of peft makes float32 of what autocast makes half precision of again: copies were a fifth of a step on an H100.
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
def asked_once() -> Iterator[None]:
    """Inside, the questions in ASKED have one answer."""
    with contextlib.ExitStack() as stack:
        for module, name in ASKED:
            if name in vars(module):  # other versions may not ask
                stack.enter_context(replaced(module, name, functools.cache(vars(module)[name])))
        yield


@contextlib.contextmanager
def casts_left_out() -> Iterator[None]:
    """Inside, inputs of LoRA layers that are in the type of autocast stay in it, as in peft's own layers of 4 bits. Not
    in front of dropout, which would draw others, nor for DoRA and its like, which do more with them, nor where several
    adapters act at once, whose gradients add up in float32."""
    linear = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    if linear is None or "_cast_input_dtype" in vars(linear):  # no adapters, or left out already
        yield
        return
    stock = linear._cast_input_dtype

    def cast(layer: Any, x: Any, dtype: torch.dtype) -> Any:
        return x if torch.is_tensor(x) and _is_cast_anyway(x) and _is_plain(layer) else stock(layer, x, dtype)

    linear._cast_input_dtype = cast
    try:
        yield
    finally:
        del linear._cast_input_dtype


def _is_cast_anyway(x: torch.Tensor) -> bool:
    device = x.device.type
    return torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)


def _is_plain(layer: Any) -> bool:
    dropouts = [layer.lora_dropout[name] for name in layer.active_adapters if name in layer.lora_dropout]
    return not layer.lora_variant and len(dropouts) < 2 and all(type(dropout) is nn.Identity for dropout in dropouts)


@contextlib.contextmanager
def needless_train_left_out(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the first ``model.train()`` returns at once if by then all of ``modules``, which are those of ``model``,
    are in training mode, and none has a ``train`` of its own. Later calls, other modes, and calls without ``modules``
    are unchanged."""
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
