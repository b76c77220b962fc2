"""Reads and checks a configuration file in YAML or JSON: one of ours, one of a run, or one of another program."""

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
from scu_trainer.cli.names.tools import TOOLS, import_configuration, owner_of, signs_of
from scu_trainer.cli.names.translation import is_mixture, notes_of, translated_entries
from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.run_files import read_regular
from scu_trainer.settings.base import check_text, field_types_of, require, short
from scu_trainer.settings.mixture import FILE_SUFFIXES

if TYPE_CHECKING:
    from transformers import HfArgumentParser


MOST_BYTES, MOST_VALUES, MOST_LEVELS = 2**20, 100_000, 50
"""Limits of a configuration file: its size, its number of values with all aliases expanded, its depth of nesting."""

FALSE_IS = {
    **dict.fromkeys(
        ("mixed_precision", "logging_strategy", "eval_strategy", "evaluation_strategy", "save_strategy"), "no"
    ),
    **dict.fromkeys(("preflight", "spike_guard", "divergence"), "off"),
}
"""Fields with the choice ``no`` or ``off``, which YAML reads as false unless it is in quotes."""

DATA_SUFFIXES = {*FILE_SUFFIXES} - {".txt", ".json"}
"""Suffixes of files that hold data and are never a configuration."""


@dataclasses.dataclass
class FileEntries:
    """Entries of a file by our names, and notes on those that were translated. ``defaults``: entries that are not in
    the file, but are defaults of the program that the file was written for."""

    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_as: list[str] = dataclasses.field(default_factory=list)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


def checked_entries(config: str, parser: HfArgumentParser, names: set[str]) -> FileEntries:
    """Return the entries of a file by field, with names and types checked. Raises SettingsError."""
    takes_list, takes_mapping = _container_fields(parser)
    in_file = entries_by_our_names(config, names)
    for name, value in in_file.entries.items():
        if name not in names:
            raise SettingsError(f"{config}: unknown key {short(name)}{did_you_mean(name, names)}")
        if is_mixture(name, value):
            _check_content(f"{config}: {name}", value)
        else:
            _check_shape(f"{config}: {name}", value, name in takes_list, name in takes_mapping)
    return in_file


def entries_by_our_names(config: str, names: Collection[str]) -> FileEntries:
    """Return the entries of a file by our names, and notes on the translation. Raises SettingsError."""
    entries: dict[str, Any] = {}
    for key, value in _configuration_in(config).items():
        name = str(key).replace("-", "_")
        if name in entries:
            raise SettingsError(f"{config}: {name} appears twice, once with hyphens; keep one of them")
        entries[name] = FALSE_IS.get(name, value) if value is False else value
    try:
        tool = owner_of(entries, names)
        return _own_entries(entries, names, config) if tool is None else _imported_entries(tool, entries, names, config)
    except SettingsError as error:
        raise SettingsError(f"{config}: {error}") from error


def _own_entries(entries: Mapping[str, Any], names: Collection[str], config: str) -> FileEntries:
    translated, read_as = translated_entries(entries, names)
    for tool in signs_of(entries, names):
        title = TOOLS[tool].TITLE
        command = f"scu-trainer import {shlex.quote(config)} --from {tool}"
        read_as.append(f"scu-trainer's defaults apply; for those of {title}: {command}")
    return FileEntries(translated, read_as)


def _imported_entries(tool: str, entries: Mapping[str, Any], names: Collection[str], config: str) -> FileEntries:
    """Translate a file of another program. Raises SettingsError if one of its keys has no counterpart."""
    imported = import_configuration(tool, entries, {*names, *known_names()}, Path(config).parent)
    if imported.lost:
        lost = "; ".join(f"{key.name}: {key.meaning.said}" for key in imported.lost)
        raise SettingsError(
            f"this is a file of {imported.tool.TITLE}, and {len(imported.lost)} of its {len(imported.keys)} keys have "
            f"no counterpart ({lost}); remove them, or convert the rest: scu-trainer import {shlex.quote(config)}"
        )
    read_as = [f"a file of {imported.tool.TITLE}", *notes_of(imported.keys), *imported.differences]
    return FileEntries(imported.settings, read_as, imported.defaults)


def _configuration_in(config: str) -> dict[str, Any]:
    """Return the entries of a file. In a training_config.json, these are the entries of its configuration."""
    content = read_file(Path(config))
    if {"configuration", "versions", "data"} <= {*content}:  # training_config.json of a run
        content = content["configuration"]
        if not isinstance(content, dict):
            raise SettingsError(
                f"{config}: configuration is a {type(content).__name__}; it must be a mapping of fields"
            )
        content["report_to"] = content.get("report_to") or "none"  # an empty list in a file means the default
        content.pop("seeds", None)  # the file of a run holds seed and seeds, and only its seed applies
        content.pop("resume_from_checkpoint", None)  # a repeated run starts from the beginning
    return content


def _container_fields(parser: HfArgumentParser) -> tuple[set[str], set[str]]:
    """Return the fields that take several values, and the fields that take a mapping."""
    several = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    hints = {name: hint for kind in parser.dataclass_types for name, hint in field_types_of(kind).items()}
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
        require(all(map(_is_scalar, value)), f"{place} has an entry that is neither text nor a number; take it out")
    else:
        require(
            value is None or _is_scalar(value),
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
        is_plain = value is None or (_is_scalar(value) and not isinstance(value, date))
        require(is_plain and is_finite, f"{place} holds {short(value)}; it takes text, finite numbers, true or false")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float, date))


def read_file(path: Path) -> dict[str, Any]:
    """Return the top-level entries of a YAML or JSON file. Raises SettingsError, also for a duplicate key."""
    check_text("config", str(path), is_name=True)
    is_data = path.suffix.lower() in DATA_SUFFIXES
    require(not is_data, f"{path} is named like data, not like a configuration{_data_advice(path)}")
    try:
        content = read_regular(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read the configuration {path}: {reason}{_path_advice(path)}") from error
    try:
        entries = _parse_yaml(content)
    except RecursionError as error:
        raise SettingsError(f"{path} nests too deeply; at most {MOST_LEVELS} levels are allowed") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # the latter two come from tags such as !!int
        problem = " ".join(str(error).split()).replace(' in "<unicode string>"', "")[:1000]
        tab = "; indent with spaces instead of tabs" if r"character '\t'" in problem else ""
        raise SettingsError(f"{path} is not valid YAML or JSON: {problem}{tab}{_data_advice_for_text(path)}") from error
    if not isinstance(entries, dict):
        kind = "nothing" if entries is None else type(entries).__name__
        raise SettingsError(
            f"{path} holds {kind}; it must hold lines like 'learning_rate: 2e-4'{_data_advice_for_text(path)}"
        )
    return entries


def _path_advice(path: Path) -> str:
    """Return what to type instead of a path that cannot be read."""
    settings = path / "training_config.json"
    if os.path.isfile(settings):  # pathlib's is_file raises PermissionError in a folder that may not be read
        return f"; give {settings}, the settings of that run"
    siblings = [] if os.path.exists(path) else [other.name for other in path.parent.glob("*") if os.path.isfile(other)]
    return f"{did_you_mean(path.name, siblings)}; give a YAML or JSON file"


def _data_advice(path: Path) -> str:
    return f"; to use it as data, write --dataset {path}"


def _data_advice_for_text(path: Path) -> str:
    """Return the advice for .txt and .json files, which may hold data or a configuration."""
    return _data_advice(path) if path.suffix.lower() in (".txt", ".json") else ""


def _parse_yaml(content: str) -> Any:
    loader = _UniqueKeys(content)
    try:
        root = loader.get_single_node()
        _require_small(root)
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _require_small(root: Optional[yaml.Node]) -> None:
    """Raise YAMLError if there are too many values or levels, with all aliases expanded."""
    values, level = 0, [root]
    for _ in range(MOST_LEVELS):
        level = [child for node in level for child in _children(node)]
        values += len(level)
        if values > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {MOST_VALUES:,} values; write the needed values out")
        if not level:
            return
    raise yaml.YAMLError(f"it nests deeper than {MOST_LEVELS} levels, or an alias refers to a value that contains it")


def _children(node: Optional[yaml.Node]) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (part for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class _UniqueKeys(yaml.SafeLoader):
    """A loader that refuses duplicate keys; the stock loader silently takes the last one."""

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
