"""Choose the image processor of a model, and the one size that all images get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.load import classes_of, read_config
from scu_trainer.models.loading.names import as_model_error, base_of, check_source, expanded_name, is_adapter
from scu_trainer.models.loading.safety import warn_about_code
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.images import ImageSettings

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig

USUAL_SIZES = (32, 64, 96, 128, 224)
PROCESSOR_FILE = "preprocessor_config.json"


class ImageView(NamedTuple):
    """How a model sees images: its stock ``processor``, which is saved with it, ``size`` (height, width), and a
    ``line`` for the log. ``is_new`` means that mean and deviation of the training images must still be set."""

    processor: BaseImageProcessor
    channels: int
    size: tuple[int, int]
    line: str
    is_new: bool = False


def view_of(settings: ModelSettings, own: ImageSettings, natural_size: Callable[[], int]) -> ImageView:
    """Return the view of a stored model, or a new one for a model from scratch. ``natural_size()`` returns the shorter
    side of the images in pixels; it is called only if nothing else gives a size. Raises ModelError for a model that
    cannot be found, or that takes other channels than ``image_channels``."""
    if settings.model_name_or_path is None:
        channels, size = own.image_channels or 3, own.image_size or usual_size(natural_size())
        return ImageView(
            _plain_processor(size, channels), channels, (size, size), f"images of {size} x {size} pixels", True
        )
    config = load_config(settings)
    channels = getattr(config, "num_channels", 3)
    if own.image_channels not in (None, channels):
        raise ModelError(
            f"image_channels is {own.image_channels}, but {settings.model_name_or_path} takes {channels}; leave it out"
        )
    stored = _stored_processor(settings)
    if stored is None:
        declared = _declared_size(config, settings.model_name_or_path)
        size = own.image_size or declared or usual_size(natural_size())
        line = f"{settings.model_name_or_path} has no {PROCESSOR_FILE}: images of {size} x {size} pixels"
        return ImageView(_plain_processor(size, channels), channels, (size, size), line, True)
    processor, size = _with_one_size(stored, own.image_size, channels)
    return ImageView(
        processor, channels, size, f"images of {size[1]} x {size[0]} pixels, made by the model's own processor"
    )


def _declared_size(config: PretrainedConfig, name: str) -> int | None:
    """Return the longer side in pixels of the declared image size, or None. Raises ModelError for sides below 1."""
    declared = getattr(config, "image_size", None)
    if declared is None:
        return None
    sides = declared if isinstance(declared, (list, tuple)) else [declared]
    if min(sides, default=0) < 1:
        raise ModelError(
            f"image_size is {declared!r} in the configuration of {name}; correct it there to the side in pixels that "
            "the model was made for"
        )
    return max(sides)


def usual_size(side: int) -> int:
    """Return the smallest of 32, 64, 96, 128 and 224 pixels that is at least ``side``; 224 for larger sides."""
    return next((size for size in USUAL_SIZES if size >= side), USUAL_SIZES[-1])


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the model's configuration; for an adapter, the one saved with its classes, or else that of its base."""
    name = settings.model_name_or_path
    check_source(name)
    with as_model_error(name, "configuration", settings.model_revision):
        source = expanded_name(name)
        source = source if _has_config(Path(source)) else base_of(source)
        warn_about_code(source, settings)
        return read_config(source, settings)


def _has_config(path: Path) -> bool:
    return (path / "config.json").is_file()


def known_classes(settings: ModelSettings) -> tuple[str, ...]:
    """Return the class names of a classifier by label. Raises ModelError for an adapter that was saved without them."""
    path = Path(expanded_name(settings.model_name_or_path))
    if is_adapter(path) and not _has_config(path):
        raise ModelError(
            f"the adapter {path} does not name its classes; save the configuration of its base there as config.json, "
            "with the names of the classes in id2label"
        )
    return classes_of(load_config(settings))


def _plain_processor(size: int, channels: int) -> BaseImageProcessor:
    """Return a processor that resizes images to a square; the caller sets mean and deviation of the training images."""
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(
        size={"height": size, "width": size},
        do_convert_rgb=channels == 3,
        image_mean=[0.5] * channels,
        image_std=[0.5] * channels,
    )


def _stored_processor(settings: ModelSettings) -> BaseImageProcessor | None:
    from transformers import AutoImageProcessor
    from transformers.utils import cached_file

    name = expanded_name(settings.model_name_or_path)
    if Path(name).is_dir() and not (Path(name) / PROCESSOR_FILE).is_file():
        name = base_of(name)
    with as_model_error(name, "image processor"):
        options = {"revision": settings.model_revision}
        if cached_file(name, PROCESSOR_FILE, _raise_exceptions_for_missing_entries=False, **options) is None:
            return None
        return AutoImageProcessor.from_pretrained(
            name, backend="pil", trust_remote_code=settings.trust_remote_code, **options
        )


def _with_one_size(
    processor: BaseImageProcessor, wanted: int | None, channels: int
) -> tuple[BaseImageProcessor, tuple[int, int]]:
    """Return ``processor``, changed so that all images get the same size, and that size (height, width). The size is
    ``wanted``, or its own if that is already the same for all images, or else a square."""
    if wanted is not None:
        _set_size(processor, wanted)
    sizes = [_size_of_result(processor, channels, shape) for shape in ((60, 90), (90, 60))]
    if sizes[0] == sizes[1]:
        return processor, sizes[0]
    _set_size(processor, min(sizes[0]), squeezed=True)
    return processor, _size_of_result(processor, channels, (60, 90))


def _set_size(processor: BaseImageProcessor, size: int, squeezed: bool = False) -> None:
    square = {"height": size, "width": size}
    by_edge = "shortest_edge" in dict(processor.size) and processor.size["shortest_edge"] and not squeezed
    processor.size = type(processor)(size={"shortest_edge": size} if by_edge else square).size
    if getattr(processor, "do_center_crop", False):
        processor.crop_size = type(processor)(crop_size=square).crop_size


def _size_of_result(processor: BaseImageProcessor, channels: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) that ``processor`` gives an image of ``shape`` (height, width)."""
    import PIL.Image

    image = PIL.Image.new("RGB" if channels == 3 else "L", (shape[1], shape[0]))
    return tuple(processor(image, do_normalize=False)["pixel_values"][0].shape[-2:])
