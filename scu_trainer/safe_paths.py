"""Delete inside one folder without following links, and write paths so that no command takes them for an option.

A run deletes old checkpoints. A ``checkpoint-5`` that links to another place, a name with ``..`` in it, or an
output_dir of ``/`` must not make it delete something that it never wrote.
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
    """Delete the entry ``name`` directly inside ``root``, and return how many bytes of the disk that frees.

    ``root`` itself may be a link. An entry that is a link is unlinked, and so are links below it, but their targets are
    never touched. This holds even if another process replaces a folder by a link meanwhile, because the deletion works
    on open directories, not on paths. A file with another hard link frees nothing. A missing entry is not an error.

    Raises StorageError if ``allowed`` does not match the whole name, if the name leads out of ``root``, if ``root`` is
    a system folder or a home, or if the entry cannot be deleted.
    """
    _require_allowed_name(name, allowed)
    with _open_folder(_resolved_root(root)) as folder:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        try:
            return _remove_entry(folder, name, found)
        except OSError as error:
            raise StorageError(
                f"cannot delete {Path(root) / name}: {error.strerror or error}; check its permissions and whether "
                "another program uses it, or delete it by hand"
            ) from error


def _require_allowed_name(name: str, allowed: re.Pattern) -> None:
    if name in ("", ".", "..") or os.sep in name or "\0" in name or not allowed.fullmatch(name):
        raise StorageError(
            f"{name!r} is not a name that a run may delete ({allowed.pattern}); delete it by hand if you do not need it"
        )


def require_own_folder(path: AnyPath) -> None:
    """Raise StorageError if ``path`` must not be the folder of a run: a path without a name, a system folder, or a
    home. A run deletes old checkpoints in its folder, and the next run gets a similar name next to it."""
    name = Path(path).name
    if name in ("", "..") or _is_system_folder(_real_path(path)):
        where = f"{str(path)!r} is the folder {_real_path(path)}" if str(path) else "it is empty"
        raise StorageError(f"output_dir: {where}; give a run a folder of its own, such as output_dir: runs/mine")


def _real_path(path: AnyPath) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))  # unlike resolve, accepts a link that leads to itself


def _is_system_folder(resolved: Path) -> bool:
    system = [Path("/"), Path.home().resolve(), *(Path("/", folder) for folder in SYSTEM_FOLDERS)]
    return resolved in system or resolved.parent == Path("/home")


def _resolved_root(root: AnyPath) -> Path:
    if not shutil.rmtree.avoids_symlink_attacks:
        raise StorageError(f"this system cannot delete in {root} without following links; delete there by hand")
    resolved = _real_path(root)
    if _is_system_folder(resolved):
        raise StorageError(f"{root} is {resolved}, where no run may delete files; give the run a folder of its own")
    return resolved


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
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
        return freed_bytes(found)
    freed = _bytes_below(folder, name)
    shutil.rmtree(name, dir_fd=folder)  # refuses a link that replaced the folder in the meantime
    return freed


def _bytes_below(folder: int, name: str) -> int:
    return sum(
        freed_bytes(os.stat(file, dir_fd=inside, follow_symlinks=False))
        for _, _, files, inside in os.fwalk(name, dir_fd=folder, follow_symlinks=False)
        for file in files
    )


def freed_bytes(found: os.stat_result) -> int:
    """Return the bytes that removing this entry frees: none unless it is a regular file without other hard links."""
    is_last_name = found.st_nlink == 1
    return found.st_size if is_last_name and stat.S_ISREG(found.st_mode) else 0


def safe_argument(path: AnyPath) -> str:
    """Return ``path``, unquoted, with "./" before a leading dash, which commands would take for an option."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text
