"""Find and remove local paths in published data: they are useless to others, and reveal user and folder names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

LOCAL = "[local]"
"""Replaces the folders of a path, so that only its last part is published."""

_PATH_IN_TEXT = re.compile(r"(?<![\w:/.\]])(?:~|/[^\s/'\":,;()\[\]]+)(?:/[^\s/'\":,;()\[\]]+)+")
"""An absolute path of two or more parts inside a text, but not the path of a URL."""


def is_local(name: Optional[str], run: Optional[Path] = None) -> bool:
    """Return whether a model or dataset is a path and not a Hub id. ``run`` is the folder with the file that names it.
    Relative paths are also tried from all folders above it, because training may have been started in one of them."""
    if not name:
        return False
    if name.startswith((".", "/", "~", LOCAL)) or name.count("/") > 1 or Path(name).expanduser().exists():
        return True
    return run is not None and any((above / name).exists() for above in run.absolute().parents)


def without_local_paths(data: Any) -> Any:
    """Return a copy of JSON-like ``data`` with each absolute path shortened to ``[local]/`` and its last part."""
    if isinstance(data, str):
        is_path = data.startswith(("/", "~/")) and "\n" not in data and data.strip("/") != ""
        return _shortened(data) if is_path else _PATH_IN_TEXT.sub(lambda found: _shortened(found[0]), data)
    if isinstance(data, Mapping):
        return {key: without_local_paths(value) for key, value in data.items()}
    return [without_local_paths(item) for item in data] if isinstance(data, (list, tuple)) else data


def public_name(name: str) -> str:
    """Return the name of a model or dataset for publication; an absolute path is shortened to its last part."""
    return str(without_local_paths(name)).removeprefix(f"{LOCAL}/")


def _shortened(path: str) -> str:
    return f"{LOCAL}/{path.rstrip('/').rpartition('/')[2]}"
