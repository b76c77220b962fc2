"""Which runs can be talked to."""

from __future__ import annotations

from pathlib import Path

MODEL_FILES = ("adapter_config.json", "config.json")


def can_answer(folder: Path) -> bool:
    """Whether ``folder`` holds a model or an adapter."""
    return any((folder / name).is_file() for name in MODEL_FILES)
