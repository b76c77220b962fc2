"""Images that need no download: the handwritten digits of scikit-learn, and any number of generated images."""

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
    """Return 1,797 handwritten digits of 8 x 8 pixels with 17 shades. Raises DataError if scikit-learn is missing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "dataset: digits comes with scikit-learn, which is not installed; pip install 'scu-trainer[images]', or "
            "use dataset: generated"
        ) from error
    dataset = load_digits()
    pixels = (dataset.images * (255 / LARGEST_DIGIT_VALUE)).round().astype(numpy.uint8)
    labels = dataset.target.astype(numpy.int64)
    names = tuple(str(name) for name in dataset.target_names)
    return ImageSource("digits", ["embedded", "digits"], names, labels, partial(_read_digits, pixels, labels))


def _read_digits(pixels: numpy.ndarray, labels: numpy.ndarray, numbers: Sequence[int]) -> Iterator[ImageRecord]:
    for number in numbers:
        yield ImageRecord(f"digits row {number + 1}", pixels[number], int(labels[number]))


def generated(count: int) -> ImageSource:
    """Return ``count`` gratings of 32 x 32 pixels in noise. The class is the colour; everything else is random. Image k
    does not depend on ``count``. No augmentation turns one class into another."""
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
