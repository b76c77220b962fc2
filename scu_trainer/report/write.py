"""The folder of a report: which files of it are ours, and how they are replaced. What others put there stays."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from scu_trainer.errors import StorageError
from scu_trainer.run_files import make_room, read_json, require_writable, write_json
from scu_trainer.secrets import redact

PAGE = "index.html"
LIST = "report.json"
OURS = re.compile(r"[a-z0-9_.-]+\.(html|png|svg|yaml)", re.IGNORECASE)
FORMAT = 1


def check_folder(folder: Path, names: Iterable[str]) -> None:
    """Raise StorageError where ``names`` cannot be written, or one of them is there and not of a report of ours."""
    require_writable(folder, "--output")
    ours = _listed(folder)
    foreign = [name for name in (*names, LIST) if (folder / name).exists() and name not in (*ours, LIST)]
    if (folder / LIST).exists() and not ours:
        foreign.append(LIST)
    if foreign:
        raise StorageError(
            f"{folder / foreign[0]} exists and was not written by scu-trainer report; nothing is overwritten: "
            f"give another --output, or move it away"
        )


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write or replace ``files``, each whole or not at all, after ``check_folder``. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = _listed(folder)
    if set(files) - set(ours):  # before the files: a killed report must know its own again
        write_json(folder / LIST, {"format": FORMAT, "files": sorted({*ours, *files})})
    for name, content in files.items():
        _replace(folder / name, content)


def forget_old(folder: Path, names: Iterable[str]) -> None:
    """Remove what an earlier report wrote and this one, with ``names``, has no more."""
    kept = sorted(names)
    for name in set(_listed(folder)) - set(kept):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / LIST, {"format": FORMAT, "files": kept})


def plot_files(folder: Path) -> list[str]:
    """Names of the files of plots that the report has there."""
    return [name for name in _listed(folder) if name.endswith((".png", ".svg"))]


def repeat_file(number: int, run: str) -> str:
    """The file of settings of one of several runs: a name that is known again as ours, whatever the run is called."""
    return f"repeat-{number}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', run).strip('-') or 'run'}.yaml"


def _listed(folder: Path) -> list[str]:
    """Names that a report of ours wrote there; only plain names of the kinds that we write count."""
    path = folder / LIST
    if not path.is_file():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return []
    return [str(name) for name in content.get("files") or [] if OURS.fullmatch(str(name))]


def _replace(path: Path, content: str | bytes) -> None:
    """No sync to the disk: a report can be made again."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        beside.write_bytes(redact(content).encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:
        fix = f"{make_room()} or give another --output"
        raise StorageError(f"cannot write {path}: {error.strerror}; {fix}") from error
    finally:
        beside.unlink(missing_ok=True)
