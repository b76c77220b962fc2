"""Resolve the name of a dataset (embedded name, path or Hub id) to a source of records.

Files are read in the order of their names. A folder with files or folders that are named after splits (train.jsonl,
my_test.jsonl, validation/0.jsonl) is read like a dataset with splits. A single .txt file is cut into documents where
two or more lines in a row are blank; in a folder each .txt file is one document.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data.embedded import embedded_identity, read_embedded
from scu_trainer.data.formats import KNOWN_COLUMNS, Columns
from scu_trainer.data.readers import (
    BLANK_ONCE,
    BLANK_TWICE,
    HELD_OUT_SPLITS,
    MOST_NAMES,
    SUFFIXES,
    choose_splits,
    group_by_split,
    has_several_sections,
    is_hidden,
    kind_of,
    read_file,
    read_sections,
    require_kind,
    shown_name,
)
from scu_trainer.data.records import Record, table_records
from scu_trainer.errors import DataError, did_you_mean
from scu_trainer.figures import count_text
from scu_trainer.settings import EMBEDDED_DATASETS, DataSettings

NOT_DATA = frozenset(
    "dataset_info.json dataset_infos.json readme.txt license.txt licence.txt notice.txt requirements.txt md5sum.txt "
    "md5sums.txt sha256sum.txt sha256sums.txt checksums.txt".split()
)
"""Names, in lower case, of files that describe the data in their folder and are not data themselves."""

MOST_FILES = 1_000_000  # in a folder; with more, the user probably gave a whole disk by mistake
MOST_KINDS = 20  # suffixes of unread files that one note lists
WHOLE_HASH_BYTES = 2**20  # files up to this size are known by content, larger ones by size and time of change


@dataclass(frozen=True)
class Source:
    """``read()`` starts at the first record each time. ``identity`` is JSON-like and changes with the content.
    ``columns_not_read``: columns of the dataset that its records come without. ``notes``: lines for the user."""

    name: str
    identity: list
    read: Callable[[], Iterable[Record]]
    held_out: Optional[Source] = None
    columns_not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def notes_of(source: Source, held_out: Optional[Source]) -> tuple[str, ...]:
    """Return the notes of both sources, each line once. Works for an ``ImageSource`` too."""
    return tuple(dict.fromkeys((*source.notes, *(held_out.notes if held_out else ()))))


def training_source(settings: DataSettings, cache_dir: Path, columns: tuple[str, ...] = ()) -> Source:
    """Return the source of ``settings.dataset``, with its own held-out split if it has one. ``columns``: columns to
    read besides those of the formats; the datasets library is asked for no others."""
    wanted = (settings.dataset_split,)
    will_split = settings.eval_dataset is None and settings.validation_split_percentage > 0
    return _resolve(settings.dataset, wanted, settings, cache_dir, will_split, columns)


def held_out_source(settings: DataSettings, cache_dir: Path, columns: tuple[str, ...] = ()) -> Source:
    """Return the source of ``settings.eval_dataset``; if it has splits, the first of validation, test and train."""
    wanted = (*HELD_OUT_SPLITS, "train")
    source = _resolve(settings.eval_dataset, wanted, settings, cache_dir, will_split=False, columns=columns)
    return replace(source, held_out=None)


def _resolve(
    name: str,
    wanted: tuple[str, ...],
    settings: DataSettings,
    cache_dir: Path,
    will_split: bool,
    columns: tuple[str, ...],
) -> Source:
    """``wanted``: splits in order of preference. ``will_split``: documents will be held out of this source."""
    path = Path(name).expanduser()
    if len(wanted) == 1 and (name in EMBEDDED_DATASETS or path.exists()):  # one wanted split: the training data
        refuse_hub_settings(name, None, settings.dataset_config_name or None)
    if name in EMBEDDED_DATASETS:
        refuse_hub_settings(name, wanted[-1])
        read = partial(read_embedded, name, cache_dir, settings.text_column)
        return Source(name, embedded_identity(name), read)
    if path.is_dir():
        return _from_folder(path, wanted, settings, will_split, columns)
    if path.exists():
        require_kind(path)
        refuse_hub_settings(name, wanted[-1])
        return _from_files(name, [path], settings, will_split)
    require_existing_path(name)
    return _from_hub(name, wanted, settings, cache_dir, columns)


def require_existing_path(name: str) -> None:
    """Raise DataError if ``name`` looks like a path, a pattern or an address but does not exist; a Hub id passes."""
    path = Path(name).expanduser()
    if path.exists():
        return
    if "://" in name:
        raise DataError(
            f"{name} is an address, but data are downloaded only from the Hub: give the id of a dataset there "
            "(OWNER/NAME), or download the file and give its path"
        )
    if set("*?,") & set(name) and not path.is_symlink():
        raise DataError(
            f"{name} is not one file or folder{nearest_in_folder(path)}; a folder is read with all its files, and "
            'dataset takes a list: --dataset \'["a.jsonl", "b.jsonl"]\' (docs/data.md, Mixtures)'
        )
    if _looks_like_a_path(name):
        link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise DataError(f"{name}{link} does not exist{nearest_in_folder(path)}; looked at {path.absolute()}")


def refuse_hub_settings(name: str, split: Optional[str], config: Optional[str] = None) -> None:
    """Raise DataError if ``dataset_split`` or ``dataset_config_name`` was given for data without splits or configs."""
    if split not in (None, "train"):
        raise DataError(f"dataset_split is {split!r}, but {name} has no splits; leave dataset_split out")
    if config is not None:
        raise DataError(f"dataset_config_name is {config!r}, but {name} is not a Hub id; leave it out")


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.lower().endswith((*SUFFIXES, ".gz", "/"))
        or name.count("/") > 1
    )


def nearest_in_folder(path: Path) -> str:
    """Return a "did you mean" phrase with the most similar name next to the missing ``path``, or ""."""
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:  # the folder is not there, or may not be listed
        return ""


# Files


def _from_folder(
    folder: Path, wanted: tuple[str, ...], settings: DataSettings, will_split: bool, columns: tuple[str, ...]
) -> Source:
    if is_saved(folder):
        return _from_saved(folder, wanted, settings, columns)
    visible, links = files_and_links(folder)
    files = [path for path in visible if kind_of(path) is not None]
    files = [path for path in files if path.name.lower() not in NOT_DATA] or files
    read = {*files}
    names = [Path(shown_name(path)) for path in visible if path not in read]
    others = sorted({(not kind_of(name) and name.suffix) or str(name) for name in names})[:MOST_KINDS]
    if not files:
        contents = ", ".join([*others, *map(_shown_link, links[:MOST_NAMES])]) or "nothing"
        raise DataError(f"folder {folder} holds {contents}; it needs files of the kinds {' '.join(SUFFIXES)}")
    notes = (
        (f"{count_text(len(names), 'file')} of other kinds in {folder}, not read: {', '.join(others)}",)
        if names
        else ()
    )
    notes += notes_of_links(links, folder)
    by_split, split_notes = group_by_split(files, folder)
    notes += split_notes
    if not by_split or (len(by_split) == 1 and wanted[-1] == "train"):
        return _from_folder_of_one_split(folder, by_split or {"train": files}, notes, wanted, settings, will_split)
    source = _from_splits(
        str(folder),
        by_split,
        wanted,
        settings,
        lambda name, paths: _from_files(name, paths, settings, will_split=False),
    )
    return replace(source, notes=(*notes, *source.notes))


def _from_folder_of_one_split(
    folder: Path,
    by_split: Mapping[str, list[Path]],
    notes: tuple[str, ...],
    wanted: tuple[str, ...],
    settings: DataSettings,
    will_split: bool,
) -> Source:
    """Return all data files as one source, even if their names say another split than the wanted one."""
    refuse_hub_settings(str(folder), wanted[-1])
    [(split, files)] = by_split.items()
    if split not in wanted:
        notes += (f"all data files in {folder} are named {split!r}; they are read as training data",)
    source = _from_files(str(folder), files, settings, will_split)
    return replace(source, notes=(*notes, *source.notes))


def files_and_links(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the visible files at any depth of ``folder``, and the links that are not followed: links to folders, which
    may form a cycle, and broken ones. Both are sorted by name. Raises DataError for a folder that cannot be read, holds
    too many files, or belongs to the operating system."""
    if str(folder.resolve()) in ("/", "/proc", "/sys", "/dev"):
        raise DataError(f"{folder} is a folder of the operating system; give the folder that holds the data")
    try:
        paths = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
        entries = list(islice(paths, MOST_FILES + 1))
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {error.strerror} ({error.filename}); check its permissions"
        ) from error
    if len(entries) > MOST_FILES:
        raise DataError(f"{folder} holds more than {MOST_FILES:,} files; give the folder that holds only the data")
    entries = sorted(path for path in entries if not is_hidden(path, folder))
    return [path for path in entries if path.is_file()], [path for path in entries if not path.is_file()]


def notes_of_links(links: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """Return a note about the links that were not followed; no note if there are none."""
    names = ", ".join(map(_shown_link, links[:MOST_NAMES]))
    note = f"{count_text(len(links), 'link')} in {folder}, not followed; what they point to is not read: {names}"
    return (note,) if links else ()


def _shown_link(path: Path) -> str:
    return f"{shown_name(path)} (a link to {os.fsencode(os.readlink(path)).decode(errors='replace')})"


def _from_files(name: str, files: list[Path], settings: DataSettings, will_split: bool) -> Source:
    identity = ["files", [_file_identity(path) for path in files]]
    if len(files) == 1 and kind_of(files[0]) == ".txt":
        return _from_text_file(name, files[0], identity, settings.text_column, will_split)
    read = partial(_read_files, files, Columns.of(settings).named)
    return Source(name, identity, read)


def _read_files(files: list[Path], columns: tuple[str, ...]) -> Iterator[Record]:
    """``columns``: the text column comes first. Places in files that share a name begin with the folder."""
    name_counts, top = Counter(path.name for path in files), os.path.commonpath([path.parent for path in files])
    for path in files:
        folder = os.path.relpath(path.parent, top) if name_counts[path.name] > 1 else os.curdir
        prefix = "" if folder == os.curdir else f"{os.fsencode(folder).decode(errors='replace')}/"
        for record in read_file(path, *columns):
            yield record._replace(place=f"{prefix}{record.place}") if prefix else record


def _from_text_file(name: str, path: Path, identity: list, text_column: str, will_split: bool) -> Source:
    """Cut a .txt file into documents, or into paragraphs if it is one document and some of it is to be held out."""
    blank_lines, notes = BLANK_TWICE, ()
    if will_split and not has_several_sections(path, BLANK_TWICE) and has_several_sections(path, BLANK_ONCE):
        blank_lines = BLANK_ONCE
        notes = (f"{path.name} is a single document; its paragraphs count as documents, so that some can be held out",)
    read = partial(read_sections, path, text_column, blank_lines)
    return Source(name, [*identity, blank_lines], read, notes=notes)


def _file_identity(path: Path) -> list:
    state = path.stat()
    if state.st_size <= WHOLE_HASH_BYTES:
        try:
            return [str(path.absolute()), hashlib.sha256(path.read_bytes()).hexdigest()]
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return [str(path.absolute()), state.st_size, state.st_mtime_ns]


# Datasets of the datasets library


def _from_saved(folder: Path, wanted: tuple[str, ...], settings: DataSettings, columns: tuple[str, ...]) -> Source:
    loaded = load_saved(folder)
    identity = ["saved", [_file_identity(path) for path in sorted(folder.rglob("*")) if path.is_file()]]
    return _from_loaded(str(folder), loaded, wanted, settings, lambda split: [*identity, split], columns)


def is_saved(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk`` of the datasets library."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_saved(folder: Path):
    """Call ``datasets.load_from_disk``. Raises DataError for a folder that is damaged or of another program."""
    import datasets
    import pyarrow

    errors = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
    try:
        return datasets.load_from_disk(str(folder))
    except (*errors, pyarrow.ArrowException) as error:  # the library does not validate what it reads
        raise DataError(f"{folder} looks like a folder of save_to_disk but cannot be read: {error}") from error


def _from_hub(
    name: str, wanted: tuple[str, ...], settings: DataSettings, cache_dir: Path, columns: tuple[str, ...]
) -> Source:
    not_here = (
        f" is not an embedded name ({', '.join(EMBEDDED_DATASETS)}){did_you_mean(name, EMBEDDED_DATASETS)}, not a file "
        "or folder here, and"
    )
    loaded = load_from_hub(name, wanted[-1], settings, cache_dir, not_here, streaming=settings.streaming)
    if settings.streaming:  # nothing is cached then, so the identity need not depend on the content
        return _from_loaded(name, loaded, wanted, settings, lambda split: ["hub", name, split], columns)

    def identity(split: str) -> list:
        part = loaded[split] if isinstance(loaded, Mapping) else loaded
        return ["hub", name, split, part._fingerprint]  # what datasets itself keys its cache by

    return _from_loaded(name, loaded, wanted, settings, identity, columns)


def load_from_hub(
    name: str,
    split: str,
    settings: DataSettings,
    cache_dir: Path,
    not_here: str,
    hub_id: Optional[str] = None,
    streaming: bool = False,
):
    """Load all splits of a dataset, or the slice ``split``. ``hub_id``: where the ``name`` is a short one of ours.
    Raises DataError; ``not_here`` is the part of its message that says what else the name is not."""
    import datasets

    config = settings.dataset_config_name if name == settings.dataset else None
    part = split if "[" in split else None  # a slice, train[:10%]; None loads all splits, held-out ones too
    try:
        return datasets.load_dataset(
            hub_id or name, config, split=part, streaming=streaming, cache_dir=str(cache_dir / "datasets")
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # RuntimeError: the dataset has a script, which the library does not run.
        raise DataError(f"dataset {name!r}{not_here} could not be loaded from the Hub: {error}") from error


def _from_loaded(
    name: str, loaded, wanted: tuple[str, ...], settings: DataSettings, identity, columns: tuple[str, ...]
) -> Source:
    def build(label: str, split: str) -> Source:
        rows = loaded[split] if isinstance(loaded, Mapping) else loaded
        kept, left = _select_known_columns(rows, (*Columns.of(settings).named, *columns))
        return Source(label, identity(split), partial(table_records, label, kept), columns_not_read=left)

    if isinstance(loaded, Mapping):
        return _from_splits(name, {split: split for split in loaded}, wanted, settings, build)
    if "[" not in wanted[-1]:
        refuse_hub_settings(name, wanted[-1])
    return build(name, wanted[-1])


def _select_known_columns(rows, wanted: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return the rows with only the columns that a format may read, and the names of the others, which may hold images
    or audio and would take time to decode. If no column is known, all are kept."""
    names = list(rows.column_names or ())
    known = [column for column in names if column in (*KNOWN_COLUMNS, *wanted)]
    return (rows.select_columns(known), tuple(name for name in names if name not in known)) if known else (rows, ())


def _from_splits(name: str, splits: Mapping, wanted: tuple[str, ...], settings: DataSettings, build) -> Source:
    """Return the source of the first wanted split, with the first held-out split of the dataset."""
    chosen, beside, notes = choose_splits(name, splits, wanted, "documents", settings.eval_dataset is not None)
    source = build(f"{name} ({chosen})", splits[chosen])
    held_out = None if beside is None else build(f"{name} ({beside})", splits[beside])
    return replace(source, held_out=held_out, notes=notes)
