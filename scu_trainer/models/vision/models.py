"""Image classifiers: made from scratch or loaded, a head for our classes, and the processor that goes with them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError
from scu_trainer.figures import first_few
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.load import classes_of, fields_of_classes, for_evaluation, loading_dtype, read_model
from scu_trainer.models.loading.names import as_model_error, base_of, is_adapter, located
from scu_trainer.models.loading.safety import announce_code, require_safe_weights
from scu_trainer.models.vision.inputs import attach, augmentation, pixel_inputs
from scu_trainer.models.vision.view import View, known_classes, load_config
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.images import ImageSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import BaseImageProcessor, PreTrainedModel

REDUCTION = 32
"""Pixels per side that end up as one place of the last feature map, in each architecture that is made from scratch."""

RESNETS = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3]},
    "resnet101": {"layer_type": "bottleneck", "depths": [3, 4, 23, 3]},
}
"""He et al. 2016, Deep Residual Learning, table 1; what is not named is ResNetConfig's default."""

EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "dropout_rate": 0.2, "hidden_dim": 1280}
"""Tan and Le 2019, EfficientNet; transformers' default is B7."""


def make_classifier(
    settings: ModelSettings, own: ImageSettings, label_names: Sequence[str], view: View
) -> tuple[PreTrainedModel, list[str]]:
    """On the CPU, with ``label_names`` in its config, and lines for a person. Raises ModelError where it cannot be
    loaded, is no image classifier, or does not take images of this size."""
    if settings.model_name_or_path is None:
        model = _from_scratch(own.architecture, label_names, view).to(loading_dtype(settings))
        lines = [f"{own.architecture}, from scratch"]
    else:
        if is_adapter(Path(settings.model_name_or_path).expanduser()):
            _require_classes(settings, label_names)
        model, lines = _loaded(settings, label_names)
        if own.architecture != ImageSettings.architecture:
            lines.append(f"architecture: {own.architecture} is not used: model_name_or_path selects the model")
    _require_takes(model, view, settings.model_name_or_path or own.architecture)
    return model, [*lines, view.line]


def load_scored_classifier(settings: ModelSettings, label_names: Sequence[str], view: View) -> nn.Module:
    """A trained classifier in evaluation mode, with its adapter if it is one. Raises ModelError where its classes are
    not ``label_names``."""
    import torch

    _require_classes(settings, label_names)
    model = for_evaluation(_loaded(settings, label_names)[0], settings.model_name_or_path, settings)
    watch_pixels(model, view.processor)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def watch_pixels(model: nn.Module, processor: BaseImageProcessor, changes: nn.Module | None = None) -> None:
    """Let ``model`` take bytes as its processor makes them; ``changes`` act on them in training."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    attach(inner, pixel_inputs(processor, getattr(inner.config, "num_channels", 3), changes))


def changes_for(own: ImageSettings, view: View) -> nn.Module | None:
    """The random changes of training images. Raises ModelError for colours of gray images."""
    if own.augmentation == "strong" and view.channels == 1:
        raise ModelError("augmentation: strong changes colours, and images are gray; use standard or light")
    return augmentation(own.augmentation, view.size)


def _from_scratch(name: str, label_names: Sequence[str], view: View) -> PreTrainedModel:
    from transformers import (
        EfficientNetConfig,
        EfficientNetForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
    )

    if min(view.size) < REDUCTION:
        raise ModelError(
            f"image_size {min(view.size)} is too small for {name}, which makes one place of {REDUCTION} x {REDUCTION} "
            f"pixels; set image_size to {REDUCTION} or more (images are enlarged), or leave it out"
        )
    shared = {"num_channels": view.channels, **fields_of_classes(label_names)}
    if name in RESNETS:
        return ResNetForImageClassification(ResNetConfig(**RESNETS[name], **shared))
    config = EfficientNetConfig(**EFFICIENTNET_B0, image_size=min(view.size), batch_norm_momentum=0.1, **shared)
    return with_living_signal(EfficientNetForImageClassification(config))


def with_living_signal(model: nn.Module) -> nn.Module:
    """Start normalisations at factor 1 and convolutions by He et al. 2015, as EfficientNet is published.

    transformers draws both from a normal distribution with deviation 0.02, meant for loading weights over it: after
    sixteen blocks 1e-31 is left of the signal, and nothing is learned.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _loaded(settings: ModelSettings, label_names: Sequence[str]) -> tuple[PreTrainedModel, list[str]]:
    from transformers import AutoModelForImageClassification

    path = Path(located(settings.model_name_or_path))
    name = base_of(path)
    config = load_config(settings)
    before = classes_of(config)
    with as_model_error(name, "image classifier", settings.model_revision):
        announce_code(name, settings)
        require_safe_weights(name, settings)
        model, random = read_model(
            AutoModelForImageClassification,
            name,
            config,
            settings,
            loading_dtype(settings),
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=settings.attn_implementation,
            **fields_of_classes(label_names),
        )
    inside = [key for key in random if key.startswith(f"{model.base_model_prefix}.")]
    if inside:
        raise ModelError(
            f"{name!r} lacks weights of {type(model).__name__}: {first_few(inside, 1)}; give the folder or Hub id of a "
            "complete image model"
        )
    _require_labels(model, name)
    head = None if is_adapter(path) else _head_line(bool(random), before, label_names)  # an adapter brings a head
    return model, [f"{name}, {type(model).__name__}", *([] if head is None else [head])]


def _require_labels(model: PreTrainedModel, name: str) -> None:
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{name!r} is a {type(model).__name__}, which only predicts: its forward takes no labels. Give one "
            "that can be trained; where its class ends in WithTeacher, the class without that loads the same weights, "
            "and save_pretrained makes a folder of it"
        )


def _head_line(is_new: bool, before: Sequence[str], label_names: Sequence[str]) -> str | None:
    if is_new and len(before) == len(label_names):
        return f"the head is replaced: a new one for {len(label_names)} classes"
    if is_new:
        return f"the head is replaced: {len(label_names)} classes where the model has {len(before)}"
    if tuple(before) != tuple(label_names):
        return f"the head is kept, for as many classes: {_few(before)} are now {_few(label_names)}"
    return None


def _require_classes(settings: ModelSettings, label_names: Sequence[str]) -> None:
    known = known_classes(settings)
    if known != tuple(label_names):
        raise ModelError(
            f"the classes of {settings.model_name_or_path} ({_few(known)}) are not those of the data "
            f"({_few(label_names)}), in this order; give the data that it was trained for"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", ... {len(names)} in all" if len(names) > 3 else "")


def _require_takes(model: PreTrainedModel, view: View, name: str) -> None:
    """One black image, to hear early what the model thinks of its size."""
    import torch

    try:
        with evaluating(model):
            model(pixel_values=torch.zeros(1, view.channels, *view.size, dtype=model.dtype))
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{name} does not take images of {view.size[1]} x {view.size[0]} pixels and {view.channels} channels "
            f"({error}); set image_size to what it was made for"
        ) from error
