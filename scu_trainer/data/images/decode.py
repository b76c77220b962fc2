"""Whatever an image file holds -> pixels of one size and number of channels, as the model's processor makes them."""

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
UNFIT = "image that the image processor does not take"
NO_USABLE_LABEL = "image without a usable label"

MODES = {1: "L", 3: "RGB"}
"""Pillow's name of gray and of colour, by channels."""

CONVERTIBLE = {
    "1": "black and white", "L": "gray", "LA": "gray with transparency", "P": "palette",
    "PA": "palette with transparency", "RGB": "RGB", "RGBA": "RGB with transparency", "RGBX": "RGB with padding",
    "CMYK": "CMYK", "YCbCr": "YCbCr", "HSV": "HSV", "LAB": "LAB",
}  # fmt: skip
"""Pillow's names, and what a person calls them.

8 bits per channel or less. Deeper pixels (I, I;16, F) have no agreed range: turned into 8 bits they are clipped."""

NORMALISING = ("do_rescale", "do_normalize", "include_top")
"""Steps of image processors that change values and not places; EfficientNet's calls a second one include_top."""

IMAGES_AT_ONCE = 256
SEVERAL = "scu_trainer_several"
"""Key of ``info`` of an image whose file holds more images behind it."""

BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, RuntimeError)
"""What Pillow raises for a torn file. RuntimeError: of AVIF."""


class Pixels(NamedTuple):
    """``pixels``: uint8 of shape (channels, height, width), None where ``bad`` says why there are none. ``mode``: what
    Pillow calls the kind of image that was found. ``size``: its (width, height). ``is_first``: more images follow in
    its file (frames, pages), which are not read."""

    place: str
    label: int
    pixels: Optional[numpy.ndarray] = None
    mode: str = ""
    size: tuple[int, int] = (0, 0)
    bad: Optional[BadSample] = None
    is_first: bool = False


def decode_all(records: Iterable[ImageRecord], processor: Any, channels: int) -> Iterator[Pixels]:
    """In the order of ``records``, some hundred in memory at once; Pillow decodes in threads."""
    decode_one = functools.partial(_decode, processor=processor, channels=channels)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        records = iter(records)
        while part := list(islice(records, IMAGES_AT_ONCE)):
            yield from pool.map(decode_one, part)


def _decode(record: ImageRecord, processor: Any, channels: int) -> Pixels:
    try:
        if record.label == NO_LABEL:
            raise BadSample(NO_USABLE_LABEL, str(record.problem))
        image = open_image(record.content)
        fixed = fixed_pixels(in_channels(image, channels), processor)
    except BadSample as bad:
        return Pixels(record.place, record.label, bad=bad)
    return Pixels(record.place, record.label, fixed, image.mode, image.size, is_first=SEVERAL in image.info)


def open_image(content: Optional[Content]) -> PIL.Image.Image:
    """Decoded whole, and turned upright where its camera said so. Raises BadSample."""
    import PIL.Image
    import PIL.ImageOps

    if content is None:
        raise BadSample(UNREADABLE, "this row has no image")
    if isinstance(content, numpy.ndarray):
        return _of_array(content)
    try:
        # In memory as a whole: Pillow leaves a file open that it fails on.
        with PIL.Image.open(io.BytesIO(content.read_bytes() if isinstance(content, Path) else content)) as image:
            image.load()
            upright = PIL.ImageOps.exif_transpose(image)
            if _has_more(image):
                upright.info[SEVERAL] = True
            return upright
    except BROKEN as error:
        raise BadSample(UNREADABLE, _in_words(error)) from error
    except PIL.Image.DecompressionBombError as error:
        raise BadSample(UNREADABLE, str(error)) from error


def _has_more(image: PIL.Image.Image) -> bool:
    """Whether another image, or the torn beginning of one, is behind this one: the first is whole all the same."""
    try:
        return getattr(image, "is_animated", False)
    except BROKEN:
        return True


def _in_words(error: Exception) -> str:
    import PIL

    if isinstance(error, PIL.UnidentifiedImageError):
        return "it is not an image format that Pillow knows"
    return str(error) or type(error).__name__


def _of_array(pixels: numpy.ndarray) -> PIL.Image.Image:
    import PIL.Image

    channels = 1 if pixels.ndim == 2 else pixels.shape[-1]
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise BadSample(UNUSABLE_CHANNELS, f"its shape is {pixels.shape}; allowed: 1, 3 or 4 channels, last")
    return PIL.Image.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and channels == 1 else pixels)


def in_channels(image: PIL.Image.Image, channels: int) -> PIL.Image.Image:
    """Gray or RGB. Transparency is dropped, which is what image processors do. Raises BadSample for deep pixels."""
    if image.mode not in CONVERTIBLE:
        raise BadSample(
            UNUSABLE_CHANNELS, f"its pixels are of the kind {image.mode!r}, more than 8 bits each; save it with 8 bits"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode == "LAB":  # Pillow knows no way from it to gray
        image = image.convert("RGB")
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def fixed_pixels(image: PIL.Image.Image, processor: Any) -> numpy.ndarray:
    """What the model's processor makes of the image short of normalising: uint8, (channels, height, width). Raises
    BadSample where it refuses."""
    later = {name: False for name in NORMALISING if hasattr(processor, name)}
    try:
        pixels = numpy.asarray(processor(image, **later)["pixel_values"][0])
    except ValueError as error:
        raise BadSample(UNFIT, f"{image.width} x {image.height} pixels: {error}") from error
    return pixels.round().clip(0, 255).astype(numpy.uint8)
