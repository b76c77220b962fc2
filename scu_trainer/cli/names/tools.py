"""Configuration files of other programs: which program a file is for, and what each of its keys means here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.names import axolotl, llama_factory, trl, unsloth
from scu_trainer.cli.names.common import NAMES, NEEDED, PATHS, WORDS
from scu_trainer.cli.names.known import own_names
from scu_trainer.cli.names.meaning import FALSE, TRUE, Meaning, Source, Table, read
from scu_trainer.errors import SettingsError, nearest
from scu_trainer.settings.base import plain


@dataclass(frozen=True)
class Tool:
    """``signs``: keys that only this program has. ``defaults``: its values for keys that are not given.
    ``differences``: sentences about what no key controls."""

    title: str
    table: Table
    signs: Collection[str]
    defaults: Callable[[Source], Iterable[tuple[str, Any]]]
    differences: Callable[[Source], Iterable[str]]
    sections: Collection[str] = ()


TOOLS = {
    "trl": Tool("TRL", trl.TABLE, trl.SIGNS, trl.defaults, trl.differences),
    "llama-factory": Tool(
        "LLaMA-Factory", llama_factory.TABLE, llama_factory.SIGNS, llama_factory.defaults, llama_factory.differences
    ),
    "axolotl": Tool("Axolotl", axolotl.TABLE, axolotl.SIGNS, axolotl.defaults, axolotl.differences),
    "unsloth": Tool("Unsloth", unsloth.TABLE, unsloth.SIGNS, unsloth.defaults, unsloth.differences, unsloth.SECTIONS),
}

ANYWHERE: Table = {**{key: meant for tool in TOOLS.values() for key, meant in tool.table.items()}, **NAMES}
"""Keys as flags, and in files of ours. Where programs differ, ``NAMES`` decides."""


COMMON = frozenset(
    "adapter_name_or_path assistant_only_loss attn_implementation bnb_4bit_quant_type bnb_4bit_use_double_quant "
    "cache_dir chat_template completion_only_loss device_map dtype early_stopping_patience eval_dataset load_in_8bit "
    "lora_alpha lora_dropout lora_r lora_target_modules loraplus_lr_ratio model_name_or_path model_revision "
    "modules_to_save offload_folder packing padding_free preprocessing_num_workers streaming trust_remote_code "
    "use_dora use_muon use_rslora".split()
)
"""Names of ours that files of other programs have as well, with the same meaning."""

BESIDE_WEAK = frozenset({"dataset", "model_name_or_path"})
"""Names of ours that decide where only weak signs stand beside them."""

DATA = ("datasets", "pretraining_dataset")
"""Keys of several datasets, where ours is one field."""


@dataclass(frozen=True)
class Key:
    """One key with its value, and what became of it."""

    name: str
    value: Any
    meaning: Meaning

    @property
    def is_ours(self) -> bool:
        return self.meaning.settings == {self.name: self.value} and not self.meaning.said


@dataclass
class Imported:
    """``defaults``: settings that the other program has where nobody says anything. ``differences``: sentences."""

    tool: Tool
    keys: list[Key] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.defaults, **together(self.keys)}

    @property
    def lost(self) -> list[Key]:
        return [key for key in self.keys if key.meaning.is_lost]


def tool_of(entries: Mapping[str, Any], known: Collection[str]) -> Optional[str]:
    """The program that the file is for, given that it is not ours; None if no key tells. Raises SettingsError for keys
    of several programs."""
    return _most(signs_of(entries, known))


def owner_of(entries: Mapping[str, Any], known: Collection[str]) -> Optional[str]:
    """The program that the file is for; None if it is ours, which a key or two of another program do not change. Raises
    SettingsError if it could be for several programs."""
    found = signs_of(entries, known)
    return _most({name: signs for name, signs in found.items() if _is_theirs(TOOLS[name], signs, entries)})


def signs_of(entries: Mapping[str, Any], known: Collection[str]) -> dict[str, list[str]]:
    """Keys that only one other program has, by program. ``lora: true`` is no section, so no sign."""
    found: dict[str, list[str]] = {}
    for name, tool in TOOLS.items():
        signs = sorted(tool.signs & entries.keys() - {*known})
        signs = [sign for sign in signs if sign not in tool.sections or isinstance(entries[sign], Mapping)]
        if signs:
            found[name] = signs
    return found


def _is_theirs(tool: Tool, signs: Collection[str], entries: Mapping[str, Any]) -> bool:
    """Signs that are widely used, such as ``max_seq_length``, are weak. Strong signs must outnumber names that only we
    have; weak signs count only without such names."""
    if any(sign in tool.sections for sign in signs):
        return True
    strong = [sign for sign in signs if sign not in NAMES]
    ours = (own_names() & entries.keys()) - COMMON - tool.table.keys()
    if strong:
        return len(strong) > len(ours)
    return len(signs) > 1 and not (ours | (BESIDE_WEAK & entries.keys()))


def _most(found: Mapping[str, list[str]]) -> Optional[str]:
    most = max(map(len, found.values()), default=0)
    best = [name for name, signs in found.items() if len(signs) == most]
    if len(best) > 1:
        whose = "; ".join(f"{', '.join(found[name])} of {TOOLS[name].title}" for name in best)
        raise SettingsError(
            f"its keys belong to several programs ({whose}); choose one with --from {' or '.join(best)} of "
            "scu-trainer import"
        )
    return best[0] if best else None


def imported(
    name: str, entries: Mapping[str, Any], known: Collection[str], folder: Path, typed: Collection[str] = ()
) -> Imported:
    """What becomes of every key of a file. ``typed``: fields set by flags, which override the file. Raises
    SettingsError for a kind of training that we do not have."""
    tool = TOOLS[name]
    flat = _flat(entries, tool.sections)
    source = Source({key: value for key, value in flat.items() if key not in typed}, folder)
    keys = [Key(key, value, Meaning(said="typed instead")) for key, value in flat.items() if key in typed]
    keys += keys_of(source, {**NAMES, **tool.table}, known, typed)
    given = together(keys)
    defaults = {field: value for field, value in tool.defaults(source) if field not in given}
    return Imported(tool, keys, defaults, list(tool.differences(source)))


def _flat(entries: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entries.items():
        inside = value if key in sections and isinstance(value, Mapping) else {key: value}
        twice = [name for name in inside if str(name).replace("-", "_") in found]
        if twice:
            raise SettingsError(f"{twice[0]} appears twice; keep one of them")
        found.update({str(name).replace("-", "_"): one for name, one in inside.items()})
    return found


def keys_of(source: Source, table: Table, known: Collection[str], typed: Collection[str] = ()) -> Iterator[Key]:
    """What each key means by ``table``, else as a name of ours. Unreadable data is no error if ``dataset`` is typed."""
    for name, value in source.entries.items():
        try:
            yield Key(name, value, _meaning(name, value, source, table, known))
        except SettingsError:
            if "dataset" not in typed or name not in DATA:
                raise
            yield Key(name, value, Meaning(said="dataset is typed instead"))


def _meaning(name: str, value: Any, source: Source, table: Table, known: Collection[str]) -> Meaning:
    if value is None:
        return Meaning(said="no value there")
    try:
        if is_path(name, value):
            return Meaning({PATHS[name]: value})
        if name in table:
            return _in_our_words(read(table, name, value, source))
        if name in known:
            return _in_our_words(Meaning({name: value}))
    except (SettingsError, ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, SettingsError) else f"{value!r} is not a valid value here"
        raise SettingsError(f"{name}: {reason}") from error
    return Meaning(said=f"unknown here{nearest(name, [*known, *table])}", is_lost=True)


def hint(name: str, known: Collection[str]) -> str:
    """Phrase that names the nearest of our names and those of other programs."""
    return nearest(name, [*(one for one in known if not one.startswith("no_")), *ANYWHERE])


def is_path(name: str, value: Any) -> bool:
    return name in PATHS and isinstance(value, str) and value.lower() not in (*TRUE, *FALSE)


def is_word(name: str, value: Any) -> bool:
    """Whether ``value`` of our field ``name`` is spelled differently here; an existing dataset of that name wins."""
    found = isinstance(value, str) and value.lower() in WORDS.get(name, {})
    return found and not (name == "dataset" and Path(value).exists())


def _in_our_words(meaning: Meaning) -> Meaning:
    settings: dict[str, Any] = {}
    for name, value in meaning.settings.items():
        if not is_word(name, value):
            settings[name] = value
            continue
        words = WORDS[name][value.lower()]
        if isinstance(words, str):
            raise SettingsError(f"{value} names nothing here: {words}")
        settings.update(words)
    return Meaning(settings, meaning.said, meaning.is_lost)


def together(keys: Iterable[Key]) -> dict[str, Any]:
    """The settings of all keys. Raises SettingsError if two keys set a field to two values, or one needs another."""
    found: dict[str, Any] = {}
    whose: dict[str, Key] = {}
    needs: list[tuple[Key, str]] = []
    for key in keys:
        for name, value in key.meaning.settings.items():
            if value is NEEDED:
                needs.append((key, name))
            elif name in found and (as_word(found[name]) != as_word(value) or key.is_ours or whose[name].is_ours):
                raise SettingsError(_twice(whose[name], key, name))
            else:
                found[name], whose[name] = value, key
    missing = next(((key, name) for key, name in needs if name not in found), None)
    if missing is not None:
        raise SettingsError(f"this {missing[0].name} needs {missing[1]}; give both in the same place")
    return found


def _twice(first: Key, second: Key, field: str) -> str:
    if not (first.is_ours or second.is_ours):
        return f"{first.name} and {second.name} set {field} to two values here; keep one of them"
    other = first if second.is_ours else second
    return f"{other.name} sets {field} here, and both are given; keep one of them"


def as_word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(as_word, value))
    return plain(value)
