"""Prepare training images and held-out images.

    source ─▶ decoded once to one size (cached: source, processor, cap) ─▶ split by class and seed ─▶ rows

The split is not cached, so another seed does not decode the images again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

import numpy

from scu_trainer.data.images.decode import open_image
from scu_trainer.data.images.embedded import GENERATED_IMAGES, digits, generated
from scu_trainer.data.images.folders import folder_source
from scu_trainer.data.images.records import LABEL_COLUMNS, NO_LABEL, ImageSource, relabelled
from scu_trainer.data.images.store import PixelFormat, StoredImages, stored_images
from scu_trainer.data.images.tables import how_to_save, table_source
from scu_trainer.data.readers import HELD_OUT_SPLITS
from scu_trainer.data.records import BadSample
from scu_trainer.data.samples import Contents, PreparedSamples, SampleStatistics
from scu_trainer.data.sources import is_saved, nearest_in_folder, notes_of, refuse_hub_settings
from scu_trainer.data.store import digest_of
from scu_trainer.errors import DataError
from scu_trainer.figures import count_text
from scu_trainer.settings import DataSettings
from scu_trainer.settings.images import EMBEDDED_IMAGES, ImageSettings

IMAGES_TO_LOOK_AT = 16
CAP_SEED = 0
UNKNOWN_CLASS = "held-out image of a class that training lacks"


def find_images(
    data: DataSettings,
    own: ImageSettings,
    cache_dir: Path,
    classes: Sequence[str] = (),
    *,
    order: Sequence[str] = (),
) -> ImageSource:
    """Return the source of ``data.dataset``. Its ``held_out`` is the ``eval_dataset``, or a split of the dataset.
    ``classes``: those of a trained model that is evaluated; the data may lack some of them. ``order``: those of a model
    that is trained further; they keep their numbers if the data have the same classes. Raises DataError if the dataset,
    its split, its columns or its classes cannot be found."""
    if not classes and data.eval_dataset is None:
        _refuse_columns(data.dataset, own)
    source = _find_source(data.dataset, (data.dataset_split,), data, own, cache_dir, ())
    known = classes or (order if set(order) == set(source.label_names) else ())
    if set(source.label_names) <= set(known):
        held_out = None if source.held_out is None else relabelled(source.held_out, known)
        source = replace(relabelled(source, known), held_out=held_out)
    if not classes:
        _require_two_classes(source)
    if data.eval_dataset is None:
        return source
    wanted = (*HELD_OUT_SPLITS, "train")
    return replace(source, held_out=_find_source(data.eval_dataset, wanted, data, own, cache_dir, source.label_names))


def _require_two_classes(source: ImageSource) -> None:
    present = [source.label_names[number] for number in numpy.unique(source.labels[source.labels != NO_LABEL])]
    if len(present) < 2:
        what = f"one class, {present[0]!r}" if present else "no image with a usable label"
        notes = "".join(f". {note}" for note in source.notes)
        raise DataError(f"{source.name} has {what}; a classifier needs images of two or more classes{notes}")


def _find_source(
    name: str, wanted: Sequence[str], data: DataSettings, own: ImageSettings, cache_dir: Path, classes: Sequence[str]
) -> ImageSource:
    is_training = len(wanted) == 1
    path = Path(name).expanduser()
    split, config = (data.dataset_split, data.dataset_config_name) if is_training else (None, None)
    if name in EMBEDDED_IMAGES:
        refuse_hub_settings(name, split, config)
        return digits() if name == "digits" else generated(data.dataset_size or GENERATED_IMAGES)
    if path.is_dir():
        refuse_hub_settings(name, None, config)
    if path.is_dir() and not is_saved(path):
        takes_held_out = is_training and data.eval_dataset is None
        labels = LABEL_COLUMNS if own.label_column_name is None else (own.label_column_name,)
        return folder_source(path, wanted, data.skip_bad_rows, classes, takes_held_out=takes_held_out, labels=labels)
    if not path.is_dir() and (path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        problem = "is a file" if path.is_file() else f"does not exist{nearest_in_folder(path)}"
        how = how_to_save(path) if path.is_file() and path.suffix.lower() == ".parquet" else ""
        raise DataError(
            f"{name} {problem}; give a folder with one folder of images per class, a folder of save_to_disk, or a Hub "
            f"id{how}"
        )
    return table_source(name, wanted, data, own, cache_dir, classes)


def _refuse_columns(name: str, own: ImageSettings) -> None:
    """Raise DataError if the settings name a column, but the source has no table. Not called with an ``eval_dataset``,
    which may have such a column, nor to evaluate a trained model on other images: its settings cannot be changed."""
    path = Path(name).expanduser()
    fields = ("image_column_name", "label_column_name") if name in EMBEDDED_IMAGES else ("image_column_name",)
    has_columns = name not in EMBEDDED_IMAGES and (not path.is_dir() or is_saved(path))
    given = next((field for field in fields if getattr(own, field) is not None), None)
    if given is not None and not has_columns:
        raise DataError(f"{given} names a column of a table, but the images of {name} are not in a table; drop {given}")


def natural_size(source: ImageSource) -> int:
    """Return the shorter side, in pixels, of the first readable image. Raises DataError if IMAGES_TO_LOOK_AT fail."""
    for record in source.read(range(min(IMAGES_TO_LOOK_AT, len(source.labels)))):
        try:
            return min(open_image(record.content).size)
        except BadSample:  # prepare_images counts it or raises
            continue
    raise DataError(f"none of the first {IMAGES_TO_LOOK_AT} images of {source.name} can be read; give image_size")


def prepare_images(
    source: ImageSource, kind: PixelFormat, data: DataSettings, *, seed: int, cache_dir: Path
) -> PreparedSamples:
    """Return training and held-out images of one size, from the cache if nothing changed. Raises DataError at the first
    image that cannot be used unless ``skip_bad_rows`` is set, and StorageError if ``cache_dir`` cannot be written."""
    chosen = evenly_by_class(source.labels, data.dataset_size, CAP_SEED)
    stored = stored_images(source, chosen, kind, cache_dir, data.skip_bad_rows)
    statistics = SampleStatistics(item="image", notes=[*notes_of(source, source.held_out)])
    _add_stored(statistics, stored, source.name)
    held_out, train, evaluated = _split(source, stored, kind, data, seed, cache_dir, statistics)
    _count(statistics, source, stored, held_out, train, evaluated)
    rules = [data.validation_split_percentage, data.max_eval_documents, seed]
    return PreparedSamples(
        train=stored.rows(train),
        eval=held_out.rows(evaluated) if len(evaluated) else None,
        statistics=statistics,
        fingerprint=digest_of(stored.folder.name, held_out.folder.name, rules),
        label_names=source.label_names,
    )


def _split(
    source: ImageSource,
    stored: StoredImages,
    kind: PixelFormat,
    data: DataSettings,
    seed: int,
    cache_dir: Path,
    statistics: SampleStatistics,
) -> tuple[StoredImages, numpy.ndarray, numpy.ndarray]:
    """Return the store of the held-out images, and the numbers of training and held-out images in their stores."""
    labels = stored.labels
    if source.held_out is None:
        share, cap = data.validation_split_percentage / 100, data.max_eval_documents
        wanted = min(max(1, round(share * len(labels))), cap or len(labels)) if share else 0
        evaluated = _held_out_numbers(labels, wanted, seed)
        return stored, numpy.setdiff1d(numpy.arange(len(labels)), evaluated), evaluated
    chosen = evenly_by_class(source.held_out.labels, data.max_eval_documents, CAP_SEED)
    held_out = stored_images(source.held_out, chosen, kind, cache_dir, data.skip_bad_rows)
    _add_stored(statistics, held_out, source.held_out.name)
    evaluated = _numbers_of_known_classes(source, held_out, labels, data.skip_bad_rows, statistics)
    return held_out, numpy.arange(len(labels)), evaluated


def _numbers_of_known_classes(
    source: ImageSource,
    held_out: StoredImages,
    labels: numpy.ndarray,
    skip_bad_rows: bool,
    statistics: SampleStatistics,
) -> numpy.ndarray:
    """Drop held-out images of classes without training images; without ``skip_bad_rows``, raise DataError instead."""
    is_known = numpy.isin(held_out.labels, labels)
    for number in numpy.flatnonzero(~is_known):
        record = next(iter(source.held_out.read([int(held_out.numbers[number])])))
        name = source.label_names[record.label]
        if not skip_bad_rows:
            raise DataError(
                f"{record.place}: {UNKNOWN_CLASS}: no training image is of class {name!r}. Add some, or set "
                "skip_bad_rows: true to skip and count such images"
            )
        statistics.drop(UNKNOWN_CLASS, f"{record.place} ({name})")
    return numpy.flatnonzero(is_known)


# -- choosing ----------------------------------------------------------------------------------------------------------


def evenly_by_class(labels: numpy.ndarray, count: Optional[int], seed: int) -> numpy.ndarray:
    """Return ``count`` sample numbers, ascending, of each class its share give or take one; all if None."""
    if count is None or count >= len(labels):
        return numpy.arange(len(labels))
    by_class = _shuffled_by_class(labels, seed)
    positions = ((numpy.arange(count) + 0.5) * len(by_class) / count).astype(int) if count else []
    return numpy.sort(by_class[positions])


def _shuffled_by_class(labels: numpy.ndarray, seed: int) -> numpy.ndarray:
    order = numpy.random.default_rng(seed).permutation(len(labels))
    return order[numpy.argsort(labels[order], kind="stable")]


def _held_out_numbers(labels: numpy.ndarray, count: int, seed: int) -> numpy.ndarray:
    """As ``evenly_by_class``, but at least one sample of every class is left for training."""
    by_class = _shuffled_by_class(labels, seed)
    first = numpy.unique(labels[by_class], return_index=True)[1]
    others = numpy.delete(by_class, first)
    return numpy.sort(others[evenly_by_class(labels[others], min(count, len(others)), seed)])


# -- statistics --------------------------------------------------------------------------------------------------------


def _add_stored(statistics: SampleStatistics, stored: StoredImages, name: str) -> None:
    statistics.read += stored.about.read
    statistics.add_dropped(stored.about.dropped, stored.about.examples)
    statistics.notes += stored.lines(name)


def _count(
    statistics: SampleStatistics,
    source: ImageSource,
    stored: StoredImages,
    held_out: StoredImages,
    train: numpy.ndarray,
    evaluated: numpy.ndarray,
) -> None:
    statistics.train, statistics.eval = len(train), len(evaluated)
    counts = numpy.bincount(stored.labels[train], minlength=len(source.label_names)).tolist()
    statistics.per_class = dict(zip(source.label_names, counts, strict=True))
    scored = numpy.bincount(held_out.labels[evaluated], minlength=len(source.label_names)).tolist()
    for what, counts_of in (("training", counts), ("held-out", scored if len(evaluated) else [])):
        absent = [name for name, count in zip(source.label_names, counts_of, strict=False) if not count]
        if absent:
            classes = count_text(len(absent), "class", "classes")
            statistics.notes.append(f"no {what} image of {classes}: {', '.join(absent[:5])}")
    if source.held_out is None and not len(evaluated):
        statistics.notes.append("nothing is held out; raise validation_split_percentage or give an eval_dataset")
    statistics.compare(_contents(stored, train), _contents(held_out, evaluated))


def _contents(stored: StoredImages, numbers: numpy.ndarray) -> Contents:
    rows = stored.rows(numbers)
    return Contents(stored.digests[numbers], rows.labels, rows.keys())
