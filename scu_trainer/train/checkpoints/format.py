"""A checkpoint is complete or absent: it is written to a staging folder, listed with sizes and hashes, synced, renamed.

    staging-checkpoint-40/checkpoint-40/    being written, or left behind by a killed run
        model.safetensors, optimizer.pt, ...
        manifest.json                       written last: names, sizes and hashes of all other files
    checkpoint-40/                          after the rename: there as a whole, or not at all

A rename is atomic, but it is certain to be on the disk only if the renamed files were synced before it, and the parent
folder after it. Hashes detect a file that was cut or changed later. Stock programs read the folder as usual.
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

from scu_trainer.run_files import apply_umask, read_object_or_none, sync
from scu_trainer.safe_paths import remove_inside

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
STAGING = "staging-"
SUPERSEDED = "superseded-"
"""Prefix of checkpoints that are newer than the one from which the run resumed."""

OURS = re.compile(rf"({STAGING})?checkpoint-\d+")
BYTES_PER_READ = 1 << 20  # fits into the processor's cache, a quarter faster than 4 MiB


def step_of(checkpoint: Path) -> int:
    """Return N of checkpoint-N; -1 for any other name."""
    number = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(number[1]) if number else -1


def checkpoints(run: Path) -> list[Path]:
    """Return every checkpoint-N folder of ``run``, complete or not, the newest first."""
    return [path for path in checkpoint_paths(run) if path.is_dir()]


def checkpoint_paths(run: Path) -> list[Path]:
    """Return everything in ``run`` with the name checkpoint-N, the newest first: also files, pipes and broken links."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of, reverse=True)


def size_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


# -- writing -----------------------------------------------------------------------------------------------------------


def staging_of(run: Path, step: int) -> Path:
    """Return the folder in which checkpoint-``step`` is written before it is renamed."""
    return run / f"{STAGING}checkpoint-{step}"


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Sync all files of ``folder`` to the disk and list them in its manifest, together with ``facts``."""
    apply_umask(_files(folder))
    with ThreadPoolExecutor(1) as hashing:  # hash in another thread while the disk syncs
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
    """Rename a sealed folder to its final name. A folder with that name is first moved aside, and removed last."""
    staging = staged.parent
    if os.path.lexists(final):  # after a kill between the two renames, older checkpoints and the sealed one exist
        final.rename(staging / f"replaced-{final.name}")
    staged.rename(final)
    sync(final.parent)
    remove_inside(final.parent, staging.name, OURS)


def clear_staging(run: Path) -> tuple[list[str], list[str]]:
    """Remove what killed runs were writing, and give a sealed checkpoint that was not renamed yet its name. Returns
    (names of the renamed checkpoints, names of the removed folders)."""
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
    """Remove the oldest checkpoints, keep ``limit`` complete ones including ``best``, and return the removed names.

    ``newest`` is never removed. Newer ones are of a past that the run has left, and are not touched. An incomplete
    checkpoint does not count, because it cannot replace a complete one.
    """
    if limit is None or limit <= 0:
        return []
    older = [path for path in checkpoints(run) if step_of(path) < step_of(newest)]
    kept = {newest.name} | {path.name for path in older if best is not None and path.name == best.name}
    for path in older:
        # by size only: otherwise the hashes of all kept files would be computed at every save
        if len(kept) < limit and fault_of_files(path, hashes=False) is None:
            kept.add(path.name)
    removed = [path.name for path in older if path.name not in kept]
    for name in removed:
        remove_inside(run, name, OURS)
    return removed


def set_aside(run: Path, step: int, kept: Optional[Path] = None) -> list[str]:
    """Rename the checkpoints after ``step``, because the run resumes there and writes its own; return their names.
    ``kept``: the checkpoint that the run resumes from, whatever its number."""
    later = [path for path in checkpoints(run) if step_of(path) > step and path != kept] if run.is_dir() else []
    for path in later:
        path.rename(_unused_path(run / f"{SUPERSEDED}{path.name}"))
    return [path.name for path in reversed(later)]


def _unused_path(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate


# -- reading -----------------------------------------------------------------------------------------------------------


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest; empty if there is none (stock checkpoints) or it is torn."""
    return read_object_or_none(folder / MANIFEST) or {}


@dataclass(frozen=True)
class Difference:
    """A difference between the manifest and the file ``name``, in words. ``is_torn``: written bytes are missing."""

    name: str
    text: str
    is_torn: bool = False


def differences(folder: Path, *, hashes: bool = True) -> list[Difference]:
    """Return how the files differ from the manifest; empty if they do not, or if there is none (a stock checkpoint).
    ``hashes``: also compare contents, not only sizes."""
    if not os.path.lexists(folder / MANIFEST):
        return []
    listed = read_manifest(folder).get("files")
    wrong = _wrong_in_list(listed)
    if wrong is not None:
        return [Difference(MANIFEST, wrong, is_torn=True)]
    found = (_difference(folder / name, name, entry, hashes) for name, entry in listed.items())
    return [difference for difference in found if difference is not None]


def fault_of_files(folder: Path, *, hashes: bool = True) -> Optional[str]:
    """Return the text of the first of the ``differences``; None if there are none."""
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
    """Like ``_hash``, in less than half the time: a file written just now is in memory, where reading cannot fail."""
    if path.stat().st_size == 0:
        return _hash(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128(content).hexdigest()


def _hash(path: Path) -> str:
    """Return the xxHash (XXH3, 128 bits) of the content: an error check at memory speed, no protection from forgery."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(BYTES_PER_READ):
            digest.update(block)
    return digest.hexdigest()
