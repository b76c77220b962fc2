"""Where recordings come from: a folder with a manifest, or the generator. Checked once, then kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy

from scu_trainer.data.samples import SampleBooks
from scu_trainer.data.sensor_format import FORMS, BadRecording, Shapes, array_names, read_arrays
from scu_trainer.data.sensor_manifest import Entry, Rejections, class_names, label_number, read_manifest
from scu_trainer.data.sensor_store import Sample, Store, write_store
from scu_trainer.data.sensor_synthetic import DEFAULT_CLASSES, ceiling_alone, side_of, synthetic
from scu_trainer.data.store import built_once, digest_of
from scu_trainer.errors import DataError
from scu_trainer.settings.sensors import SYNTHETIC, SensorSettings

STORE_VERSION = 1

WITHOUT_BRANCH = "without any branch in use"


@dataclass(frozen=True)
class SensorSource:
    """Checked recordings. ``label_names``: by label. ``splits``: what the manifest says of each, "" for nothing.
    ``places``: what each is called."""

    name: str
    store: Store
    label_names: Sequence[str]
    splits: numpy.ndarray
    places: Sequence[str]
    books: SampleBooks

    @property
    def fingerprint(self) -> str:
        return self.store.folder.name


@dataclass(frozen=True)
class _Found:
    """A recording that can be used."""

    sample: Sample
    split: str
    place: str


def generated_source(
    own: SensorSettings, limit: Optional[int], seed: int, cache_dir: Path, known: Optional[Sequence[str]] = None
) -> SensorSource:
    """``known``: classes of a trained model. Raises DataError for a number of classes that cannot be generated."""
    classes = own.num_classes or (len(known) if known else DEFAULT_CLASSES)
    side_of(classes)
    names = [str(label) for label in range(classes)]
    if known is not None and list(known) != names:
        raise DataError(
            f"the model has the classes {', '.join(known[:10])}, and synthetic recordings have 0 to {classes - 1}; "
            "give the recordings of the model"
        )
    recipe = (min(own.sensor_samples, limit or own.sensor_samples), classes, seed, own.sensor_missing_share)
    books = SampleBooks("recording", notes=[f"no branch alone can tell more than {ceiling_alone(classes):.1%} of them"])
    wanted = array_names(own.branches)
    key = digest_of(STORE_VERSION, "synthetic", recipe, wanted)
    folder = _built(cache_dir, key, wanted, books, lambda: _generate(recipe, wanted, books))
    return _opened(SYNTHETIC, folder, names)


def _generate(recipe: tuple, wanted: Sequence[str], books: SampleBooks) -> Iterator[_Found]:
    for number, recording in enumerate(synthetic(*recipe), start=1):
        books.read += 1
        arrays = {name: recording.arrays[name] for name in wanted if name in recording.arrays}
        if "visible" in arrays:
            arrays["visible"] = arrays["visible"].transpose(0, 3, 1, 2)
        if arrays:
            yield _Found((int(recording.label), arrays), "", f"recording {number}")
        else:
            books.drop(WITHOUT_BRANCH, f"recording {number}")


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
    """Recordings of the folder ``name``, in the format of ``sensor_format``.

    ``limit``: of them, chosen by chance. ``known``: classes of a trained model. ``shapes``: those that the training
    data have. Raises DataError at the first bad recording, unless ``skip_bad_rows``.
    """
    root = Path(name).expanduser()
    if not root.is_dir():
        raise DataError(f"dataset {name!r} is no folder; give a folder of recordings with a manifest, or {SYNTHETIC}")
    books = SampleBooks("recording")
    rejections = Rejections(books, skip_bad_rows)
    entries = _chosen(read_manifest(root, rejections), limit)
    names = class_names(entries, own.num_classes, known)
    wanted = array_names(own.branches)
    seen = Shapes(dict(shapes or {}), dict.fromkeys(shapes or {}, "the training data"))
    content = [[*map(str, (entry.file, entry.label, entry.split, entry.missing)), *_stamp(entry)] for entry in entries]
    key = digest_of(STORE_VERSION, names, wanted, skip_bad_rows, sorted(seen.of.items()), books.as_dict(), content)
    folder = _built(cache_dir, key, wanted, books, lambda: _checked(entries, names, wanted, seen, rejections))
    return _opened(name, folder, names)


def _chosen(entries: list[Entry], limit: Optional[int]) -> list[Entry]:
    """By chance: the first rows of a manifest may all be of one class."""
    if limit is None or limit >= len(entries):
        return entries
    return [entries[number] for number in sorted(numpy.random.default_rng(0).permutation(len(entries))[:limit])]


def _stamp(entry: Entry) -> list[int]:
    """What changes when a file does; a missing one is found when it is read."""
    return [entry.file.stat().st_size, entry.file.stat().st_mtime_ns] if entry.file.is_file() else []


def _checked(
    entries: Sequence[Entry], names: Sequence[str], wanted: Sequence[str], shapes: Shapes, rejections: Rejections
) -> Iterator[_Found]:
    for entry in entries:
        try:
            label = label_number(entry.label, names)
            arrays = read_arrays(entry.file, [name for name in wanted if FORMS[name].branch not in entry.missing])
            shapes.check(arrays, entry.place)
        except BadRecording as error:
            rejections.add(entry.place, error)
            continue
        if arrays:
            yield _Found((label, arrays), entry.split or "", entry.place)
        else:
            rejections.books.drop(WITHOUT_BRANCH, entry.place)


# -- the cache ---------------------------------------------------------------------------------------------------------


def _built(
    cache_dir: Path, key: str, wanted: Sequence[str], books: SampleBooks, find: Callable[[], Iterator[_Found]]
) -> Path:
    def build(folder: Path) -> None:
        written: dict[str, Any] = {"splits": [], "places": []}

        def samples() -> Iterator[Sample]:
            for found in find():
                written["splits"].append(found.split)
                written["places"].append(found.place)
                yield found.sample

        write_store(folder, wanted, samples())
        (folder / "books.json").write_text(json.dumps({**written, "books": books.as_dict()}))

    return built_once(cache_dir / "sensors" / key, build)


def _opened(name: str, folder: Path, label_names: Sequence[str]) -> SensorSource:
    written = json.loads((folder / "books.json").read_text())
    books, store = SampleBooks(**written["books"]), Store(folder)
    if not len(store):
        raise DataError(f"{name} has no recording to learn from; {'; '.join(books.lines())}")
    return SensorSource(name, store, label_names, numpy.array(written["splits"], dtype=str), written["places"], books)
