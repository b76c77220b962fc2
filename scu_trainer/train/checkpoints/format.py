"""A checkpoint is whole or absent: written beside, listed with sizes and hashes, synced, then renamed.

    staging-checkpoint-40/checkpoint-40/    being written; what a killed run leaves behind
        model.safetensors, optimizer.pt, ...
        manifest.json                       last: names, sizes and hashes of all others
    checkpoint-40/                          renamed: there as a whole, or not at all

A rename is atomic, but it is on the disk for certain only when what it renamed was synced before it, and the folder
above after it. Hashes tell a file that was cut or changed later. Stock programs read the folder as they always did.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import xxhash

from scu_trainer.run_files import give_usual_mode, sync
from scu_trainer.safe_paths import remove_inside

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
STAGING = "staging-"
SUPERSEDED = "superseded-"
"""Prefix of checkpoints of a past that the run was taken back from."""

OURS = re.compile(rf"({STAGING})?checkpoint-\d+")
BYTES_PER_READ = 1 << 20  # fits the processor's cache: a quarter faster than 4 MiB


def step_of(checkpoint: Path) -> int:
    """N of checkpoint-N; -1 for any other name."""
    number = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(number[1]) if number else -1


def checkpoints(run: Path) -> list[Path]:
    """Every checkpoint-N folder of ``run``, whole or not, the newest first."""
    return [path for path in named_as_one(run) if path.is_dir()]


def named_as_one(run: Path) -> list[Path]:
    """Everything in ``run`` that is called checkpoint-N, the newest first: also files, pipes and links to nowhere."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of, reverse=True)


def size_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


# -- writing -----------------------------------------------------------------------------------------------------------


def staging_of(run: Path, step: int) -> Path:
    """The folder in which checkpoint-``step`` is written before it is renamed."""
    return run / f"{STAGING}checkpoint-{step}"


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Bring all files of ``folder`` to the disk and list them in its manifest, ``facts`` beside the list."""
    give_usual_mode(_files(folder))
    with ThreadPoolExecutor(1) as hashing:  # the processor hashes while the disk takes what was written
        found = [(path, hashing.submit(_hash_of_new, path)) for path in _files(folder)]
        for path, _ in found:
            sync(path)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": content.result()}
        for path, content in found
    }
    content = {"version": MANIFEST_VERSION, "complete": True, **facts, "files": files}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)
    sync(folder)


def publish(staged: Path, final: Path) -> None:
    """Give a sealed folder its name. One that has it already is put aside first, and is gone afterwards."""
    staging = staged.parent
    if os.path.lexists(final):  # on a kill between the two renames the older checkpoints and the sealed one are there
        final.rename(staging / f"replaced-{final.name}")
    staged.rename(final)
    sync(final.parent)
    remove_inside(final.parent, staging.name, OURS)


def clear_staging(run: Path) -> tuple[list[str], list[str]]:
    """Remove what killed runs were writing; a sealed checkpoint that only lacked its name gets it.

    Returns the names of (checkpoints that were named, folders that were removed).
    """
    named, cleared = [], []
    for staging in sorted(run.glob(f"{STAGING}checkpoint-*")):
        if OURS.fullmatch(staging.name) is None:
            continue
        final = run / staging.name.removeprefix(STAGING)
        staged = staging / final.name
        if not final.exists() and staged.is_dir() and fault_of_files(staged) is None and has_manifest(staged):
            publish(staged, final)
            named.append(final.name)
        else:
            cleared.append(staging.name)
            remove_inside(run, staging.name, OURS)
    return named, cleared


def rotate(run: Path, newest: Path, limit: Optional[int], best: Optional[Path]) -> list[str]:
    """Remove the oldest checkpoints: ``limit`` whole ones stay, ``best`` among them. Returns names of those removed.

    ``newest`` is never removed, and what is newer than it is of another past and not touched. One that is not whole
    does not count: it cannot stand in for one that is.
    """
    if limit is None or limit <= 0:
        return []
    older = [path for path in checkpoints(run) if step_of(path) < step_of(newest)]
    kept = {newest.name} | {path.name for path in older if best is not None and path.name == best.name}
    for path in older:
        # by sizes: hashes of all that is kept would be read at every save
        if len(kept) < limit and fault_of_files(path, hashes=False) is None:
            kept.add(path.name)
    removed = [path.name for path in older if path.name not in kept]
    for name in removed:
        remove_inside(run, name, OURS)
    return removed


def set_aside(run: Path, step: int, kept: Optional[Path] = None) -> list[str]:
    """Give checkpoints after ``step`` another name: the run goes on from there, and writes its own. ``kept``: the one
    that is gone on from, whatever its number. Returns names."""
    later = [path for path in checkpoints(run) if step_of(path) > step and path != kept] if run.is_dir() else []
    for path in later:
        path.rename(_free(run / f"{SUPERSEDED}{path.name}"))
    return [path.name for path in reversed(later)]


def _free(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate


# -- reading -----------------------------------------------------------------------------------------------------------


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def json_object(path: Path) -> Optional[dict[str, Any]]:
    """Of a regular file that holds one; None for anything else. A pipe would be waited for."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Content of the manifest; empty where there is none (stock checkpoints) or it is torn."""
    return json_object(folder / MANIFEST) or {}


@dataclass(frozen=True)
class Difference:
    """Between the manifest and the file ``name``, in words. ``is_torn``: bytes that were written are not there."""

    name: str
    text: str
    is_torn: bool = False


def differences(folder: Path, *, hashes: bool = True) -> list[Difference]:
    """Empty where nothing differs from the manifest, or there never was one (a stock checkpoint).

    ``hashes``: also compare contents, not only sizes.
    """
    if not os.path.lexists(folder / MANIFEST):
        return []
    listed = read_manifest(folder).get("files")
    wrong = _wrong_in_list(listed)
    if wrong is not None:
        return [Difference(MANIFEST, wrong, is_torn=True)]
    found = (_difference(folder / name, name, entry, hashes) for name, entry in listed.items())
    return [difference for difference in found if difference is not None]


def fault_of_files(folder: Path, *, hashes: bool = True) -> Optional[str]:
    """The first of the ``differences``, in words; None without any."""
    found = differences(folder, hashes=hashes)
    return found[0].text if found else None


def _wrong_in_list(listed: Any) -> Optional[str]:
    if not isinstance(listed, dict):
        return f"{MANIFEST} is damaged"
    for name, entry in listed.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            return f"{MANIFEST} is damaged: it lists {name!r}, which is not in the folder"
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or "xxh3_128" not in entry:
            return f"{MANIFEST} is damaged: it has no size and hash of {name}"
    return None


def _difference(path: Path, name: str, entry: dict[str, Any], hashes: bool) -> Optional[Difference]:
    if not path.is_file():
        return Difference(name, f"{name} is missing")
    size_bytes = path.stat().st_size
    if size_bytes != entry["bytes"]:
        text = f"{name} has {size_bytes:,} of {entry['bytes']:,} bytes"
        return Difference(name, text, is_torn=size_bytes < entry["bytes"])
    if hashes and _hash(path) != entry["xxh3_128"]:
        return Difference(name, f"{name} was changed after it was written")
    return None


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _hash_of_new(path: Path) -> str:
    """As ``_hash``, in less than half its time: what was written just now lies in memory, where nothing can fail."""
    if path.stat().st_size == 0:
        return _hash(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128(content).hexdigest()


def _hash(path: Path) -> str:
    """xxHash (XXH3, 128 bits) of the content: an error check at the speed of memory, no protection from forgery."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(BYTES_PER_READ):
            found.update(block)
    return found.hexdigest()
