"""Names of all fields, found without slow imports, so that a typo is reported at once."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Optional

from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    RetentionSettings,
    SafetySettings,
)
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.settings.tasks import KINDS, TaskSettings

PREFIX = "scu_"
"""Prefix of the fields of ``RegularizationSettings`` on the command line."""

SETTINGS = {
    "task": TaskSettings,
    "model": ModelSettings,
    "data": DataSettings,
    "regularization": RegularizationSettings,
    "memory": MemorySettings,
    "curriculum": CurriculumSettings,
    "efficiency": EfficiencySettings,
    "safety": SafetySettings,
    "retention": RetentionSettings,
}
"""Settings that every job has, by the title of their group in the help. A task may have its own as well."""


def known_names() -> frozenset[str]:
    """Return our fields, those of ``TrainingArguments``, and for each ``no_NAME``, which switches it off."""
    names = {*own_names(), *stock_fields()}
    return frozenset(names | {f"no_{name}" for name in names})


def own_names() -> set[str]:
    kinds = [*SETTINGS.values(), *(kind.settings for kind in KINDS.values() if kind.settings is not None)]
    prefixes = {RegularizationSettings: PREFIX}
    return {"scu", *(prefixes.get(kind, "") + item.name for kind in kinds for item in fields(kind))}


def stock_number(name: str) -> Optional[type]:
    """Return int or float for a field of ``TrainingArguments`` that takes nothing else; None for all other fields."""
    parts = {part.strip() for part in stock_fields().get(name, "").split("|")} - {"None"}
    return {"int": int, "float": float}.get(parts.pop()) if len(parts) == 1 else None


@functools.cache
def stock_fields() -> Mapping[str, str]:
    """Return the annotation of each field of the installed ``TrainingArguments``, parsed from its source, because its
    module imports torch. Empty if there is no source; then a typo is found once the class is imported."""
    spec = importlib.util.find_spec("transformers")
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name("training_args.py")
    if path is None or not path.is_file():
        return {}
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    lines = [item for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]
    return {item.target.id: ast.unparse(item.annotation) for item in lines}
