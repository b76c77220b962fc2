"""LoRA for image classifiers: the layers to adapt, and adapters that are saved with their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn


class AdaptedClassifier(PeftModel):
    """Saves the configuration with the classes next to the adapter, because the base model has another head.

    To load it::

    config = AutoConfig.from_pretrained(run)
    base = AutoModelForImageClassification.from_pretrained(BASE, config=config, ignore_mismatched_sizes=True)
    model = PeftModel.from_pretrained(base, run)
    """

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *args, **options)
        if options.get("is_main_process", True):
            self.get_base_model().config.save_pretrained(save_directory)


def save_classes_with_adapter(model: nn.Module) -> None:
    """Make ``model`` save its classes with the adapter; a model without an adapter already does."""
    if type(model) is PeftModel:
        model.__class__ = AdaptedClassifier


def fully_trained_modules(model: nn.Module, heads: Sequence[str]) -> list[str] | None:
    """Return the modules that are trained and saved in full next to LoRA, or None: the head, which may be new, and
    BatchNorm, whose running statistics change in training and would be missing from a saved adapter."""
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return [*heads, *norms] or None


def inner_targets(model: nn.Module, heads: Sequence[str]) -> list[str] | None:
    """Return the full names of linear layers outside of ``heads``, or else of convolutions with one group, for LoRA."""

    def names_of(kind: type) -> list[str]:
        found = (name for name, module in model.named_modules() if isinstance(module, kind))
        return [name for name in found if name.split(".")[0] not in heads]

    convolutions = (name for name in names_of(nn.Conv2d) if model.get_submodule(name).groups == 1)
    return names_of(nn.Linear) or [*convolutions] or None
