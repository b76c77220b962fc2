"""Images that need no download: handwritten digits of scikit-learn, and generated ones of any number."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from functools import partial

import numpy

from scu_trainer.data.images.records import ImageRecord, ImageSource
from scu_trainer.errors import DataError

GENERATED_SIZE = 32  # pixels
GENERATED_CLASSES = 10
GENERATED_IMAGES = 2048
GENERATED_VERSION = 1
LARGEST_DIGIT_VALUE = 16


def digits() -> ImageSource:
    """1,797 handwritten digits of 8 x 8 pixels and 17 shades. Raises DataError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "dataset: digits comes with scikit-learn, which is not installed; pip install 'scu-trainer[images]', or "
            "use dataset: generated"
        ) from error
    found = load_digits()
    pixels = (found.images * (255 / LARGEST_DIGIT_VALUE)).round().astype(numpy.uint8)
    labels = found.target.astype(numpy.int64)
    names = tuple(str(name) for name in found.target_names)
    return ImageSource("digits", ["embedded", "digits"], names, labels, partial(_read_digits, pixels, labels))


def _read_digits(pixels: numpy.ndarray, labels: numpy.ndarray, numbers: Sequence[int]) -> Iterator[ImageRecord]:
    for number in numbers:
        yield ImageRecord(f"digits row {number + 1}", pixels[number], int(labels[number]))


def generated(count: int) -> ImageSource:
    """``count`` gratings of 32 x 32 pixels in noise: the class is their colour, all else is random.

    Image k is the same however many there are. No augmentation makes one class of another.
    """
    labels = numpy.arange(count, dtype=numpy.int64) % GENERATED_CLASSES
    names = tuple(f"hue {360 * number // GENERATED_CLASSES}" for number in range(GENERATED_CLASSES))
    identity = ["embedded", "generated", count, GENERATED_VERSION]
    return ImageSource("generated", identity, names, labels, partial(_read_generated, labels))


def _read_generated(labels: numpy.ndarray, numbers: Sequence[int]) -> Iterator[ImageRecord]:
    for number in numbers:
        yield ImageRecord(f"generated row {number + 1}", _grating(number, int(labels[number])), int(labels[number]))


def _grating(number: int, label: int) -> numpy.ndarray:
    random = numpy.random.default_rng([GENERATED_VERSION, number])
    angle = random.uniform(0, numpy.pi)
    y, x = numpy.mgrid[:GENERATED_SIZE, :GENERATED_SIZE] / GENERATED_SIZE
    turns = random.uniform(3, 6) * (numpy.cos(angle) * x + numpy.sin(angle) * y) + random.uniform()
    wave = 0.5 + 0.5 * numpy.sin(2 * numpy.pi * turns)[..., None]
    colour = numpy.array(colorsys.hsv_to_rgb(label / GENERATED_CLASSES, random.uniform(0.4, 1), random.uniform(0.6, 1)))
    noise = random.normal(0, 0.2, (GENERATED_SIZE, GENERATED_SIZE, 3))
    return ((random.uniform(0, 0.5) * (1 - wave) + colour * wave + noise).clip(0, 1) * 255).astype(numpy.uint8)
