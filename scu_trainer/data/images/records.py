"""A source of images: its classes, the label of every image, and the images, which are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy

NO_LABEL = -1
EMPTY_CLASS = "class folder without an image"
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")

Content = Union[bytes, Path, numpy.ndarray]
"""An image file as bytes or as a path, or pixels: uint8 of shape (height, width) or (height, width, channels)."""


class ImageRecord(NamedTuple):
    """One image as it was read. ``place`` names it in messages ("pets/cat/3.png", "digits row 4"; rows count from 1).
    If ``label`` is NO_LABEL, ``problem`` says why. ``content`` is None if the row has no image."""

    place: str
    content: Optional[Content]
    label: int
    problem: Optional[str] = None


@dataclass(frozen=True)
class ImageSource:
    """``labels``: int64 of shape (images,), NO_LABEL for images without a usable label. ``read(numbers)`` returns these
    images in this order. ``identity`` is JSON-like and changes with the content. ``dropped``: (reason, place) of
    entries that were dropped before any image was read. ``held_out``: the held-out split of the source."""

    name: str
    identity: list
    label_names: tuple[str, ...]
    labels: numpy.ndarray
    read: Callable[[Sequence[int]], Iterable[ImageRecord]]
    held_out: Optional[ImageSource] = None
    notes: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


def relabelled(source: ImageSource, classes: Sequence[str]) -> ImageSource:
    """Return ``source`` with labels that index ``classes``, which must include all classes of the source."""
    if source.label_names == tuple(classes):
        return source
    numbers = numpy.array([classes.index(name) for name in source.label_names], dtype=numpy.int64)
    labels = numpy.where(source.labels == NO_LABEL, NO_LABEL, numbers[source.labels])
    return replace(
        source,
        identity=[*source.identity, list(classes)],
        label_names=tuple(classes),
        labels=labels,
        read=partial(_read_relabelled, source.read, labels),
    )


def _read_relabelled(
    read: Callable[[Sequence[int]], Iterable[ImageRecord]], labels: numpy.ndarray, numbers: Sequence[int]
) -> Iterator[ImageRecord]:
    for number, record in zip(numbers, read(numbers), strict=True):
        yield record._replace(label=int(labels[number]))
