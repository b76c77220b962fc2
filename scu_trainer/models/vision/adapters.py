"""Image classifiers with LoRA: which layers are adapted, and classes that are saved with the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn


class AdaptedClassifier(PeftModel):
    """Saves the configuration, with its classes, beside the adapter: the base alone has another head.

    config = AutoConfig.from_pretrained(run)
    base = AutoModelForImageClassification.from_pretrained(BASE, config=config, ignore_mismatched_sizes=True)
    model = PeftModel.from_pretrained(base, run)
    """

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *args, **options)
        if options.get("is_main_process", True):
            self.get_base_model().config.save_pretrained(save_directory)


def keep_classes(model: nn.Module) -> None:
    """Let an adapter that is saved know its classes. A model without adapters knows them."""
    if type(model) is PeftModel:
        model.__class__ = AdaptedClassifier


def trained_whole(model: nn.Module, heads: Sequence[str]) -> list[str] | None:
    """What LoRA trains and saves as it is: the head, which may be new, and BatchNorm, whose running statistics change
    in training and would be missing in a saved adapter."""
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return [*heads, *norms] or None


def inner_targets(model: nn.Module, heads: Sequence[str]) -> list[str] | None:
    """Full names of the linear layers outside of ``heads``, for LoRA; of the convolutions where there are none."""

    def inside(kind: type) -> list[str]:
        found = (name for name, module in model.named_modules() if isinstance(module, kind))
        return [name for name in found if name.split(".")[0] not in heads]

    convolutions = (name for name in inside(nn.Conv2d) if model.get_submodule(name).groups == 1)
    return inside(nn.Linear) or [*convolutions] or None
