"""Decode image files of any kind to pixels of one size and number of channels, with the model's image processor."""

from __future__ import annotations

import functools
import io
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy

from scu_trainer.data.images.records import NO_LABEL, Content, ImageRecord
from scu_trainer.data.records import BadSample

if TYPE_CHECKING:
    import PIL.Image

UNREADABLE = "image that cannot be read"
UNUSABLE_CHANNELS = "image with unusable channels"

MODES = {1: "L", 3: "RGB"}
"""Pillow's mode for gray and for colour, by number of channels."""

CONVERTIBLE = {
    "1": "black and white", "L": "gray", "LA": "gray with transparency", "P": "palette",
    "PA": "palette with transparency", "RGB": "RGB", "RGBA": "RGB with transparency", "RGBX": "RGB with padding",
    "CMYK": "CMYK", "YCbCr": "YCbCr", "HSV": "HSV", "LAB": "LAB",
}  # fmt: skip
"""Pillow's modes with 8 bits per channel or less, and their names in messages. Deeper pixels (I, I;16, F) have no
agreed range, and converting them to 8 bits would clip them."""

NORMALISING = ("do_rescale", "do_normalize", "include_top")
"""Steps of image processors that change only pixel values. EfficientNet has a second such step, ``include_top``."""

IMAGES_AT_ONCE = 256
HAS_MORE_IMAGES = "scu_trainer_several"
"""Key in ``info`` of an image that is followed by more images in its file."""

BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, RuntimeError)
"""Exceptions that Pillow raises for a damaged file. RuntimeError is raised for AVIF."""


class Pixels(NamedTuple):
    """A decoded image. ``pixels``: uint8 of shape (channels, height, width), or None if ``bad`` is set. ``mode``,
    ``size``: Pillow's mode, and (width, height), of the original. ``is_first``: its file has more images (frames,
    pages), which are not read."""

    place: str
    label: int
    pixels: Optional[numpy.ndarray] = None
    mode: str = ""
    size: tuple[int, int] = (0, 0)
    bad: Optional[BadSample] = None
    is_first: bool = False


def decode_all(records: Iterable[ImageRecord], processor: Any, channels: int) -> Iterator[Pixels]:
    """Decode images in threads and yield them in the order of ``records``. A few hundred are in memory at once."""
    decode_one = functools.partial(_decode, processor=processor, channels=channels)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        records = iter(records)
        while part := list(islice(records, IMAGES_AT_ONCE)):
            yield from pool.map(decode_one, part)


def _decode(record: ImageRecord, processor: Any, channels: int) -> Pixels:
    try:
        if record.label == NO_LABEL:
            raise BadSample("image without a usable label", str(record.problem))
        image = open_image(record.content)
        fixed = fixed_pixels(in_channels(image, channels), processor)
    except BadSample as bad:
        return Pixels(record.place, record.label, bad=bad)
    return Pixels(record.place, record.label, fixed, image.mode, image.size, is_first=HAS_MORE_IMAGES in image.info)


def open_image(content: Optional[Content]) -> PIL.Image.Image:
    """Decode an image completely and rotate it as its EXIF data say. Raises BadSample."""
    import PIL.Image
    import PIL.ImageOps

    if content is None:
        raise BadSample(UNREADABLE, "this row has no image")
    if isinstance(content, numpy.ndarray):
        return _image_from_array(content)
    try:
        # Read the whole file first: Pillow would leave it open after an error.
        with PIL.Image.open(io.BytesIO(content.read_bytes() if isinstance(content, Path) else content)) as image:
            image.load()
            upright = PIL.ImageOps.exif_transpose(image)
            if _has_more_images(image):
                upright.info[HAS_MORE_IMAGES] = True
            return upright
    except BROKEN as error:
        raise BadSample(UNREADABLE, _describe_error(error)) from error
    except PIL.Image.DecompressionBombError as error:
        raise BadSample(UNREADABLE, str(error)) from error


def _has_more_images(image: PIL.Image.Image) -> bool:
    """Whether another image, complete or damaged, follows in the file. The first image is complete in either case."""
    try:
        return getattr(image, "is_animated", False)
    except BROKEN:
        return True


def _describe_error(error: Exception) -> str:
    import PIL

    if isinstance(error, PIL.UnidentifiedImageError):
        return "it is not an image format that Pillow knows"
    return str(error) or type(error).__name__


def _image_from_array(pixels: numpy.ndarray) -> PIL.Image.Image:
    import PIL.Image

    channels = 1 if pixels.ndim == 2 else pixels.shape[-1]
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise BadSample(
            UNUSABLE_CHANNELS, f"its shape is {pixels.shape}; allowed: 1, 3 or 4 channels, in the last dimension"
        )
    return PIL.Image.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and channels == 1 else pixels)


def in_channels(image: PIL.Image.Image, channels: int) -> PIL.Image.Image:
    """Convert to gray or RGB, without transparency, as image processors do. Raises BadSample for more than 8 bits."""
    if image.mode not in CONVERTIBLE:
        raise BadSample(
            UNUSABLE_CHANNELS, f"its pixels are of type {image.mode!r}, more than 8 bits each; save it with 8 bits"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode == "LAB":  # Pillow cannot convert it to gray directly
        image = image.convert("RGB")
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def fixed_pixels(image: PIL.Image.Image, processor: Any) -> numpy.ndarray:
    """Apply the model's image processor without rescaling and normalising: uint8 of shape (channels, height, width).
    Raises BadSample if the processor refuses the image."""
    later = {name: False for name in NORMALISING if hasattr(processor, name)}
    try:
        pixels = numpy.asarray(processor(image, **later)["pixel_values"][0])
    except ValueError as error:
        example = f"{image.width} x {image.height} pixels: {error}"
        raise BadSample("image that the image processor does not take", example) from error
    return pixels.round().clip(0, 255).astype(numpy.uint8)
