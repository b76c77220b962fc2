"""Decoded images of one size in one file of uint8, which is memory-mapped.

A folder of the cache contains ``pixels.u8`` (images, channels, height, width), ``labels.npy``, ``numbers.npy`` (number
of each image in its source), ``digests.npy``, ``places.json`` (names for messages) and ``about.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy
import torch

from scu_trainer.data.images.decode import CONVERTIBLE, MODES, NORMALISING, Pixels, decode_all
from scu_trainer.data.images.records import ImageSource
from scu_trainer.data.statistics import DropCounts, add_counts
from scu_trainer.data.store import build_once, digest_of, read_statistics, storage_errors, write_statistics
from scu_trainer.errors import DataError
from scu_trainer.figures import count_text
from scu_trainer.run_files import require_room

STORE_VERSION = 3
ABOUT_FILE = "about.json"
IMAGES_FOR_STATISTICS = 2048
MIB = 2**20


class PixelFormat(NamedTuple):
    """Format of decoded images. ``size``: (height, width). ``processor``: the image processor that is applied."""

    processor: Any
    channels: int
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, *self.size)

    @property
    def identity(self) -> list:
        """Everything that decoding depends on. Normalising is left out, so that other means need no new decoding."""
        later = (*NORMALISING, "image_mean", "image_std", "rescale_factor", "rescale_offset")
        described = json.loads(self.processor.to_json_string())
        return [self.channels, {name: value for name, value in described.items() if name not in later}]


@dataclass
class DecodingStatistics(DropCounts):
    """Counts of decoding a source. ``modes``: images by Pillow's mode. ``smallest``, ``largest``: smallest and largest
    sides of the originals in pixels. ``several``: files with several images; only the first was read."""

    count: int = 0
    read: int = 0
    several: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    smallest: Optional[list[int]] = None
    largest: Optional[list[int]] = None
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count_image(self, size: tuple[int, int], mode: str, is_first: bool) -> None:
        self.count += 1
        self.several += is_first
        add_counts(self.modes, {mode: 1})
        self.smallest = [min(pair) for pair in zip(self.smallest or size, size, strict=True)]
        self.largest = [max(pair) for pair in zip(self.largest or size, size, strict=True)]


@dataclass(frozen=True)
class StoredImages:
    folder: Path
    shape: tuple[int, int, int]
    about: DecodingStatistics

    @property
    def labels(self) -> numpy.ndarray:
        return numpy.load(self.folder / "labels.npy")

    @property
    def numbers(self) -> numpy.ndarray:
        return numpy.load(self.folder / "numbers.npy")

    @property
    def digests(self) -> numpy.ndarray:
        return numpy.load(self.folder / "digests.npy")

    def lines(self, name: str) -> list[str]:
        """Return lines about how the images of the source ``name`` were decoded."""
        several = self.about.several
        holding = count_text(several, "file holds", "files hold")
        first = f"{name}: {holding} several images (frames or pages); only the first was read"
        return [line for line in (self._sizes(name), self._conversions(name), first if several else None) if line]

    def _sizes(self, name: str) -> str:
        about, (channels, height, width) = self.about, self.shape
        sizes = " x ".join(map(str, about.smallest))
        if about.smallest != about.largest:
            sizes += " to " + " x ".join(map(str, about.largest))
        mib = about.count * channels * height * width / MIB
        return (
            f"{name}: {sizes} pixels became {width} x {height} x {channels}, decoded once; {mib:,.1f} MiB mapped from "
            f"{self.folder}"
        )

    def _conversions(self, name: str) -> Optional[str]:
        wanted = MODES[self.shape[0]]
        converted = [
            f"{count:,} × {CONVERTIBLE.get(mode, mode)}"
            for mode, count in sorted(self.about.modes.items())
            if mode != wanted
        ]
        dropped = ", transparency dropped" if any(mode[-1:] == "A" for mode in self.about.modes) else ""
        return (
            f"{name}, turned into {'RGB' if wanted == 'RGB' else 'gray'}: {', '.join(converted)}{dropped}"
            if converted
            else None
        )

    def rows(self, numbers: numpy.ndarray) -> ImageRows:
        return ImageRows(self.folder, self.shape, self.labels, numbers)


class ImageRows(torch.utils.data.Dataset):
    """Rows ``{"pixel_values": uint8 (channels, height, width), "labels": int}``, in the order of ``numbers``. Each
    worker process maps the file in the cache folder itself, so that pixels are not pickled."""

    def __init__(
        self, folder: Path, shape: tuple[int, int, int], labels: numpy.ndarray, numbers: numpy.ndarray
    ) -> None:
        self.folder, self.shape, self.numbers = folder, shape, numbers
        self.labels = labels[numbers]
        self._mapped: Optional[numpy.ndarray] = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[self.numbers[index]], "labels": int(self.labels[index])}

    def keys(self) -> list[str]:
        """The place of each row, in order."""
        places = json.loads((self.folder / "places.json").read_text())
        return [places[number] for number in self.numbers]

    @property
    def pixels(self) -> numpy.ndarray:
        if self._mapped is None:
            self._mapped = numpy.memmap(self.folder / "pixels.u8", numpy.uint8, mode="r").reshape(-1, *self.shape)
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}


def collate_images(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return ``pixel_values``, uint8 (rows, channels, height, width), and ``labels``, int64 (rows,)."""
    pixels = numpy.stack([row["pixel_values"] for row in rows])
    return {
        "pixel_values": torch.from_numpy(pixels),
        "labels": torch.tensor([row["labels"] for row in rows], dtype=torch.int64),
    }


def pixel_statistics(rows: ImageRows) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, for pixels from 0 to 1, over evenly spaced images."""
    wanted = numpy.linspace(0, len(rows) - 1, num=min(len(rows), IMAGES_FOR_STATISTICS), dtype=int)
    counts = numpy.zeros((rows.shape[0], 256), dtype=numpy.int64)
    for number in wanted:
        for channel, plane in enumerate(rows[number]["pixel_values"]):
            counts[channel] += numpy.bincount(plane.ravel(), minlength=256)
    values, shares = numpy.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    means = shares @ values
    deviations = numpy.sqrt(shares @ values**2 - means**2)
    return means.round(4).tolist(), deviations.clip(min=1 / 255).round(4).tolist()


# -- building ----------------------------------------------------------------------------------------------------------


def stored_images(
    source: ImageSource, numbers: numpy.ndarray, kind: PixelFormat, cache_dir: Path, skip_bad_rows: bool
) -> StoredImages:
    """Return these images of ``source``, decoded, from the cache if it has them. Raises DataError at the first image
    that cannot be used, unless ``skip_bad_rows`` is set, and if none is left."""
    digest = digest_of(STORE_VERSION, source.identity, numbers.tolist(), kind.identity, skip_bad_rows)
    folder = cache_dir / "images" / digest
    build_once(folder, lambda new: _write(new, source, numbers, kind, skip_bad_rows))
    return StoredImages(folder, kind.shape, read_statistics(folder, DecodingStatistics, ABOUT_FILE))


def _write(folder: Path, source: ImageSource, numbers: numpy.ndarray, kind: PixelFormat, skip_bad_rows: bool) -> None:
    require_room(folder, len(numbers) * int(numpy.prod(kind.shape)), setting="cache_dir")
    about = DecodingStatistics()
    for reason, place in source.dropped:
        about.drop(reason, place)
    decoded = decode_all(source.read(numbers.tolist()), kind.processor, kind.channels)
    usable = _usable(decoded, skip_bad_rows, about)
    with storage_errors(folder, "images"):
        kept = _write_pixels(folder / "pixels.u8", zip(numbers.tolist(), usable, strict=True), kind)
        if not kept:
            raise DataError(f"{source.name} has no image to learn from; dropped: {about.describe_dropped()}")
        for name, kind_of_number in (("number", numpy.int64), ("label", numpy.int64), ("digest", numpy.uint64)):
            values = [getattr(image, name) for image in kept]
            numpy.save(folder / f"{name}s.npy", numpy.array(values, kind_of_number))
        (folder / "places.json").write_text(json.dumps([image.place for image in kept]))
        write_statistics(folder, about, ABOUT_FILE)


class _StoredImage(NamedTuple):
    number: int
    label: int
    digest: int
    place: str


def _write_pixels(path: Path, images: Iterable[tuple[int, Optional[Pixels]]], kind: PixelFormat) -> list[_StoredImage]:
    """Write the pixels of all usable images to one file, and return what else is stored about each."""
    kept = []
    with open(path, "wb") as file:
        for number, image in images:
            if image is not None:
                _require_shape(image, kind)
                file.write(image.pixels.tobytes())
                kept.append(_StoredImage(number, image.label, _digest(image.pixels), image.place))
    return kept


def _digest(pixels: numpy.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(pixels.tobytes(), digest_size=8).digest(), "little")


def _usable(decoded: Iterable[Pixels], skip_bad_rows: bool, about: DecodingStatistics) -> Iterator[Optional[Pixels]]:
    """Yield each image, or None for one that is dropped. Without ``skip_bad_rows``, raises DataError for it instead."""
    for image in decoded:
        about.read += 1
        if image.bad is None:
            about.count_image(image.size, image.mode, image.is_first)
            yield image
            continue
        if not skip_bad_rows:
            raise DataError(
                f"{image.place}: {image.bad.reason}: {image.bad}. Correct it, or set skip_bad_rows: true to skip and "
                "count such images"
            )
        about.drop(image.bad.reason, f"{image.place} ({image.bad})")
        yield None


def _require_shape(image: Pixels, kind: PixelFormat) -> None:
    if image.pixels.shape != kind.shape:
        raise DataError(
            f"{image.place}: the image processor turns it into shape {image.pixels.shape}, but {kind.shape} is needed; "
            "set image_size"
        )
