"""Deleting that stays inside one folder, whatever links lie in it; and paths that no command takes for an option.

A run deletes old checkpoints. A ``checkpoint-5`` that is a link to somewhere else, a name with ``..`` in it, or an
output_dir of ``/`` must not turn that into the loss of something that the run never wrote.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Union

from scu_trainer.errors import StorageError

AnyPath = Union[str, os.PathLike]

SYSTEM_FOLDERS = ("bin", "boot", "dev", "etc", "home", "lib", "opt", "proc", "root", "sbin", "sys", "usr", "var")


def remove_inside(root: AnyPath, name: str, allowed: re.Pattern) -> int:
    """Delete the entry ``name`` directly inside ``root`` and return how many bytes of the disk that frees.

    ``root`` itself may be a link. An entry that is a link is unlinked, and so is every link below it; what they lead to
    is never touched, also where another process swaps a folder for a link meanwhile: everything goes through open
    folders, not paths. A file with other names elsewhere (a hard link) frees nothing. What is not there is no error.

    Raises StorageError for a name that ``allowed`` does not match as a whole, for one that leads elsewhere, for a
    ``root`` that belongs to the system or is a home, and for what cannot be deleted.
    """
    _require_our_name(name, allowed)
    with _opened(_checked_root(root)) as folder:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        try:
            return _remove_entry(folder, name, found)
        except OSError as error:
            raise StorageError(
                f"cannot delete {Path(root) / name}: {error.strerror or error}; check its permissions and whether "
                "another program works there, or delete it by hand"
            ) from error


def _require_our_name(name: str, allowed: re.Pattern) -> None:
    if name in ("", ".", "..") or os.sep in name or "\0" in name or not allowed.fullmatch(name):
        raise StorageError(
            f"{name!r} is no name that a run gives to what it deletes ({allowed.pattern}); delete it by hand if it is "
            "not needed"
        )


def require_own_folder(path: AnyPath) -> None:
    """Raise StorageError for a ``path`` that is no folder of a run: without a name of its own, a folder of the system,
    a home. A run deletes its old checkpoints there, and gives the next run a name beside it."""
    name = Path(path).name
    if name in ("", "..") or _is_of_the_system(_real(path)):
        where = f"{str(path)!r} is the folder {_real(path)}" if str(path) else "it is empty"
        raise StorageError(f"output_dir: {where}; give a run a folder of its own, such as output_dir: runs/mine")


def _real(path: AnyPath) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))  # also of a link that leads to itself


def _is_of_the_system(resolved: Path) -> bool:
    system = [Path("/"), Path.home().resolve(), *(Path("/", folder) for folder in SYSTEM_FOLDERS)]
    return resolved in system or resolved.parent == Path("/home")


def _checked_root(root: AnyPath) -> Path:
    if not shutil.rmtree.avoids_symlink_attacks:
        raise StorageError(f"this system cannot delete in {root} without following links; delete there by hand")
    resolved = _real(root)
    if _is_of_the_system(resolved):
        raise StorageError(f"{root} is {resolved}, where nothing is deleted; let the run write to a folder of its own")
    return resolved


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(f"cannot open the folder {folder}: {error.strerror}; check the path") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_entry(folder: int, name: str, found: os.stat_result) -> int:
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=folder)
        return _freed(found)
    freed = _bytes_below(folder, name)
    shutil.rmtree(name, dir_fd=folder)  # refuses a link that took the folder's place since
    return freed


def _bytes_below(folder: int, name: str) -> int:
    return sum(
        _freed(os.stat(file, dir_fd=inside, follow_symlinks=False))
        for _, _, files, inside in os.fwalk(name, dir_fd=folder, follow_symlinks=False)
        for file in files
    )


def _freed(found: os.stat_result) -> int:
    is_last_name = found.st_nlink == 1
    return found.st_size if is_last_name and stat.S_ISREG(found.st_mode) else 0


def no_option(path: AnyPath) -> str:
    """``path`` as one types it: with "./" before a dash, which commands would take for an option. Not quoted."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text
