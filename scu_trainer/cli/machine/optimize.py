"""``scu-trainer hardware optimize``: list what of ours takes room and is used by nobody; remove it on request."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.figures import counted
from scu_trainer.hardware.watching.leftovers import (
    SCRATCH,
    InUse,
    Leftover,
    build_locks,
    cached,
    locked_by,
    offloaded,
    remove,
    scratch,
    size_bytes,
    users,
)
from scu_trainer.run_files import free_bytes, read_json, readable

CACHE_KINDS = (
    "base", "datasets", "documents", "embedded", "images", "mixtures", "sampled", "sensors", "texts", "tokenized",
    "tokenizer", "words",
)  # fmt: skip
"""Folders of the cache. ``datasets`` are downloads from the Hub, ``base`` takes a minute or two to make again."""


def optimize(options: argparse.Namespace) -> int:
    """List, ask, remove, and say what that freed, by our count and by the file system's."""
    if options.runs != "runs" and not Path(options.runs).expanduser().is_dir():
        raise SettingsError(f"--runs {options.runs} is not a folder; give the one that holds the runs")
    found = list(find(options))
    free = [item for item in found if item.used_by is None]
    _say_what_stays([item for item in found if item.used_by is not None])
    if not free:
        print("0 bytes: nothing can be freed now" if found else "0 bytes: scu-trainer has nothing to free")
        return 0
    for item in free:
        print(f"free   {readable(item.size_bytes):>10}  {item.kind}: {item.path}")
    count = counted(len(free), "entry", "entries")
    print(f"sum    {readable(sum(item.size_bytes for item in free)):>10}  in {count}")
    if options.dry_run:
        print("nothing was removed; run it without --dry_run to remove it")
        return 0
    if not (options.yes or _agreed()):
        print("nothing was removed; to remove it: scu-trainer hardware optimize --yes")
        return 0
    return _remove(free)


def _say_what_stays(items: Sequence[Leftover]) -> None:
    """One line for each kind and reason."""
    groups: dict[tuple[str, Optional[str]], list[Leftover]] = {}
    for item in items:
        groups.setdefault((item.kind, item.used_by), []).append(item)
    for (kind, used_by), group in groups.items():
        size = readable(sum(item.size_bytes for item in group))
        where = str(group[0].path) if len(group) == 1 else f"{len(group)} in {group[0].folder}"
        print(f"stays  {size:>10}  {kind}: {where}: {used_by}")


def _agreed() -> bool:
    if not sys.stdin.isatty():
        return False
    with contextlib.suppress(EOFError):
        return input("remove these? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _remove(items: Sequence[Leftover]) -> int:
    disks = {os.stat(item.folder).st_dev: item.folder for item in items}
    before = {device: free_bytes(folder) for device, folder in disks.items()}
    freed, failed = 0, False
    for item in items:
        try:
            bytes_here = remove(item)
        except InUse as error:
            print(f"stays  {item.path}: {error} by now")
            continue
        except StorageError as error:
            print(f"stays  {error}", file=sys.stderr)
            failed = True
            continue
        freed += bytes_here
        print(f"freed  {readable(bytes_here):>10}  {item.path}")
    print(f"freed  {freed:,} bytes in all")
    for device, folder in disks.items():
        gained = free_bytes(folder) - before[device]
        print(f"the filesystem at {folder} has {gained:+,} bytes free; other programs write there too")
    return 2 if failed else 0


# -- what there is -----------------------------------------------------------------------------------------------------


def find(options: argparse.Namespace) -> Iterator[Leftover]:
    """Everything of ours, used or not."""
    from scu_trainer.data.store import default_cache_dir
    from scu_trainer.models.loading.offload_folder import MARKER, OURS

    who, runs = users(), Path(options.runs).expanduser()
    if not options.keep_caches:
        yield from cached(default_cache_dir(options.cache_dir), CACHE_KINDS, who)
    yield from scratch(Path(tempfile.gettempdir()), SCRATCH, who)
    yield from build_locks(_extension_folders(), who)
    yield from offloaded(_offload_folders(runs), OURS, MARKER)
    for run in _runs(runs):
        yield from _unfinished_checkpoints(run)


def _extension_folders() -> list[Path]:
    """Where builds are put that our runs start; those of other programs in the home are not ours."""
    named = [os.environ.get("TORCH_EXTENSIONS_DIR"), str(Path(sys.prefix) / "torch_extensions")]
    return sorted({Path(name) for name in named if name and Path(name).is_dir()})


def _runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("**/run.json")) if folder.is_dir() else []


def _offload_folders(runs: Path) -> list[Path]:
    """Those that runs were given, and the one of the recipes."""
    found = {runs / "offload"}
    for run in _runs(runs):
        with contextlib.suppress(StorageError):  # torn, or not yet written
            settings = read_json(run / "training_config.json")["configuration"]
            names = (settings.get(name) for name in ("offload_folder", "offload_linears_folder"))
            found |= {Path(name).expanduser() for name in names if name}
    return sorted({path.resolve() for path in found if path.is_dir()})


def _unfinished_checkpoints(run: Path) -> Iterator[Leftover]:
    """What a killed run was writing. One that is whole and lacks only its name stays: the next start gives it that."""
    from scu_trainer.train.checkpoints.format import OURS, STAGING, fault_of_files, has_manifest

    for path in sorted(run.glob(f"{STAGING}*")):
        if OURS.fullmatch(path.name) is None:
            continue
        staged = path / path.name.removeprefix(STAGING)
        if staged.is_dir() and has_manifest(staged) and fault_of_files(staged) is None:
            continue
        lock = functools.partial(_run_lock, run)
        used_by = locked_by(lock)
        yield Leftover("unfinished checkpoint", run, path.name, OURS, size_bytes(path), used_by, lock)


@contextlib.contextmanager
def _run_lock(run: Path) -> Iterator[None]:
    from scu_trainer.train.run_directory.run_lock import RunLock

    try:
        lock = RunLock(run)
    except StorageError as error:
        raise InUse(str(error)) from error
    with lock:
        yield
