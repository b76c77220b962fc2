"""An imported configuration as a YAML file, and as what a person reads of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.names.tools import Imported, Key, together
from scu_trainer.secrets import redact_data
from scu_trainer.settings.base import short


def as_yaml(found: Imported, own: Mapping[str, Any], path: Path) -> str:
    return "\n".join(_lines(found, own, path)) + "\n"


def _lines(found: Imported, own: Mapping[str, Any], path: Path) -> Iterator[str]:
    title = found.tool.title
    yield f"# {path.name} of {title}, by scu-trainer import."
    of_fields = _keys_of_fields(found)
    for name, value in {**own, **together(found.keys)}.items():
        said = ["typed"] if name in own else []
        said += [_shown(key) for key in of_fields.get(name, ()) if name in own or not key.is_ours]
        yield _line(name, own.get(name, value), "; ".join(said))
    defaults = {name: value for name, value in found.defaults.items() if name not in own}
    if defaults:
        yield f"\n# What {title} does where its file says nothing:"
        yield from (_line(name, value, "") for name, value in defaults.items())
    yield from _commented("Without a counterpart:", [_said(key) for key in found.lost])
    yield from _commented("No action needed:", [_said(key) for key in _idle(found)])
    yield from _commented("Otherwise here:", [*_notes(found), *found.differences])


def _keys_of_fields(found: Imported) -> dict[str, list[Key]]:
    keys: dict[str, list[Key]] = {}
    for key in found.keys:
        for name in key.meaning.settings:
            keys.setdefault(name, []).append(key)
    return keys


def _line(name: str, value: Any, comment: str) -> str:
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000).rstrip()
    first, *rest = text.split("\n")
    return "\n".join([f"{first}  # {comment}" if comment else first, *rest])


def _commented(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"\n# {title}"
        yield from (f"#   {line}" for line in lines)


def _idle(found: Imported) -> list[Key]:
    return [key for key in found.keys if not key.meaning.settings and not key.meaning.is_lost]


def _notes(found: Imported) -> list[str]:
    return [_said(key) for key in found.keys if key.meaning.settings and key.meaning.said and not key.meaning.is_lost]


def _shown(key: Key) -> str:
    return f"{key.name}: {_one_line(redact_data({key.name: key.value})[key.name])}"


def _said(key: Key) -> str:
    return f"{_shown(key)}: {key.meaning.said}"


def _one_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).splitlines()[0]
    return text if len(text) <= 60 else short(text)


def summary(found: Imported, own: Mapping[str, Any], path: Path, output: Path) -> str:
    """What became of how many keys; those without a counterpart by name."""
    taken = [key for key in found.keys if key.meaning.settings and not key.meaning.is_lost]
    lines = [
        f"{path} of {found.tool.title}: {len(found.keys)} keys, {len(taken)} taken over, {len(_idle(found))} that "
        f"need no action, {len(found.lost)} without a counterpart",
        *(f"  without a counterpart: {_said(key)}" for key in found.lost),
        *(f"  otherwise here: {line}" for line in (*_notes(found), *found.differences)),
    ]
    if found.defaults:
        lines.append(
            f"  {found.tool.title}'s own defaults: {', '.join(name for name in found.defaults if name not in own)}"
        )
    return "\n".join([*lines, f"written: {output}", f"next: scu-trainer train --config {shlex.quote(str(output))}"])
