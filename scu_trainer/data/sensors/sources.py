"""Sources of recordings: a folder with a manifest, or the generator. Recordings are checked once and then cached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy

from scu_trainer.data.records import BadSample
from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.sensors.format import (
    FORMAT_HINT,
    MANIFEST,
    SharedShapes,
    array_names,
    present_arrays,
    read_arrays,
    with_time_first,
)
from scu_trainer.data.sensors.manifest import (
    CSV_MANIFEST,
    Entry,
    Rejections,
    class_names,
    label_number,
    read_manifest,
    with_labels_in_range,
)
from scu_trainer.data.sensors.store import Recordings, Sample, Store, write_store
from scu_trainer.data.sensors.synthetic import DEFAULT_CLASSES, ceiling_alone, report_of, side_of, synthetic
from scu_trainer.data.store import build_once, digest_of, reading_cache, restored
from scu_trainer.errors import DataError
from scu_trainer.settings.sensors import SYNTHETIC, SensorSettings

STORE_VERSION = 4

WITHOUT_BRANCH = "without any branch in use"
MOST_SIZE_RATIO = 30
"""If one channel of kinematics is this many times as large as another varies, the other is learned late or never."""


@dataclass(frozen=True)
class OfferedRecordings:
    """All recordings of a source, including those that have none of the branches in use or cannot be read.

    Held-out recordings are drawn from these, so that models with different branches hold out the same recordings.
    ``keys``: names of the recordings, such as file names. ``labels``: shape (recordings,). ``splits``: splits in the
    manifest, "" if not given. ``places``: names for messages. ``reports``: "" for recordings without a report.
    """

    keys: Sequence[str]
    labels: numpy.ndarray
    splits: numpy.ndarray
    places: Sequence[str]
    reports: Sequence[str]


@dataclass(frozen=True)
class SensorSource:
    """``label_names``: by label. ``numbers``: index in ``offered`` of each recording in ``store``, ascending."""

    name: str
    store: Store
    label_names: Sequence[str]
    offered: OfferedRecordings
    numbers: numpy.ndarray
    statistics: SampleStatistics

    def recordings(self, offered: numpy.ndarray) -> Recordings:
        """Return the usable recordings among those with the indices ``offered``."""
        rows = numpy.flatnonzero(numpy.isin(self.numbers, offered))
        keys, reports = (
            [texts[number] for number in self.numbers[rows]] for texts in (self.offered.keys, self.offered.reports)
        )
        return Recordings(self.store, rows, keys, reports)


NumberedSample = tuple[int, Sample]
"""The index in ``OfferedRecordings`` of a usable recording, and the recording."""


def generated_source(
    own: SensorSettings, limit: Optional[int], seed: int, cache_dir: Path, known: Optional[Sequence[str]] = None
) -> SensorSource:
    """Return generated recordings. ``known``: classes of a trained model. Raises DataError if the number of classes
    cannot be generated, or if the model has other classes."""
    classes = own.num_classes or (len(known) if known else DEFAULT_CLASSES)
    side_of(classes)
    names = [str(label) for label in range(classes)]
    if known is not None and list(known) != names:
        raise DataError(
            f"the model has the classes {', '.join(known[:10])}, but synthetic recordings have 0 to {classes - 1}; "
            "give recordings with the classes of the model"
        )
    recipe = (min(own.sensor_samples, limit or own.sensor_samples), classes, seed, own.sensor_missing_share)
    statistics = SampleStatistics(
        "recording", notes=[f"no single branch can classify more than {ceiling_alone(classes):.1%} of them"]
    )
    wanted = array_names(own.branches)
    key = digest_of(STORE_VERSION, "synthetic", recipe, wanted)
    offered = _offered_by_generator(samples=recipe[0], classes=classes, seed=seed)
    samples = _generate_samples(recipe, wanted, statistics)
    return _cached_source(SYNTHETIC, names, offered, cache_dir / "sensors" / key, wanted, statistics, samples)


def _offered_by_generator(samples: int, classes: int, seed: int) -> OfferedRecordings:
    numbers = range(samples)
    keys = [f"{SYNTHETIC} {seed} {number}" for number in numbers]
    places = [f"recording {number + 1}" for number in numbers]
    labels = numpy.arange(samples) % classes
    reports = [report_of(label, side_of(classes)) for label in labels.tolist()]
    return OfferedRecordings(keys, labels, numpy.full(samples, "", dtype="U1"), places, reports)


def _generate_samples(recipe: tuple, wanted: Sequence[str], statistics: SampleStatistics) -> Iterator[NumberedSample]:
    for number, recording in enumerate(synthetic(*recipe)):
        statistics.read += 1
        recorded = recording.arrays
        arrays = {name: with_time_first(name, recorded[name]) for name in wanted if name in recorded}
        if arrays:
            yield number, (int(recording.label), arrays)
        else:
            statistics.drop(WITHOUT_BRANCH, f"recording {number + 1}")


def folder_source(
    name: str,
    own: SensorSettings,
    cache_dir: Path,
    *,
    skip_bad_rows: bool,
    limit: Optional[int] = None,
    known: Optional[Sequence[str]] = None,
    shapes: Optional[Mapping[str, tuple[int, ...]]] = None,
) -> SensorSource:
    """Return the recordings of the folder ``name``, in the format of ``format.py``. ``limit``: use only so many, chosen
    at random. ``known``: classes of a trained model. ``shapes``: those of the training data. Raises DataError at the
    first bad recording, unless ``skip_bad_rows`` is set."""
    root = Path(name).expanduser()
    if not root.is_dir():
        problem = "is a file" if root.is_file() else "is not a folder here"
        raise DataError(
            f"dataset {name!r} {problem}; give {SYNTHETIC}, or a folder with a {MANIFEST} or {CSV_MANIFEST} (columns "
            f"file and label) and one .npz per recording, {FORMAT_HINT}"
        )
    statistics = SampleStatistics("recording")
    rejections = Rejections(statistics, skip_bad_rows)
    listed = read_manifest(root, rejections)
    chosen = [listed[number] for number in random_subset(numpy.arange(len(listed)), limit, seed=0)]
    entries = with_labels_in_range(chosen, own.num_classes, rejections)
    names = class_names(entries, own.num_classes, known)
    labels, entries = _label_entries(entries, names, rejections)
    wanted = array_names(own.branches)
    seen = SharedShapes(dict(shapes or {}), dict.fromkeys(shapes or {}, "the training data"))
    content = [[*map(str, (entry.file, entry.label, entry.split, entry.missing)), *_stamp(entry)] for entry in entries]
    key = digest_of(STORE_VERSION, names, wanted, skip_bad_rows, sorted(seen.of.items()), statistics.as_dict(), content)
    splits = numpy.array([entry.split or "" for entry in entries], dtype=str)
    keys, places, reports = ([getattr(entry, name) for entry in entries] for name in ("key", "place", "report"))
    offered = OfferedRecordings(keys, labels, splits, places, reports)
    samples = _check(entries, labels, wanted, seen, rejections)
    return _cached_source(name, names, offered, cache_dir / "sensors" / key, wanted, statistics, samples)


def random_subset(numbers: numpy.ndarray, limit: Optional[int], seed: int) -> numpy.ndarray:
    """Draw ``limit`` of ``numbers`` at random, ascending: the first rows of a manifest may all be of one class."""
    if limit is None or limit >= len(numbers):
        return numbers
    return numpy.sort(numpy.random.default_rng(seed).permutation(numbers)[:limit])


def _stamp(entry: Entry) -> list[int]:
    """Return values that change with the file. A missing file is reported when it is read."""
    return [entry.file.stat().st_size, entry.file.stat().st_mtime_ns] if entry.file.is_file() else []


def _label_entries(
    entries: Sequence[Entry], names: Sequence[str], rejections: Rejections
) -> tuple[numpy.ndarray, list[Entry]]:
    """Return the class numbers of the entries that have a valid class, and these entries."""
    labels, kept = [], []
    for entry in entries:
        try:
            labels.append(label_number(entry.label, names))
            kept.append(entry)
        except BadSample as error:
            rejections.add(entry.place, error)
    return numpy.array(labels, dtype="int64"), kept


class _ChannelStatistics:
    """Sizes and variations of the channels of kinematics over all recordings."""

    def __init__(self) -> None:
        self.sums = numpy.zeros((3, 1))

    def add(self, values: numpy.ndarray) -> None:
        values = values.astype("float64")
        self.sums = self.sums + [numpy.full(values.shape[1], len(values)), values.sum(0), (values**2).sum(0)]

    def note(self) -> Optional[str]:
        """Return a note if one channel is so large that another is hardly learned."""
        count, total, squares = self.sums
        mean, mean_square = total / count.clip(min=1), squares / count.clip(min=1)
        size, change = numpy.sqrt(mean_square), numpy.sqrt((mean_square - mean**2).clip(min=0))
        change = numpy.where(change > 1e-6 * size, change, numpy.inf)  # a constant channel has nothing to learn
        large, small = int(size.argmax()), int(change.argmin())
        if not numpy.isfinite(change[small]) or size[large] <= MOST_SIZE_RATIO * change[small]:
            return None
        return (
            f"kinematics: channel {large} has a size of about {size[large]:,.3g}, but channel {small} changes only by "
            f"{change[small]:,.3g}: the model does not scale its inputs and hardly learns such small changes; from "
            "each channel subtract its mean and divide by its standard deviation, both of the training recordings"
        )


def _check(
    entries: Sequence[Entry],
    labels: numpy.ndarray,
    wanted: Sequence[str],
    shapes: SharedShapes,
    rejections: Rejections,
) -> Iterator[NumberedSample]:
    """Yield the usable recordings. Others are rejected, and channels of very different size are noted."""
    channels = _ChannelStatistics()
    for number, (entry, label) in enumerate(zip(entries, labels.tolist(), strict=True)):
        try:
            arrays = read_arrays(entry.file, present_arrays(wanted, entry.missing))
            shapes.check(arrays, entry.place)
        except BadSample as error:
            rejections.add(entry.place, error)
            continue
        if "kinematics" in arrays:
            channels.add(arrays["kinematics"])
        if arrays:
            yield number, (label, arrays)
        else:
            rejections.statistics.drop(WITHOUT_BRANCH, entry.place)
    shapes.require_majority()
    rejections.statistics.notes += [note] if (note := channels.note()) else []


# -- the cache ---------------------------------------------------------------------------------------------------------


def _cached_source(
    name: str,
    label_names: Sequence[str],
    offered: OfferedRecordings,
    folder: Path,
    wanted: Sequence[str],
    statistics: SampleStatistics,
    samples: Iterator[NumberedSample],
) -> SensorSource:
    """``samples``: read, and counted in ``statistics``, only if ``folder`` does not exist yet."""

    def build(new: Path) -> None:
        numbers: list[int] = []

        def unnumbered() -> Iterator[Sample]:
            for number, sample in samples:
                numbers.append(number)
                yield sample

        write_store(new, wanted, unnumbered())
        (new / "books.json").write_text(json.dumps({"numbers": numbers, "books": statistics.as_dict()}))

    build_once(folder, build)
    with reading_cache(folder):
        written = json.loads((folder / "books.json").read_text())
        statistics, store = restored(SampleStatistics, written["books"], "books.json"), Store(folder)
        numbers = numpy.array(written["numbers"], dtype=numpy.int64)
    if not len(store):
        raise DataError(f"{name} has no recording to learn from; {'; '.join(statistics.lines())}")
    return SensorSource(name, store, label_names, offered, numbers, statistics)
