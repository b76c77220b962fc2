"""Read a folder of images in the layout of ImageNet: one folder per class, or one per split with the class folders
inside. Or in the layout of imagefolder of the datasets library: a file metadata.csv gives the class of each image."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Optional

import numpy

from scu_trainer.data.images.records import EMPTY_CLASS, LABEL_COLUMNS, NO_LABEL, ImageRecord, ImageSource
from scu_trainer.data.images.tables import how_to_save
from scu_trainer.data.readers import HELD_OUT_SPLITS, is_hidden, read_file, require_split, shown_name, split_of
from scu_trainer.data.records import Record
from scu_trainer.data.sources import files_and_links, notes_of_links, refuse_hub_settings
from scu_trainer.errors import DataError
from scu_trainer.figures import count_text
from scu_trainer.settings.base import short

SUFFIXES = frozenset(".png .jpg .jpeg .jpe .jfif .bmp .gif .webp .avif .tif .tiff .ppm .pgm .pbm".split())
OF_ARCHIVES = "__MACOSX"
"""A folder that macOS adds to .zip files. It contains no images."""
FILE_COLUMN, METADATA = "file_name", ("metadata.csv", "metadata.jsonl", "metadata.parquet")
MOST_KINDS = 10  # suffixes that one note lists


def folder_source(
    folder: Path,
    wanted: Sequence[str],
    skip_bad: bool,
    classes: Sequence[str] = (),
    *,
    takes_held_out: bool = True,
    labels: Sequence[str] = LABEL_COLUMNS,
) -> ImageSource:
    """Return the images of ``folder``; if its folders are splits, those of the first ``wanted`` split.

    ``classes``: class names of the training data; without them, each folder with images is a class.
    ``takes_held_out``: whether another split becomes ``held_out``; a split without class folders is skipped and noted.
    ``labels``: possible label columns of a metadata file; the first that exists is used.
    Raises DataError for a class folder without images, unless ``skip_bad`` is set, and for a missing split.
    """
    folder, descended = _descend(folder, classes)
    splits = _splits(folder)
    if not splits:
        refuse_hub_settings(str(folder), wanted[0] if len(wanted) == 1 else None)
        return _with_notes(_source_of(folder, _find_images(folder, labels), skip_bad, classes, labels), descended)
    by_name = {**{path.name: path for path in splits.values()}, **splits}
    chosen = by_name[require_split(str(folder), by_name, wanted, shown=[path.name for path in splits.values()])]
    inner, more = _descend(chosen, classes)
    source = _source_of(inner, _find_images(inner, labels, folder), skip_bad, classes, labels)
    source = _with_notes(source, (*descended, *more, *_unread_note(folder, splits)))
    if not takes_held_out:
        return source
    beside = [splits[name] for name in HELD_OUT_SPLITS if name in splits and splits[name] != chosen]
    return _with_held_out(source, beside, skip_bad, labels)


def _with_notes(source: ImageSource, notes: Sequence[str]) -> ImageSource:
    return replace(source, notes=(*notes, *source.notes))


def _descend(folder: Path, classes: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the folder with the class or split folders, and a note if it is not ``folder`` itself: archives often wrap
    it in others. ``classes``: a folder of one of these names is a class folder, even if it is the only one."""
    inner = folder
    while True:
        folders = [path for path in _visible(inner) if path.is_dir()]
        has_images = any(path.suffix.lower() in SUFFIXES for path in _visible(inner))
        if len(folders) != 1 or has_images or folders[0].name in classes or not _has_folders(folders[0]):
            break
        inner = folders[0]
    return inner, () if inner == folder else (f"{inner} is the only folder in {folder} and is read instead of it",)


def _with_held_out(source: ImageSource, folders: Sequence[Path], skip_bad: bool, labels: Sequence[str]) -> ImageSource:
    """Return ``source`` with held-out images from the first of ``folders`` that has class folders."""
    notes = [*source.notes]
    for number, path in enumerate(folders, start=1):
        folder, _ = _descend(path, source.label_names)
        images = _find_images(folder, labels, path.parent)
        if any(name is not None for _, name in images.files):
            notes.append(f"held-out images come from {folder}")
            notes += [f"{left} was not read" for left in folders[number:]]
            held_out = _source_of(folder, images, skip_bad, source.label_names, labels)
            return replace(source, held_out=held_out, notes=tuple(notes))
        notes.append(f"{folder} has no class folders and was not read: {count_text(len(images.files), 'image')}")
    return replace(source, notes=tuple(notes))


def _splits(folder: Path) -> dict[str, Path]:
    """Return folders by split (train, validation, test); {} if they are classes, of which one may be named "train"."""
    folders = [path for path in _visible(folder) if path.is_dir()]
    splits: dict[str, Path] = {}
    for path in sorted(folders, key=lambda path: len(path.name)):  # train before train_more
        split = split_of(path, folder)
        if split is not None:
            splits.setdefault(split, path)
    is_split = _has_rows(splits["train"]) if "train" in splits else bool(splits) and all(map(_has_rows, folders))
    return splits if is_split or (len(splits) > 1 and len(splits) == len(folders)) else {}


def _has_rows(folder: Path) -> bool:
    return _has_folders(folder) or _metadata(folder) is not None


def _has_folders(folder: Path) -> bool:
    return any(path.is_dir() for path in _visible(folder))


def _unread_note(folder: Path, splits: dict[str, Path]) -> tuple[str, ...]:
    left = [path.name for path in _visible(folder) if path.is_dir() and path not in splits.values()]
    return (f"folders in {folder} that are not splits and were not read: {', '.join(left)}",) if left else ()


@dataclass
class _FoundImages:
    """``files``: (path, class name); the name is None outside of class folders, and "" if a table gives no class.
    ``empty``: folders without images. ``ignored``: files of other kinds. ``gone``: files that a table names but that do
    not exist. ``table``: the metadata file, if any. ``is_table``: classes were read from it."""

    files: list[tuple[Path, Optional[str]]] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)
    gone: list[Path] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    table: Optional[Path] = None
    is_table: bool = False


def _source_of(
    folder: Path, images: _FoundImages, skip_bad: bool, classes: Sequence[str], columns: Sequence[str]
) -> ImageSource:
    if images.gone and not skip_bad:
        raise DataError(
            f"the metadata of {folder} names {images.gone[0]}, which does not exist; add it, or set skip_bad_rows: "
            "true to skip and count such rows"
        )
    if not images.files and any(path.suffix.lower() == ".parquet" for path in images.ignored):
        raise DataError(f"{folder} has no image files{how_to_save(folder)}")
    if images.empty and not skip_bad and not classes:
        raise DataError(
            f"the class folder {images.empty[0]} holds no image ({' '.join(sorted(SUFFIXES))}); put images there, "
            "remove it, or set skip_bad_rows: true to skip and count such classes"
        )
    if not any(name for _, name in images.files):
        raise DataError(
            f"{folder} has no class folder with images; needed: {folder}/CLASS/IMAGE or {folder}/train/CLASS/IMAGE, "
            f"with images of the kinds {' '.join(sorted(SUFFIXES))}{_advice_for_table(images.table, columns)}"
        )
    names = tuple(classes) or _sorted_names({name for _, name in images.files if name}, images.is_table)
    numbers = {name: number for number, name in enumerate(names)}
    if images.is_table:  # "1.0" of a training table with words is "1" in a held-out table of only numbers
        whole = [name for name in names if re.fullmatch(r"[0-9]+\.0", name) and name[:-2] not in numbers]
        numbers |= {name[:-2]: numbers[name] for name in whole}
    labels = numpy.array([numbers.get(name, NO_LABEL) for _, name in images.files], dtype=numpy.int64)
    kinds = ", ".join(sorted({path.suffix.lower() or path.name for path in images.ignored})[:MOST_KINDS])
    ignored = (
        (f"{count_text(len(images.ignored), 'file')} of other kinds in {folder}, not read: {kinds}",) if kinds else ()
    )
    if not images.is_table and tuple(columns) != LABEL_COLUMNS:
        column = f"label_column_name has no effect: the classes of {folder} are its folders, no table is read"
        ignored = (*ignored, column)
    return ImageSource(
        str(folder),
        ["folder", _digest(images.files), list(names)],
        names,
        labels,
        partial(_read, images.files, labels),
        notes=(*images.notes, *ignored),
        dropped=(
            *((EMPTY_CLASS, str(path)) for path in images.empty),
            *(("file of the metadata that is not there", str(path)) for path in images.gone),
        ),
    )


def _sorted_names(names: Collection[str], is_table: bool) -> tuple[str, ...]:
    """Sort folder names as torchvision and datasets do (10 before 2), but the class numbers of a table by value."""
    by_number = is_table and all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=int) if by_number else sorted(names))


def _advice_for_table(table: Optional[Path], labels: Sequence[str]) -> str:
    """Return advice about a metadata file that could not be used, because it lacks columns or labels."""
    if table is None:
        return ""
    columns = _columns(list(read_file(table, "text")))
    if FILE_COLUMN in columns and not columns.keys().isdisjoint(labels):
        return f". No row of {table.name} has a label; fill in its label column"
    return (
        f". {table.name} has the columns {', '.join(columns) or 'none'}, but needs {FILE_COLUMN} and "
        f"{' or '.join(labels)}; if another column has the classes, give label_column_name"
    )


def _columns(rows: Sequence[Record]) -> dict[str, None]:
    return dict.fromkeys(str(name) for record in rows if record.value is not None for name in record.value)


def _metadata(*folders: Path) -> Optional[Path]:
    """Return the metadata file of the first folder that has one. A table of all splits may be above their folders."""
    places = (folder / name for folder in folders for name in METADATA)
    return next((place for place in places if place.is_file()), None)


def _images_in_table(folder: Path, labels: Sequence[str], table: Optional[Path]) -> Optional[_FoundImages]:
    """Return the images in ``folder`` with their classes in ``table``; None if it has no such images or classes."""
    rows = [] if table is None else list(read_file(table, "text"))
    columns = _columns(rows)
    label = next((name for name in labels if name in columns), None)
    if label is None or FILE_COLUMN not in columns:
        return None
    images = _FoundImages(notes=(f"classes are those of {label} in {table}",), table=table, is_table=True)
    classes, minus_ones, repeats = {}, 0, 0
    for record in rows:
        name = None if record.value is None else record.value.get(FILE_COLUMN)
        inside = Path(os.path.normpath(name)) if isinstance(name, str) else Path("..")
        if inside.is_absolute() or inside.parts[:1] == ("..",):
            problem = record.problem or f"it does not name an image inside {table.parent}"
            raise DataError(f"{record.place}: {problem}; fix its {FILE_COLUMN}, or remove the row")
        path, given = table.parent / inside, record.value.get(label)
        if not path.is_relative_to(folder):  # it belongs to another split
            continue
        repeats += path in classes
        value = str(given).strip()
        value = "" if given is None or value == "nan" else value  # tables use NaN for a missing value
        if re.fullmatch(r"-1(\.0)?", value):
            value, minus_ones = "", minus_ones + 1
        if isinstance(given, (list, dict)) or classes.setdefault(path, value) != value:
            problem = f"{label} is {short(given)}" + (
                f", and {classes[path]!r} in another row" if path in classes else ""
            )
            raise DataError(
                f"{record.place}: {problem}; an image has one class, so give one row with one name or number"
            )
    if not classes:
        return None
    if all(re.fullmatch(r"[0-9]+(\.0)?", value) for value in classes.values() if value):  # pandas: 1.0 if one is NaN
        classes = {path: value.removesuffix(".0") for path, value in classes.items()}
    for path, value in classes.items():
        if path.is_file():
            images.files.append((path, value))
        else:
            images.gone.append(path)
    left = sum(
        path.suffix.lower() in SUFFIXES and path not in classes and not is_hidden(path, folder)
        for path in folder.rglob("*")
    )
    having = count_text(minus_ones, f"row of {table.name} has", f"rows of {table.name} have")
    repeating = count_text(repeats, f"row of {table.name} repeats", f"rows of {table.name} repeat")
    missing = count_text(left, f"image of {folder} is", f"images of {folder} are")
    images.notes += (f"{having} -1, which stands for no {label}",) if minus_ones else ()
    images.notes += (f"{repeating} an image, which is read once",) if repeats else ()
    images.notes += (f"{missing} not in {table.name} and not read",) if left else ()
    return images


def _find_images(folder: Path, labels: Sequence[str], *above: Path) -> _FoundImages:
    """Find the images of ``folder`` and their classes. ``above``: folders whose metadata count if it has none."""
    table = _metadata(folder, *above)
    in_table = _images_in_table(folder, labels, table)
    if in_table is not None:
        return in_table
    result, links, deeper = _FoundImages(table=table), [], []
    for entry in _visible(folder):
        if entry.is_dir():
            _require_utf_8_name(entry)
            files, links_inside = files_and_links(entry)
            links += links_inside
            images = [path for path in files if path.suffix.lower() in SUFFIXES]
            result.ignored += [path for path in files if path.suffix.lower() not in SUFFIXES]
            result.files += [(path, entry.name) for path in images]
            deeper += [path for path in images if path.parent != entry]
            result.empty += [] if images else [entry]
        elif not entry.exists():
            links.append(entry)
        elif entry.suffix.lower() in SUFFIXES:
            result.files.append((entry, None))
        else:
            result.ignored.append(entry)
    advice = _advice_for_table(table, labels)
    result.notes = (*notes_of_links(links, folder), *([advice.removeprefix(". ")] if advice else []))
    if deeper:
        inside = deeper[0].parent.relative_to(folder)
        classes = f"taken for that class ({inside}: {inside.parts[0]})"
        result.notes += (f"{count_text(len(deeper), 'image')} in folders within the folder of a class: {classes}",)
    return result


def _require_utf_8_name(folder: Path) -> None:
    """Raise DataError if the name of a class folder is not UTF-8, because it is written to files of the model."""
    if shown_name(folder) != folder.name:
        raise DataError(f"the name of the class folder {shown_name(folder)} in {folder.parent} is not UTF-8; rename it")


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != OF_ARCHIVES)


def _digest(files: Sequence[tuple[Path, Optional[str]]]) -> str:
    """Return a digest of names, classes, sizes and modification times, which does not need to read a million files."""
    digest = hashlib.sha256()
    for path, name in files:
        state = path.stat()
        digest.update(os.fsencode(path.absolute()))
        digest.update(f"\0{name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read(
    files: Sequence[tuple[Path, Optional[str]]], labels: numpy.ndarray, numbers: Sequence[int]
) -> Iterator[ImageRecord]:
    for number in numbers:
        path, name = files[number]
        label = int(labels[number])
        place = os.fsencode(path).decode(errors="replace")
        yield ImageRecord(place, path, label, None if label != NO_LABEL else _why_no_label(name))


def _why_no_label(name: Optional[str]) -> str:
    if name == "":
        return "it has no label"
    return "it is not in a class folder" if name is None else f"training data have no class {name!r}"
