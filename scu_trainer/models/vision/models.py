"""Create or load image classifiers, with a head for the classes of the data and the matching image processor."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError
from scu_trainer.figures import first_few
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.dispatch import loading_dtype
from scu_trainer.models.loading.load import class_fields, classes_of, prepare_for_evaluation, read_model
from scu_trainer.models.loading.names import as_model_error, base_of, expanded_name, is_adapter
from scu_trainer.models.loading.safety import require_safe_weights, warn_about_code
from scu_trainer.models.vision.inputs import attach, augmentation, pixel_inputs
from scu_trainer.models.vision.view import ImageView, known_classes, load_config
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.images import ImageSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import BaseImageProcessor, PreTrainedModel

REDUCTION = 32
"""Downsampling of the last feature map relative to the image, in each architecture that is trained from scratch."""

RESNETS = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3]},
    "resnet101": {"layer_type": "bottleneck", "depths": [3, 4, 23, 3]},
}
"""He et al. 2016, Deep Residual Learning, table 1; other fields have the defaults of ResNetConfig."""

EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "dropout_rate": 0.2, "hidden_dim": 1280}
"""Tan and Le 2019, EfficientNet; the defaults of transformers are those of B7."""


def make_classifier(
    settings: ModelSettings, own: ImageSettings, label_names: Sequence[str], view: ImageView
) -> tuple[PreTrainedModel, list[str]]:
    """Create or load a classifier of ``label_names`` on the CPU; return it with lines that describe it for the log.
    Raises ModelError if it cannot be loaded, is not an image classifier, or does not take images of this size."""
    if settings.model_name_or_path is None:
        model = _from_scratch(own.architecture, label_names, view).to(loading_dtype(settings))
        lines = [f"{own.architecture}, from scratch"]
    else:
        if is_adapter(Path(settings.model_name_or_path).expanduser()):
            _require_classes(settings, label_names)
        model, lines = _loaded(settings, label_names)
        if own.architecture != ImageSettings.architecture:
            lines.append(f"architecture: {own.architecture} is not used: model_name_or_path selects the model")
    _require_image_size(model, view, settings.model_name_or_path or own.architecture)
    return model, [*lines, view.line]


def load_scored_classifier(settings: ModelSettings, label_names: Sequence[str], view: ImageView) -> nn.Module:
    """Load a classifier or adapter in evaluation mode. Raises ModelError if its classes are not ``label_names``."""
    import torch

    _require_classes(settings, label_names)
    model = prepare_for_evaluation(_loaded(settings, label_names)[0], settings.model_name_or_path, settings)
    attach_pixel_inputs(model, view.processor)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def attach_pixel_inputs(model: nn.Module, processor: BaseImageProcessor, changes: nn.Module | None = None) -> None:
    """Make ``model`` take uint8 images and process them like ``processor``; ``changes`` augment them in training."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    attach(inner, pixel_inputs(processor, getattr(inner.config, "num_channels", 3), changes))


def training_augmentation(own: ImageSettings, view: ImageView) -> nn.Module | None:
    """Return the augmentation of training images. Raises ModelError for color changes of gray images."""
    if own.augmentation == "strong" and view.channels == 1:
        raise ModelError("augmentation: strong changes colours, but the images are gray; use standard or light")
    return augmentation(own.augmentation, view.size)


def _from_scratch(name: str, label_names: Sequence[str], view: ImageView) -> PreTrainedModel:
    from transformers import (
        EfficientNetConfig,
        EfficientNetForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
    )

    require_size_from_scratch(name, min(view.size))
    shared = {"num_channels": view.channels, **class_fields(label_names)}
    if name in RESNETS:
        return ResNetForImageClassification(ResNetConfig(**RESNETS[name], **shared))
    config = EfficientNetConfig(**EFFICIENTNET_B0, image_size=min(view.size), batch_norm_momentum=0.1, **shared)
    return initialize_efficientnet(EfficientNetForImageClassification(config))


def require_size_from_scratch(name: str, size: int) -> None:
    """Raise ModelError if images of ``size`` pixels are too small for the architecture."""
    if size < REDUCTION:
        raise ModelError(
            f"image_size {size} is too small for {name}, which reduces {REDUCTION} x {REDUCTION} pixels to "
            f"one position; set image_size to {REDUCTION} or more (images are enlarged), or leave it out"
        )


def initialize_efficientnet(model: nn.Module) -> nn.Module:
    """Initialize BatchNorm with factor 1 and convolutions by He et al. 2015, as in the published EfficientNet.
    transformers draws both from a normal distribution with deviation 0.02, because it expects weights to be loaded.
    After sixteen blocks, 1e-31 of the signal would be left, and the model would learn nothing."""
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

    path = Path(expanded_name(settings.model_name_or_path))
    name = base_of(path)
    config = load_config(settings)
    stored_names = classes_of(config)
    with as_model_error(name, "image classifier", settings.model_revision):
        warn_about_code(name, settings)
        require_safe_weights(name, settings)
        model, random = read_model(
            AutoModelForImageClassification,
            name,
            config,
            settings,
            loading_dtype(settings),
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=settings.attn_implementation,
            **class_fields(label_names),
        )
    missing = [key for key in random if key.startswith(f"{model.base_model_prefix}.")]
    if missing:
        raise ModelError(
            f"{name!r} lacks weights of {type(model).__name__}: {first_few(missing, 1)}; give the folder or Hub id of "
            "a complete image model"
        )
    _require_labels(model, name)
    head = None if is_adapter(path) else _head_line(bool(random), stored_names, label_names)  # an adapter has a head
    return model, [f"{name}, {type(model).__name__}", *([] if head is None else [head])]


def _require_labels(model: PreTrainedModel, name: str) -> None:
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{name!r} is a {type(model).__name__}, which only predicts: its forward takes no labels. Give a model "
            "that can be trained; if its class ends in WithTeacher, load the weights with the class of the same name "
            "without that ending, and write them to a folder with save_pretrained"
        )


def _head_line(is_new: bool, stored_names: Sequence[str], label_names: Sequence[str]) -> str | None:
    """Return a line about a head that is replaced or gets other class names; None if nothing changes."""
    if is_new and len(stored_names) == len(label_names):
        return f"the head is replaced: a new one for {len(label_names)} classes"
    if is_new:
        return f"the head is replaced: {len(label_names)} classes where the model has {len(stored_names)}"
    if tuple(stored_names) != tuple(label_names):
        return (
            f"the head is kept, for the same number of classes: {first_few(stored_names)} are now "
            f"{first_few(label_names)}"
        )
    return None


def _require_classes(settings: ModelSettings, label_names: Sequence[str]) -> None:
    known = known_classes(settings)
    if known != tuple(label_names):
        raise ModelError(
            f"the classes of {settings.model_name_or_path} ({first_few(known)}) are not those of the data "
            f"({first_few(label_names)}), in this order; give the data that it was trained for"
        )


def _require_image_size(model: PreTrainedModel, view: ImageView, name: str) -> None:
    """Raise ModelError if ``model`` fails on a black image of the size and channels of ``view``."""
    import torch

    try:
        with evaluating(model):
            model(pixel_values=torch.zeros(1, view.channels, *view.size, dtype=model.dtype))
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{name} does not take images of {view.size[1]} x {view.size[0]} pixels and {view.channels} channels "
            f"({error}); set image_size to the size that the model was made for"
        ) from error
