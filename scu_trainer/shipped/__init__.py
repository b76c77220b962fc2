"""Recipes and launch files that the package brings, found by name.

The folders here are links into the checkout, so each file is there once; in a wheel they are the files themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from scu_trainer.errors import SettingsError, did_you_mean

ROOT = (Path(__file__).parent / "recipes").resolve().parent
"""Holds the folders: the checkout, or this folder of an installed package."""

FOLDERS = {
    "recipes": "jobs, for --config",
    "ds_configs": "DeepSpeed's part of a job, for --deepspeed",
    "accelerate_configs": "for accelerate launch --config_file",
}
SUFFIXES = (".yaml", ".json")


def files(folder: str) -> dict[str, Path]:
    """Of one of FOLDERS, by name without suffix, in order."""
    return {path.stem: path for path in sorted((ROOT / folder).iterdir()) if path.suffix in SUFFIXES}


def recipe(word: str) -> str:
    """Path of what was typed behind --config: a file, or a recipe's name. Raises SettingsError for a name of neither;
    a path that leads nowhere is left to who opens it."""
    found = _found("recipes", word)
    if found is None and _is_name(word):
        raise SettingsError(_unknown(word, ["recipes"]) + "; or give the path of a file")
    return word if found is None else str(found)


def deepspeed(word: str) -> str:
    """Path of what was typed behind --deepspeed: a file, or a name such as zero2. Raises SettingsError for a name of
    neither; the configuration itself as text, and a path that leads nowhere, are left to who reads them."""
    found = _found("ds_configs", word)
    if found is None and _is_name(word):
        raise SettingsError(_unknown(word, ["ds_configs"]) + "; or give the path of a JSON file")
    return word if found is None else str(found)


def here(folder: str) -> Path:
    """The folder of that name where one stands, else the one that the package brings."""
    return Path(folder) if Path(folder).is_dir() else ROOT / folder


def one(name: str) -> Path:
    """The file of that name in any folder. Raises SettingsError."""
    for folder in FOLDERS:
        found = _shipped(folder, name)
        if found is not None:
            return found
    raise SettingsError(_unknown(name, FOLDERS))


def about(path: Path) -> str:
    """A sentence: the first of the comment that a file begins with; of a JSON file, which has none, what it sets."""
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


def _found(folder: str, word: str) -> Path | None:
    """What is here goes first, so that a file of one's own may bear any name."""
    return None if Path(word).is_file() else _shipped(folder, word)


def _shipped(folder: str, word: str) -> Path | None:
    """By name, with or without its suffix, and by the path that it has in a checkout."""
    for path in files(folder).values():
        if word in (path.stem, path.name, f"{folder}/{path.name}"):
            return path
    return None


def _is_name(word: str) -> bool:
    return re.fullmatch(r"[\w-]+", word) is not None and not Path(word).exists()


def _unknown(name: str, folders: Iterable[str]) -> str:
    known = [known for folder in folders for known in files(folder)]
    near = did_you_mean(name, known)
    return f"{name!r} is no file here, and no name in {' or '.join(folders)}{near}; known: {', '.join(known)}"
