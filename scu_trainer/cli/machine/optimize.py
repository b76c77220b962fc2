"""``scu-trainer hardware optimize``: lists files of scu-trainer that nothing uses, and removes them on request."""

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
from scu_trainer.figures import count_text
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
from scu_trainer.run_files import format_bytes, free_bytes, read_object

CACHE_KINDS = (
    "base", "datasets", "documents", "embedded", "images", "mixtures", "sampled", "sensors", "texts", "tokenized",
    "tokenizer", "words",
)  # fmt: skip
"""Folders of the cache. ``datasets`` holds downloads from the Hub; ``base`` takes a minute or two to rebuild."""


def optimize(options: argparse.Namespace) -> int:
    """List leftovers, ask, remove them, and print how much that freed by our count and by that of the file system."""
    if options.runs != "runs" and not Path(options.runs).expanduser().is_dir():
        raise SettingsError(f"--runs {options.runs} is not a folder; give the one that holds the runs")
    leftovers = list(find_leftovers(options))
    free = [item for item in leftovers if item.used_by is None]
    _print_kept([item for item in leftovers if item.used_by is not None])
    if not free:
        print("0 bytes: nothing can be freed now" if leftovers else "0 bytes: scu-trainer has nothing to free")
        return 0
    for item in free:
        print(f"free   {format_bytes(item.size_bytes):>10}  {item.kind}: {item.path}")
    count = count_text(len(free), "entry", "entries")
    print(f"sum    {format_bytes(sum(item.size_bytes for item in free)):>10}  in {count}")
    if options.dry_run:
        print("nothing was removed; run it without --dry_run to remove it")
        return 0
    if not (options.yes or _user_agrees()):
        print("nothing was removed; to remove it: scu-trainer hardware optimize --yes")
        return 0
    return _remove_all(free)


def _print_kept(items: Sequence[Leftover]) -> None:
    """Print one line for each kind of leftover that stays, and for each reason."""
    groups: dict[tuple[str, Optional[str]], list[Leftover]] = {}
    for item in items:
        groups.setdefault((item.kind, item.used_by), []).append(item)
    for (kind, used_by), group in groups.items():
        size = format_bytes(sum(item.size_bytes for item in group))
        where = str(group[0].path) if len(group) == 1 else f"{len(group)} in {group[0].folder}"
        print(f"stays  {size:>10}  {kind}: {where}: {used_by}")


def _user_agrees() -> bool:
    if not sys.stdin.isatty():
        return False
    with contextlib.suppress(EOFError):
        return input("remove these? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _remove_all(items: Sequence[Leftover]) -> int:
    disks = {os.stat(item.folder).st_dev: item.folder for item in items}
    before = {device: free_bytes(folder) for device, folder in disks.items()}
    freed, failed = 0, False
    for item in items:
        try:
            item_bytes = remove(item)
        except InUse as error:
            print(f"stays  {item.path}: {error} now")
            continue
        except StorageError as error:
            print(f"stays  {error}", file=sys.stderr)
            failed = True
            continue
        freed += item_bytes
        print(f"freed  {format_bytes(item_bytes):>10}  {item.path}")
    print(f"freed  {freed:,} bytes in all")
    for device, folder in disks.items():
        gained = free_bytes(folder) - before[device]
        print(f"the filesystem at {folder} has {gained:+,} bytes free; other programs write there too")
    return 2 if failed else 0


# -- leftovers ---------------------------------------------------------------------------------------------------------


def find_leftovers(options: argparse.Namespace) -> Iterator[Leftover]:
    """Yield all leftovers and caches of scu-trainer, whether they are in use or not."""
    from scu_trainer.data.store import default_cache_dir
    from scu_trainer.models.loading.offload_folder import MARKER, OURS

    file_users, runs = users(), Path(options.runs).expanduser()
    if not options.keep_caches:
        yield from cached(default_cache_dir(options.cache_dir), CACHE_KINDS, file_users)
    yield from scratch(Path(tempfile.gettempdir()), SCRATCH, file_users)
    yield from build_locks(_extension_folders(), file_users)
    yield from offloaded(_offload_folders(runs), OURS, MARKER)
    for run in _runs(runs):
        yield from _unfinished_checkpoints(run)


def _extension_folders() -> list[Path]:
    """Return the folders into which our runs build extensions, but not those of other programs in the home folder."""
    candidates = [os.environ.get("TORCH_EXTENSIONS_DIR"), str(Path(sys.prefix) / "torch_extensions")]
    return sorted({Path(name) for name in candidates if name and Path(name).is_dir()})


def _runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("**/run.json")) if folder.is_dir() else []


def _offload_folders(runs: Path) -> list[Path]:
    """Return the offload folders that runs were configured with, and the one that the recipes use."""
    folders = {runs / "offload"}
    for run in _runs(runs):
        with contextlib.suppress(StorageError):  # the file is torn or not written yet
            settings = read_object(run / "training_config.json").get("configuration")
            found = settings if isinstance(settings, dict) else {}
            names = (found.get(name) for name in ("offload_folder", "offload_linears_folder"))
            folders |= {Path(name).expanduser() for name in names if name and isinstance(name, str)}
    return sorted({path.resolve() for path in folders if path.is_dir()})


def _unfinished_checkpoints(run: Path) -> Iterator[Leftover]:
    """Yield the checkpoints that a killed run left unfinished. A complete one that only lacks its final name is kept,
    because the next start renames it."""
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
