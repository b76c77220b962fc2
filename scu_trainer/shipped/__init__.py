"""Find recipes and launch files of the package by name.

In a checkout the folders here are links to the top-level folders, so each file exists once; a wheel contains the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from scu_trainer.errors import SettingsError, did_you_mean

ROOT = (Path(__file__).parent / "recipes").resolve().parent
"""The parent of the folders: the checkout, or this folder of an installed package."""

FOLDERS = {
    "recipes": "jobs, for --config",
    "ds_configs": "DeepSpeed's part of a job, for --deepspeed",
    "accelerate_configs": "for accelerate launch --config_file",
}
SUFFIXES = (".yaml", ".json")


def files(folder: str) -> dict[str, Path]:
    """Return the files of one of FOLDERS, sorted, by name without suffix."""
    return {path.stem: path for path in sorted((ROOT / folder).iterdir()) if path.suffix in SUFFIXES}


def recipe(word: str) -> str:
    """Return the path for a value of --config, which is a file or the name of a recipe.

    Raises SettingsError for a name that is neither. A path that does not exist is returned as it is.
    """
    return _path("recipes", word, "a file")


def deepspeed(word: str) -> str:
    """Return the path for a value of --deepspeed, which is a file or a name such as zero2.

    Raises SettingsError for a name that is neither. A configuration given as text, and a path that does not exist, are
    returned as they are.
    """
    return _path("ds_configs", word, "a JSON file")


def here(folder: str) -> Path:
    """Return the folder of this name in the working directory if there is one, else the one of the package."""
    return Path(folder) if Path(folder).is_dir() else ROOT / folder


def one(name: str) -> Path:
    """Return the file of the package with this name, from any folder. Raises SettingsError if there is none."""
    for folder in FOLDERS:
        found = _shipped(folder, name)
        if found is not None:
            return found
    raise SettingsError(_unknown(name, FOLDERS))


def about(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file; for JSON, which has no comments, what it sets."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        zero = content.get("zero_optimization")
        return _about_zero(zero) if zero else ", ".join(f"{name} {content[name]}" for name in [*content][:5])
    lines = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))[0].splitlines()
    text = " ".join(line.removeprefix("#").strip() for line in lines).removeprefix("When to use: ")
    return re.split(r"(?<=[^.]{3}[.])\s+(?=[A-Z`]|num_processes)", text)[0].rstrip(".")


def _about_zero(zero: dict) -> str:
    moved = {"offload_param": "weights", "offload_optimizer": "optimizer state"}
    away = [what for key, what in moved.items() if zero.get(key, {}).get("device", "none") != "none"]
    return f"ZeRO-{zero['stage']}" + (f" with {' and '.join(away)} in main memory" if away else "")


def _path(folder: str, word: str, what: str) -> str:
    """Return the path of the file of the package with this name. The user's own files take precedence."""
    found = None if Path(word).is_file() else _shipped(folder, word)
    if found is None and re.fullmatch(r"[\w-]+", word) and not Path(word).exists():
        raise SettingsError(f"{_unknown(word, [folder])}; or give the path of {what}")
    return word if found is None else str(found)


def _shipped(folder: str, word: str) -> Path | None:
    """Return the file with this name, with or without suffix, or with this path in a checkout; None without one."""
    for path in files(folder).values():
        if word in (path.stem, path.name, f"{folder}/{path.name}"):
            return path
    return None


def _unknown(name: str, folders: Iterable[str]) -> str:
    known = [known for folder in folders for known in files(folder)]
    near = did_you_mean(name, known)
    return f"{name!r} is not a file here, nor a name in {' or '.join(folders)}{near}; known: {', '.join(known)}"
