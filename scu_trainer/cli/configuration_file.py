"""The file of a configuration: YAML or JSON, ours, that of a run or of another program, checked as it is read."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import yaml

from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.tools import TOOLS, imported, owner_of, signs_of
from scu_trainer.cli.names.translation import is_mixture, notes_of, translated_entries
from scu_trainer.errors import SettingsError, nearest
from scu_trainer.run_files import read_regular
from scu_trainer.settings.base import check_text, hints_of, require, short
from scu_trainer.settings.mixture import FILE_SUFFIXES

if TYPE_CHECKING:
    from transformers import HfArgumentParser


MOST_BYTES, MOST_VALUES, DEEPEST = 2**20, 100_000, 50
"""Limits of a configuration: size of the file, values with all aliases expanded, depth of nesting."""

FALSE_IS = {
    **dict.fromkeys(
        ("mixed_precision", "logging_strategy", "eval_strategy", "evaluation_strategy", "save_strategy"), "no"
    ),
    **dict.fromkeys(("preflight", "spike_guard", "divergence"), "off"),
}
"""Fields with a choice ``no`` or ``off``, which is false in YAML unless it stands in quotes."""

DATA_SUFFIXES = {*FILE_SUFFIXES} - {".txt", ".json"}
"""Of files that hold data and are never a configuration."""


@dataclasses.dataclass
class InFile:
    """Entries of a file by our names, and notes on those that were translated. ``defaults``: entries that are not in
    the file but defaults of the program that it is for."""

    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_as: list[str] = dataclasses.field(default_factory=list)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


def checked_entries(config: str, parser: HfArgumentParser, names: set[str]) -> InFile:
    """Checked entries of a file by field."""
    takes_list, takes_mapping = _containers(parser)
    found = named_as_here(config, names)
    for name, value in found.entries.items():
        if name not in names:
            raise SettingsError(f"{config}: unknown key {short(name)}{nearest(name, names)}")
        if is_mixture(name, value):
            _check_content(f"{config}: {name}", value)
        else:
            _check_shape(f"{config}: {name}", value, name in takes_list, name in takes_mapping)
    return found


def named_as_here(config: str, names: Collection[str]) -> InFile:
    """Entries of a file by our names, and what was read as what. Raises SettingsError."""
    entries: dict[str, Any] = {}
    for key, value in _content(config).items():
        name = str(key).replace("-", "_")
        if name in entries:
            raise SettingsError(f"{config}: {name} appears twice, once with hyphens; keep one of them")
        entries[name] = FALSE_IS.get(name, value) if value is False else value
    try:
        tool = owner_of(entries, names)
        return _of_us(entries, names, config) if tool is None else _of_another(tool, entries, names, config)
    except SettingsError as error:
        raise SettingsError(f"{config}: {error}") from error


def _of_us(entries: Mapping[str, Any], names: Collection[str], config: str) -> InFile:
    found, read_as = translated_entries(entries, names)
    for tool in signs_of(entries, names):
        title = TOOLS[tool].title
        command = f"scu-trainer import {shlex.quote(config)} --from {tool}"
        read_as.append(f"scu-trainer's defaults apply; for those of {title}: {command}")
    return InFile(found, read_as)


def _of_another(tool: str, entries: Mapping[str, Any], names: Collection[str], config: str) -> InFile:
    """A file of another program, where all that it asks for is here as well."""
    found = imported(tool, entries, {*names, *known_names()}, Path(config).parent)
    if found.lost:
        lost = "; ".join(f"{key.name}: {key.meaning.said}" for key in found.lost)
        raise SettingsError(
            f"of {found.tool.title}, with {len(found.lost)} of {len(found.keys)} keys that have no counterpart "
            f"({lost}); take them out, or write what carries over: scu-trainer import {shlex.quote(config)}"
        )
    read_as = [f"a file of {found.tool.title}", *notes_of(found.keys), *found.differences]
    return InFile(found.settings, read_as, found.defaults)


def _content(config: str) -> dict[str, Any]:
    """The mapping of a file, or of the configuration that a run was made with."""
    content = read_file(Path(config))
    if {"configuration", "versions", "data"} <= {*content}:  # training_config.json of a run
        content = content["configuration"]
        if not isinstance(content, dict):
            raise SettingsError(
                f"{config}: configuration is a {type(content).__name__}; it must be a mapping of fields"
            )
        content["report_to"] = content.get("report_to") or "none"  # an empty list in a file means the default
        content.pop("seeds", None)  # a run has one seed, and its file names both fields
    return content


def _containers(parser: HfArgumentParser) -> tuple[set[str], set[str]]:
    """Fields that take several values, and fields that take a mapping."""
    several = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    hints = {name: hint for kind in parser.dataclass_types for name, hint in hints_of(kind).items()}
    return several, {name for name, hint in hints.items() if "dict" in str(hint)}


def _check_shape(place: str, value: Any, takes_list: bool, takes_mapping: bool) -> None:
    """Raise SettingsError for a value that no flag could give."""
    if isinstance(value, dict):
        require(takes_mapping, f"{place} is a mapping; it takes {'a list of values' if takes_list else 'one value'}")
        _check_content(place, value)
    elif isinstance(value, list):
        require(
            takes_list or len(value) <= 1,
            f"{place} is a list of {len(value)}; it takes {'a mapping' if takes_mapping else 'one value'}",
        )
        require(all(map(_is_word, value)), f"{place} has an entry that is neither text nor a number; take it out")
    else:
        require(
            value is None or _is_word(value),
            f"{place} is a {type(value).__name__}; it takes text, a number, true or false",
        )


def _check_content(place: str, value: Any) -> None:
    """Raise SettingsError for content that JSON cannot hold."""
    if isinstance(value, dict):
        require(all(isinstance(key, str) for key in value), f"{place} has a key that is not text; put it in quotes")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_content(place, item)
    else:
        is_finite = not isinstance(value, float) or math.isfinite(value)
        is_plain = value is None or (_is_word(value) and not isinstance(value, date))
        require(is_plain and is_finite, f"{place} holds {short(value)}; it takes text, finite numbers, true or false")


def _is_word(value: Any) -> bool:
    return isinstance(value, (str, int, float, date))


def read_file(path: Path) -> dict[str, Any]:
    """Top-level entries of a YAML or JSON file. Raises SettingsError, also for a key that stands there twice."""
    check_text("config", str(path), is_name=True)
    is_data = path.suffix.lower() in DATA_SUFFIXES
    require(not is_data, f"{path} is named like data, not like a configuration{_as_data(path)}")
    try:
        content = read_regular(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read the configuration {path}: {reason}{_another_file(path)}") from error
    try:
        entries = _loaded(content)
    except RecursionError as error:
        raise SettingsError(f"{path} nests too deeply; at most {DEEPEST} levels are allowed") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # the latter two for what a tag such as !!int says
        said = " ".join(str(error).split()).replace(' in "<unicode string>"', "")[:1000]
        tab = "; YAML takes spaces where this line has a tab" if r"character '\t'" in said else ""
        raise SettingsError(f"{path} is not valid YAML or JSON: {said}{tab}{_as_text(path)}") from error
    if not isinstance(entries, dict):
        found = "nothing" if entries is None else type(entries).__name__
        raise SettingsError(f"{path} holds {found}; it must hold lines like 'learning_rate: 2e-4'{_as_text(path)}")
    return entries


def _another_file(path: Path) -> str:
    """What to type instead of a path that cannot be read."""
    settings = path / "training_config.json"
    if os.path.isfile(settings):  # unlike pathlib's, it has no error of its own where nothing may be looked at
        return f"; give {settings}, the settings of that run"
    beside = [] if os.path.exists(path) else [other.name for other in path.parent.glob("*") if os.path.isfile(other)]
    return f"{nearest(path.name, beside)}; give a YAML or JSON file"


def _as_data(path: Path) -> str:
    return f"; to use it as data, write --dataset {path}"


def _as_text(path: Path) -> str:
    """Only for .txt and .json, which may be a configuration as well."""
    return _as_data(path) if path.suffix.lower() in (".txt", ".json") else ""


def _loaded(content: str) -> Any:
    loader = _UniqueKeys(content)
    try:
        root = loader.get_single_node()
        _require_small(root)
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _require_small(root: Optional[yaml.Node]) -> None:
    """Raise YAMLError for too many values, counting what aliases expand to."""
    values, level = 0, [root]
    for _ in range(DEEPEST):
        level = [child for node in level for child in _children(node)]
        values += len(level)
        if values > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values; write out what is needed")
        if not level:
            return
    raise yaml.YAMLError(f"it nests deeper than {DEEPEST} levels, or an alias is inside the value that it names")


def _children(node: Optional[yaml.Node]) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (part for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently take the last."""

    def construct_mapping(self, node, deep=False):
        seen: set[Any] = set()
        for key_node, _ in getattr(node, "value", ()):
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is not a word, line {key_node.start_mark.line + 1}; write NAME: VALUE")
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} appears twice, line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)
