"""Where recordings come from: a folder with a manifest, or the generator. Checked once, then kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy

from scu_trainer.data.records import BadSample
from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.sensors.format import (
    HOW,
    MANIFEST,
    SharedShapes,
    array_names,
    present,
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
from scu_trainer.data.store import built_once, digest_of
from scu_trainer.errors import DataError
from scu_trainer.settings.sensors import SYNTHETIC, SensorSettings

STORE_VERSION = 4

WITHOUT_BRANCH = "without any branch in use"
DROWNING = 30
"""How much larger a channel of kinematics is than another one changes, from where that one is learned late or not."""


@dataclass(frozen=True)
class Offered:
    """All recordings of a source, also those that have none of the branches in use or cannot be read.

    What is held out is drawn of these: models that look at different branches hold out the same recordings. ``keys``:
    file names, or the like. ``labels``: (recordings,). ``splits``: what the manifest says, "" for nothing.
    ``places``: what a person calls them. ``reports``: "" for none.
    """

    keys: Sequence[str]
    labels: numpy.ndarray
    splits: numpy.ndarray
    places: Sequence[str]
    reports: Sequence[str]


@dataclass(frozen=True)
class SensorSource:
    """Checked recordings. ``label_names``: by label. ``numbers``: of each recording in ``store``, where it is in
    ``offered``; ascending."""

    name: str
    store: Store
    label_names: Sequence[str]
    offered: Offered
    numbers: numpy.ndarray
    statistics: SampleStatistics

    def recordings(self, offered: numpy.ndarray) -> Recordings:
        """Those of the numbers ``offered`` that can be used."""
        rows = numpy.flatnonzero(numpy.isin(self.numbers, offered))
        keys, reports = (
            [texts[number] for number in self.numbers[rows]] for texts in (self.offered.keys, self.offered.reports)
        )
        return Recordings(self.store, rows, keys, reports)


Found = tuple[int, Sample]
"""A recording that can be used, after its number in ``Offered``."""


def generated_source(
    own: SensorSettings, limit: Optional[int], seed: int, cache_dir: Path, known: Optional[Sequence[str]] = None
) -> SensorSource:
    """``known``: classes of a trained model. Raises DataError for a number of classes that cannot be generated."""
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
        "recording", notes=[f"no branch alone can tell more than {ceiling_alone(classes):.1%} of them"]
    )
    wanted = array_names(own.branches)
    key = digest_of(STORE_VERSION, "synthetic", recipe, wanted)
    folder = _built(cache_dir, key, wanted, statistics, lambda: _generate(recipe, wanted, statistics))
    return _opened(SYNTHETIC, folder, names, _offered_by_generator(samples=recipe[0], classes=classes, seed=seed))


def _offered_by_generator(samples: int, classes: int, seed: int) -> Offered:
    numbers = range(samples)
    keys = [f"{SYNTHETIC} {seed} {number}" for number in numbers]
    places = [f"recording {number + 1}" for number in numbers]
    labels = numpy.arange(samples) % classes
    reports = [report_of(label, side_of(classes)) for label in labels.tolist()]
    return Offered(keys, labels, numpy.full(samples, "", dtype="U1"), places, reports)


def _generate(recipe: tuple, wanted: Sequence[str], statistics: SampleStatistics) -> Iterator[Found]:
    for number, recording in enumerate(synthetic(*recipe)):
        statistics.read += 1
        found = recording.arrays
        arrays = {name: with_time_first(name, found[name]) for name in wanted if name in found}
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
    """Recordings of the folder ``name``, in the format of ``format.py``.

    ``limit``: of them, chosen by chance. ``known``: classes of a trained model. ``shapes``: those that the training
    data have. Raises DataError at the first bad recording, unless ``skip_bad_rows``.
    """
    root = Path(name).expanduser()
    if not root.is_dir():
        found = "is a file" if root.is_file() else "is not a folder here"
        raise DataError(
            f"dataset {name!r} {found}; give {SYNTHETIC}, or a folder with a {MANIFEST} or {CSV_MANIFEST} (columns "
            f"file and label) and one .npz per recording, {HOW}"
        )
    statistics = SampleStatistics("recording")
    rejections = Rejections(statistics, skip_bad_rows)
    listed = read_manifest(root, rejections)
    chosen = [listed[number] for number in some(numpy.arange(len(listed)), limit, seed=0)]
    entries = with_labels_in_range(chosen, own.num_classes, rejections)
    names = class_names(entries, own.num_classes, known)
    labels, entries = _labelled(entries, names, rejections)
    wanted = array_names(own.branches)
    seen = SharedShapes(dict(shapes or {}), dict.fromkeys(shapes or {}, "the training data"))
    content = [[*map(str, (entry.file, entry.label, entry.split, entry.missing)), *_stamp(entry)] for entry in entries]
    key = digest_of(STORE_VERSION, names, wanted, skip_bad_rows, sorted(seen.of.items()), statistics.as_dict(), content)
    folder = _built(cache_dir, key, wanted, statistics, lambda: _checked(entries, labels, wanted, seen, rejections))
    splits = numpy.array([entry.split or "" for entry in entries], dtype=str)
    keys, places, reports = ([getattr(entry, name) for entry in entries] for name in ("key", "place", "report"))
    offered = Offered(keys, labels, splits, places, reports)
    return _opened(name, folder, names, offered)


def some(numbers: numpy.ndarray, limit: Optional[int], seed: int) -> numpy.ndarray:
    """By chance: the first rows of a manifest may all be of one class."""
    if limit is None or limit >= len(numbers):
        return numbers
    return numpy.sort(numpy.random.default_rng(seed).permutation(numbers)[:limit])


def _stamp(entry: Entry) -> list[int]:
    """What changes when a file does; a missing one is found when it is read."""
    return [entry.file.stat().st_size, entry.file.stat().st_mtime_ns] if entry.file.is_file() else []


def _labelled(
    entries: Sequence[Entry], names: Sequence[str], rejections: Rejections
) -> tuple[numpy.ndarray, list[Entry]]:
    """Numbers of the classes, and the entries that are of one."""
    labels, kept = [], []
    for entry in entries:
        try:
            labels.append(label_number(entry.label, names))
            kept.append(entry)
        except BadSample as error:
            rejections.add(entry.place, error)
    return numpy.array(labels, dtype="int64"), kept


class _Channels:
    """How large the channels of kinematics are, and how much each changes, over all recordings."""

    def __init__(self) -> None:
        self.sums = numpy.zeros((3, 1))

    def add(self, values: numpy.ndarray) -> None:
        values = values.astype("float64")
        self.sums = self.sums + [numpy.full(values.shape[1], len(values)), values.sum(0), (values**2).sum(0)]

    def note(self) -> Optional[str]:
        """For a person, where one channel drowns another."""
        count, total, squares = self.sums
        mean, mean_square = total / count.clip(min=1), squares / count.clip(min=1)
        size, change = numpy.sqrt(mean_square), numpy.sqrt((mean_square - mean**2).clip(min=0))
        change = numpy.where(change > 1e-6 * size, change, numpy.inf)  # nothing is learned of one that is constant
        large, small = int(size.argmax()), int(change.argmin())
        if not numpy.isfinite(change[small]) or size[large] <= DROWNING * change[small]:
            return None
        return (
            f"kinematics: channel {large} is about {size[large]:,.3g} large, and channel {small} changes by "
            f"{change[small]:,.3g}: the model takes the numbers as they are, and learns little of changes that small; "
            "from each channel subtract its mean and divide by its standard deviation, both of the training recordings"
        )


def _checked(
    entries: Sequence[Entry],
    labels: numpy.ndarray,
    wanted: Sequence[str],
    shapes: SharedShapes,
    rejections: Rejections,
) -> Iterator[Found]:
    channels = _Channels()
    for number, (entry, label) in enumerate(zip(entries, labels.tolist(), strict=True)):
        try:
            arrays = read_arrays(entry.file, present(wanted, entry.missing))
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


def _built(
    cache_dir: Path, key: str, wanted: Sequence[str], statistics: SampleStatistics, find: Callable[[], Iterator[Found]]
) -> Path:
    def build(folder: Path) -> None:
        numbers: list[int] = []

        def samples() -> Iterator[Sample]:
            for number, sample in find():
                numbers.append(number)
                yield sample

        write_store(folder, wanted, samples())
        (folder / "books.json").write_text(json.dumps({"numbers": numbers, "books": statistics.as_dict()}))

    return built_once(cache_dir / "sensors" / key, build)


def _opened(name: str, folder: Path, label_names: Sequence[str], offered: Offered) -> SensorSource:
    written = json.loads((folder / "books.json").read_text())
    statistics, store = SampleStatistics(**written["books"]), Store(folder)
    if not len(store):
        raise DataError(f"{name} has no recording to learn from; {'; '.join(statistics.lines())}")
    return SensorSource(name, store, label_names, offered, numpy.array(written["numbers"]), statistics)
