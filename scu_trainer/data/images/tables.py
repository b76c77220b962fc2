"""Read images from tables of the ``datasets`` library: Hub ids and folders of ``save_to_disk``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy

from scu_trainer.data.images.records import LABEL_COLUMNS, NO_LABEL, ImageRecord, ImageSource
from scu_trainer.data.readers import choose_splits
from scu_trainer.data.sources import load_from_hub, load_saved, refuse_hub_settings
from scu_trainer.errors import DataError, did_you_mean
from scu_trainer.settings import DataSettings
from scu_trainer.settings.images import EMBEDDED_IMAGES, ImageSettings

if TYPE_CHECKING:
    import datasets

HUB_IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
IMAGE_COLUMNS = ("image", "img", "jpg", "png")
ROWS_PER_READ = 256


def table_source(
    name: str,
    wanted: Sequence[str],
    data: DataSettings,
    own: ImageSettings,
    cache_dir: Path,
    classes: Sequence[str] = (),
) -> ImageSource:
    """Return the images and labels of a Hub id or a folder of ``save_to_disk``. ``classes``: those of the training
    data. Raises DataError if the dataset, the split or a column does not exist."""
    path = Path(name).expanduser()
    loaded = load_saved(path) if path.is_dir() else _load_from_hub(name, wanted[0], data, cache_dir)
    if not isinstance(loaded, Mapping):
        is_slice = "[" in wanted[0] and not path.is_dir()
        refuse_hub_settings(name, wanted[0] if len(wanted) == 1 and not is_slice else None)
        return _source_of(name, loaded, own, classes)
    chosen, split, notes = choose_splits(name, loaded, wanted, "images", data.eval_dataset is not None)
    source = _source_of(f"{name} ({chosen})", loaded[chosen], own, classes)
    held_out = None if split is None else _source_of(f"{name} ({split})", loaded[split], own, source.label_names)
    return replace(source, held_out=held_out, notes=notes)


def how_to_save(parquet: Path) -> str:
    """Return advice for a parquet file or a folder of them, which must first be saved as a dataset."""
    parquet = parquet if parquet.name else parquet.absolute()  # Path(".") has no name
    given = f"'{parquet}'" if parquet.is_dir() else f"'parquet', data_files='{parquet}'"
    saved = parquet.with_name(f"{parquet.stem}-saved")
    command = f"import datasets; datasets.load_dataset({given}).save_to_disk('{saved}')"
    return f'. Parquet files are read once they are saved as a dataset: python -c "{command}", then give {saved}'


def _load_from_hub(name: str, split: str, data: DataSettings, cache_dir: Path) -> Any:
    known = (*EMBEDDED_IMAGES, *HUB_IDS)
    is_known = name in (*HUB_IDS, *HUB_IDS.values())
    not_here = (
        "" if is_known else f" is not one of {', '.join(known)}{did_you_mean(name, known)}, not a folder here, and"
    )
    return load_from_hub(name, split, data, cache_dir, not_here, HUB_IDS.get(name))


def _source_of(name: str, table: datasets.Dataset, own: ImageSettings, classes: Sequence[str]) -> ImageSource:
    import datasets

    image = _image_column(name, table, own.image_column_name)
    label = _label_column(name, table, own.label_column_name, image)
    values = table.with_format(None)[label][:]
    names = _class_names(name, table.features[label], values, label, gaps_allowed=bool(classes))
    wanted = tuple(classes) or names
    labels = _label_numbers(values, table.features[label], names, wanted)
    # Keep bytes and paths: an error in decoding must be able to name the broken image.
    undecoded = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    read = partial(_read, name, undecoded, image, labels, values)
    return ImageSource(name, ["table", table._fingerprint, image, label, list(wanted)], wanted, labels, read)


# -- columns -----------------------------------------------------------------------------------------------------------


def _image_column(name: str, table: datasets.Dataset, wanted: Optional[str]) -> str:
    """Return ``wanted``, or the column of images with a usual name, or the only one. Raises DataError."""
    import datasets

    usable = [column for column, kind in table.features.items() if _holds_images(kind, datasets.Image)]
    if wanted is not None and wanted not in usable:
        raise DataError(
            f"image_column_name is {wanted!r}; {name} has images in: {', '.join(usable) or 'no column'} (all columns: "
            f"{', '.join(table.column_names)}){did_you_mean(wanted, usable)}"
        )
    chosen = wanted or next((column for column in IMAGE_COLUMNS if column in usable), None)
    chosen = chosen or (usable[0] if len(usable) == 1 else None)
    if chosen is None:
        raise DataError(
            f"{name} has no column of images with one of the names {', '.join(IMAGE_COLUMNS)}; its columns: "
            f"{', '.join(table.column_names)}; give image_column_name, a column of type Image of the datasets library"
        )
    return chosen


def _holds_images(kind: Any, image_type: type) -> bool:
    return isinstance(kind, image_type) or (isinstance(kind, dict) and {"bytes", "path"} <= set(kind))


def _label_column(name: str, table: datasets.Dataset, wanted: Optional[str], image: str) -> str:
    """Return ``wanted``, or the column with a usual name, or the only ClassLabel. Raises DataError."""
    import datasets

    others = [column for column in table.column_names if column != image]
    if wanted is not None and wanted not in others:
        raise DataError(
            f"label_column_name is {wanted!r}; {name} has the columns {', '.join(others)}{did_you_mean(wanted, others)}"
        )
    chosen = wanted or next((column for column in LABEL_COLUMNS if column in others), None)
    typed = [column for column in others if isinstance(table.features[column], datasets.ClassLabel)]
    chosen = chosen or (typed[0] if len(typed) == 1 else None)
    if chosen is None:
        raise DataError(
            f"{name} has no column of classes with one of the names {', '.join(LABEL_COLUMNS)}; its columns: "
            f"{', '.join(table.column_names)}; give label_column_name"
        )
    return chosen


def _class_names(
    name: str, kind: Any, values: Sequence[Any], column: str, *, gaps_allowed: bool = False
) -> tuple[str, ...]:
    """Return the class names: the names of a ClassLabel, the values of a text column, or 0 to the largest number."""
    import datasets

    if isinstance(kind, datasets.ClassLabel):
        return tuple(kind.names)
    dtype = getattr(kind, "dtype", str(kind))  # lists and structs have none
    if dtype in ("string", "large_string"):
        return tuple(sorted({value for value in values if value}))
    if not dtype.startswith(("int", "uint")):
        raise DataError(f"column {column!r} of {name} is of type {dtype}; classes are numbers from 0, or names")
    present = {value for value in values if value is not None and value >= 0}
    count = max(present, default=-1) + 1
    missing = next((number for number in range(count) if number not in present), None)
    if missing is not None and not gaps_allowed:
        row = values.index(max(present)) + 1
        raise DataError(
            f"{name} row {row}: label {max(present)} is out of range, because no image has label {missing}: without "
            f"class names, labels of {column!r} must be 0, 1, 2, ... without a gap; correct it, or make the column a "
            "ClassLabel"
        )
    return tuple(str(number) for number in range(count))


def _label_numbers(values: Sequence[Any], kind: Any, names: Sequence[str], wanted: Sequence[str]) -> numpy.ndarray:
    """Return the index in ``wanted`` of each label; NO_LABEL if it is missing, out of range, or not a wanted class."""
    numbers = {name: number for number, name in enumerate(wanted)}
    by_value = {
        name if kind.dtype.endswith("string") else number: numbers.get(name) for number, name in enumerate(names)
    }
    numbers_of_values = (by_value.get(value) for value in values)
    return numpy.array([NO_LABEL if number is None else number for number in numbers_of_values], dtype=numpy.int64)


# -- rows --------------------------------------------------------------------------------------------------------------


def _read(
    name: str,
    table: datasets.Dataset,
    column: str,
    labels: numpy.ndarray,
    values: Sequence[Any],
    numbers: Sequence[int],
) -> Iterator[ImageRecord]:
    for start in range(0, len(numbers), ROWS_PER_READ):
        part = numbers[start : start + ROWS_PER_READ]
        for number, cell in zip(part, table[list(part)][column], strict=True):
            label = int(labels[number])
            problem = None if label != NO_LABEL else _why_no_label(values[number])
            yield ImageRecord(f"{name} row {number + 1}", _content(cell), label, problem)


def _content(cell: Optional[dict]) -> Any:
    if not cell:
        return None
    if cell.get("bytes") is not None:
        return cell["bytes"]
    return Path(cell["path"]) if cell.get("path") else None


def _why_no_label(value: Any) -> str:
    return "it has no label" if value in (None, "", -1) else f"label {value!r} is not one of the classes"
