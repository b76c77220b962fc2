"""Writes an imported configuration as a YAML file, and summarizes it for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.names.tools import Imported, Key, merged_settings
from scu_trainer.secrets import redact_data
from scu_trainer.settings.base import short


def as_yaml(converted: Imported, overrides: Mapping[str, Any], path: Path) -> str:
    return "\n".join(_lines(converted, overrides, path)) + "\n"


def _lines(converted: Imported, overrides: Mapping[str, Any], path: Path) -> Iterator[str]:
    title = converted.tool.TITLE
    yield f"# {path.name} of {title}, by scu-trainer import."
    keys_by_field = _keys_of_fields(converted)
    for name, value in {**overrides, **merged_settings(converted.keys)}.items():
        remarks = ["set by a flag"] if name in overrides else []
        remarks += [_key_and_value(key) for key in keys_by_field.get(name, ()) if name in overrides or not key.is_ours]
        yield yaml_entry(name, overrides.get(name, value), "; ".join(remarks))
    defaults = {name: value for name, value in converted.defaults.items() if name not in overrides}
    if defaults:
        yield f"\n# Defaults of {title} for what its file does not set:"
        yield from (yaml_entry(name, value, "") for name, value in defaults.items())
    yield from _commented("Without a counterpart:", [_key_with_note(key) for key in converted.lost])
    yield from _commented("No action needed:", [_key_with_note(key) for key in _idle_keys(converted)])
    yield from _commented("Different here:", [*_differing(converted), *converted.differences])


def _keys_of_fields(converted: Imported) -> dict[str, list[Key]]:
    keys: dict[str, list[Key]] = {}
    for key in converted.keys:
        for name in key.meaning.settings:
            keys.setdefault(name, []).append(key)
    return keys


def yaml_entry(name: str, value: Any, comment: str) -> str:
    """Return an entry of a YAML file, with the comment, if there is one, at the end of its first line."""
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000).rstrip()
    first, *rest = text.split("\n")
    return "\n".join([f"{first}  # {comment}" if comment else first, *rest])


def _commented(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"\n# {title}"
        yield from (f"#   {line}" for line in lines)


def _idle_keys(converted: Imported) -> list[Key]:
    return [key for key in converted.keys if not key.meaning.settings and not key.meaning.is_lost]


def _differing(converted: Imported) -> list[str]:
    return [
        _key_with_note(key)
        for key in converted.keys
        if key.meaning.settings and key.meaning.said and not key.meaning.is_lost
    ]


def _key_and_value(key: Key) -> str:
    return f"{key.name}: {_one_line(redact_data({key.name: key.value})[key.name])}"


def _key_with_note(key: Key) -> str:
    return f"{_key_and_value(key)}: {key.meaning.said}"


def _one_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).splitlines()[0]
    return text if len(text) <= 60 else short(text)


def summary(converted: Imported, overrides: Mapping[str, Any], path: Path, output: Path) -> str:
    """Return the text for the terminal: how many keys are taken over, and which have no counterpart or differ here."""
    taken = [key for key in converted.keys if key.meaning.settings and not key.meaning.is_lost]
    lines = [
        f"{path} of {converted.tool.TITLE}: {len(converted.keys)} keys, {len(taken)} taken over, "
        f"{len(_idle_keys(converted))} that need no action, {len(converted.lost)} without a counterpart",
        *(f"  without a counterpart: {_key_with_note(key)}" for key in converted.lost),
        *(f"  different here: {line}" for line in (*_differing(converted), *converted.differences)),
    ]
    if converted.defaults:
        lines.append(
            f"  defaults of {converted.tool.TITLE}: "
            f"{', '.join(name for name in converted.defaults if name not in overrides)}"
        )
    return "\n".join([*lines, f"written: {output}", f"next: scu-trainer train --config {shlex.quote(str(output))}"])
