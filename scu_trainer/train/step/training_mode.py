"""``model.train()``, with which every stock step begins, walks through all modules: as long as a tenth of a small step,
and with adapters longer. Here it is left out where it would change nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

STOCK = (nn.Module.train, PreTrainedModel.train)


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
    return all(map(_has_stock_train, set(map(type, modules)))) and not any("train" in vars(m) for m in modules)


@functools.cache
def _has_stock_train(kind: type[nn.Module]) -> bool:
    return kind.train in STOCK
