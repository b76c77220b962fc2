"""Names of folders of this machine: they mean nothing to anyone else, and tell where and as whom somebody works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

LOCAL = "[local]"
"""Stands for the folders of a path of which only the last part is published."""

_INSIDE = re.compile(r"(?<![\w:/.\]])(?:~|/[^\s/'\":,;()\[\]]+)(?:/[^\s/'\":,;()\[\]]+)+")
"""An absolute path of two parts or more inside of a text; the paths of web addresses are none."""


def is_local(name: Optional[str], run: Optional[Path] = None) -> bool:
    """Whether a model or dataset is a path and not an id of the Hub. ``run``: the folder whose files name it; training
    may have been started in another folder than this one, most often in one above the run."""
    if not name:
        return False
    if name.startswith((".", "/", "~", LOCAL)) or name.count("/") > 1 or Path(name).expanduser().exists():
        return True
    return run is not None and any((above / name).exists() for above in run.absolute().parents)


def without_local_paths(data: Any) -> Any:
    """A copy of JSON-like ``data`` in which each absolute path is ``[local]/`` and its last part, at any depth."""
    if isinstance(data, str):
        is_path = data.startswith(("/", "~/")) and "\n" not in data and data.strip("/") != ""
        return _as_whole(data) if is_path else _INSIDE.sub(lambda found: _as_whole(found[0]), data)
    if isinstance(data, Mapping):
        return {key: without_local_paths(value) for key, value in data.items()}
    return [without_local_paths(item) for item in data] if isinstance(data, (list, tuple)) else data


def public_name(name: str) -> str:
    """As somebody else would call a model or dataset: a path of this machine is its last part."""
    return str(without_local_paths(name)).removeprefix(f"{LOCAL}/")


def _as_whole(path: str) -> str:
    return f"{LOCAL}/{path.rstrip('/').rpartition('/')[2]}"
