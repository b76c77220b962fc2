"""Write the files of a report into a folder, and replace those of an earlier report. Files of others are kept."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from scu_trainer.errors import StorageError
from scu_trainer.run_files import free_space_hint, read_json, require_writable, write_json
from scu_trainer.secrets import redact

PAGE = "index.html"
LIST = "report.json"
OURS = re.compile(r"[a-z0-9_.-]+\.(html|png|svg|yaml)", re.IGNORECASE)
FORMAT = 1


def check_folder(folder: Path, names: Iterable[str]) -> None:
    """Raise StorageError if ``names`` cannot be written, or if one of them exists and no report of ours wrote it."""
    require_writable(folder, "--output")
    ours = _listed(folder)
    foreign = [name for name in (*names, LIST) if (folder / name).exists() and name not in (*ours, LIST)]
    if (folder / LIST).exists() and not ours:
        foreign.append(LIST)
    if foreign:
        raise StorageError(
            f"{folder / foreign[0]} exists and was not written by scu-trainer report, so it is not overwritten; "
            f"give another --output, or move it away"
        )


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write or replace ``files``, each atomically. Call ``check_folder`` first. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = _listed(folder)
    if set(files) - set(ours):  # listed before they are written: after a kill the next report must recognize them
        write_json(folder / LIST, {"format": FORMAT, "files": sorted({*ours, *files})})
    for name, content in files.items():
        _replace(folder / name, content)


def forget_old(folder: Path, names: Iterable[str]) -> None:
    """Remove the files that an earlier report wrote and that are not among ``names``, the files of this one."""
    kept = sorted(names)
    for name in set(_listed(folder)) - set(kept):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / LIST, {"format": FORMAT, "files": kept})


def plot_files(folder: Path) -> list[str]:
    """Return the names of the plot files of the report in ``folder``."""
    return [name for name in _listed(folder) if name.endswith((".png", ".svg"))]


def repeat_file(number: int, run: str) -> str:
    """Return the name of the settings file of one of several runs. Any run name gives a name that OURS matches."""
    return f"repeat-{number}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', run).strip('-') or 'run'}.yaml"


def _listed(folder: Path) -> list[str]:
    """Return the names of the files that a report wrote there. Names that do not match OURS are ignored."""
    path = folder / LIST
    if not path.is_file():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return []
    return [str(name) for name in content.get("files") or [] if OURS.fullmatch(str(name))]


def _replace(path: Path, content: str | bytes) -> None:
    """Replace a file atomically. It is not synced to the disk, because a report can be written again. Half a character,
    which JSON can hold and UTF-8 cannot, is written as its number."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        beside.write_bytes(redact(content).encode(errors="backslashreplace") if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:
        fix = f"{free_space_hint()} or give another --output"
        raise StorageError(f"cannot write {path}: {error.strerror}; {fix}") from error
    finally:
        beside.unlink(missing_ok=True)
