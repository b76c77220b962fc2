"""Configuration files of other programs: which program a file is for, and what each of its keys means here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

from scu_trainer.cli.names import axolotl, llama_factory, trl, unsloth
from scu_trainer.cli.names.common import NAMES, NEEDED, VALUE_SPELLINGS
from scu_trainer.cli.names.known import own_names
from scu_trainer.cli.names.meaning import FALSE, TRUE, KeySource, Meaning, Table, read
from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings.base import as_typed

TOOLS = {"trl": trl, "llama-factory": llama_factory, "axolotl": axolotl, "unsloth": unsloth}
"""The module of each other program. ``TITLE``: its name. ``TABLE``: what its keys mean here. ``SIGNS``: keys that only
this program has. ``SECTIONS``: keys that only group other keys. ``defaults(source)``: its values for keys that are not
given. ``differences(source)``: sentences about what no key controls."""

ALL_KEYS: Table = {**{key: meant for tool in TOOLS.values() for key, meant in tool.TABLE.items()}, **NAMES}
"""Keys that are understood as flags and in our own files. Where programs differ, ``NAMES`` decides."""


COMMON = frozenset(
    "adapter_name_or_path assistant_only_loss attn_implementation bnb_4bit_quant_type bnb_4bit_use_double_quant "
    "cache_dir chat_template completion_only_loss device_map dtype early_stopping_patience eval_dataset load_in_8bit "
    "lora_alpha lora_dropout lora_r lora_target_modules loraplus_lr_ratio model_name_or_path model_revision "
    "modules_to_save offload_folder packing padding_free preprocessing_num_workers streaming trust_remote_code "
    "use_dora use_muon use_rslora".split()
)
"""Our names that files of other programs use as well, with the same meaning."""

OURS_BESIDE_WEAK_SIGNS = frozenset({"dataset", "model_name_or_path"})
"""Our names that outweigh weak signs of another program, although some programs use them as well."""

DATASET_KEYS = ("datasets", "pretraining_dataset")
"""Keys that list several datasets. Here they are one field, ``dataset``."""


@dataclass(frozen=True)
class Key:
    """One key with its value, and what they mean here."""

    name: str
    value: Any
    meaning: Meaning

    @property
    def is_ours(self) -> bool:
        return self.meaning.settings == {self.name: self.value} and not self.meaning.said


@dataclass
class Imported:
    """A configuration of another program. ``defaults``: settings that follow from the defaults of that program.
    ``differences``: sentences about what no key controls."""

    tool: ModuleType
    keys: list[Key] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.defaults, **merged_settings(self.keys)}

    @property
    def lost(self) -> list[Key]:
        return [key for key in self.keys if key.meaning.is_lost]


def tool_of(entries: Mapping[str, Any], known: Collection[str]) -> Optional[str]:
    """Return the program that a file is for, if not ours; None if no key tells. Raises SettingsError if several fit."""
    return _tool_with_most_signs(signs_of(entries, known))


def owner_of(entries: Mapping[str, Any], known: Collection[str]) -> Optional[str]:
    """Return the program that a file is for; None if the file is ours, even with a key or two of another program.
    Raises SettingsError if it could be for several programs."""
    signs_by_tool = signs_of(entries, known)
    return _tool_with_most_signs(
        {name: signs for name, signs in signs_by_tool.items() if _belongs_to(TOOLS[name], signs, entries)}
    )


def signs_of(entries: Mapping[str, Any], known: Collection[str]) -> dict[str, list[str]]:
    """Return the keys that only one program has, by program; a section only if it is a mapping (not ``lora: true``)."""
    signs_by_tool: dict[str, list[str]] = {}
    for name, tool in TOOLS.items():
        signs = sorted(tool.SIGNS & entries.keys() - {*known})
        signs = [sign for sign in signs if sign not in tool.SECTIONS or isinstance(entries[sign], Mapping)]
        if signs:
            signs_by_tool[name] = signs
    return signs_by_tool


def _belongs_to(tool: ModuleType, signs: Collection[str], entries: Mapping[str, Any]) -> bool:
    """Whether a file with these signs is for ``tool``. A section decides. Signs that are widely used, such as
    ``max_seq_length``, are weak. Strong signs must outnumber the names that only we have; weak signs count only if
    there are several and no such name."""
    if any(sign in tool.SECTIONS for sign in signs):
        return True
    strong = [sign for sign in signs if sign not in NAMES]
    ours = (own_names() & entries.keys()) - COMMON - tool.TABLE.keys()
    if strong:
        return len(strong) > len(ours)
    return len(signs) > 1 and not (ours | (OURS_BESIDE_WEAK_SIGNS & entries.keys()))


def _tool_with_most_signs(signs_by_tool: Mapping[str, list[str]]) -> Optional[str]:
    highest = max(map(len, signs_by_tool.values()), default=0)
    best = [name for name, signs in signs_by_tool.items() if len(signs) == highest]
    if len(best) > 1:
        listed = "; ".join(f"{', '.join(signs_by_tool[name])} of {TOOLS[name].TITLE}" for name in best)
        raise SettingsError(
            f"its keys belong to several programs ({listed}); choose one with --from {' or '.join(best)} of "
            "scu-trainer import"
        )
    return best[0] if best else None


def import_configuration(
    name: str, entries: Mapping[str, Any], known: Collection[str], folder: Path, typed: Collection[str] = ()
) -> Imported:
    """Return what every key of a file means here. ``typed``: fields set by flags, which override the file. Raises
    SettingsError for a kind of training that we do not have."""
    tool = TOOLS[name]
    flat = _flattened(entries, tool.SECTIONS)
    source = KeySource({key: value for key, value in flat.items() if key not in typed}, folder)
    keys = [Key(key, value, Meaning(said="overridden by a flag")) for key, value in flat.items() if key in typed]
    keys += keys_of(source, {**NAMES, **tool.TABLE}, known, typed)
    given = merged_settings(keys)
    defaults = {field: value for field, value in tool.defaults(source) if field not in given}
    return Imported(tool, keys, defaults, list(tool.differences(source)))


def _flattened(entries: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in entries.items():
        inside = value if key in sections and isinstance(value, Mapping) else {key: value}
        repeated = [name for name in inside if str(name).replace("-", "_") in flattened]
        if repeated:
            raise SettingsError(f"{repeated[0]} appears twice; keep one of them")
        flattened.update({str(name).replace("-", "_"): item for name, item in inside.items()})
    return flattened


def keys_of(source: KeySource, table: Table, known: Collection[str], typed: Collection[str] = ()) -> Iterator[Key]:
    """Yield what each key means, by ``table`` or as our name. Unreadable data are no error if a flag overrides them."""
    for name, value in source.entries.items():
        try:
            yield Key(name, value, _meaning(name, value, source, table, known))
        except SettingsError:
            if "dataset" not in typed or name not in DATASET_KEYS:
                raise
            yield Key(name, value, Meaning(said="overridden by the flag --dataset"))


def _meaning(name: str, value: Any, source: KeySource, table: Table, known: Collection[str]) -> Meaning:
    if value is None:
        return Meaning(said="it has no value")
    try:
        if name in table:
            return _in_our_values(read(table, name, value, source))
        if name in known:
            return _in_our_values(Meaning({name: value}))
    except (SettingsError, ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, SettingsError) else f"{value!r} is not a valid value here"
        raise SettingsError(f"{name}: {reason}") from error
    return Meaning(said=f"unknown here{did_you_mean(name, [*known, *table])}", is_lost=True)


def hint(name: str, known: Collection[str]) -> str:
    """Return a phrase with the most similar name, of ours or of another program."""
    return did_you_mean(name, [*(known_name for known_name in known if not known_name.startswith("no_")), *ALL_KEYS])


def our_spelling(name: str, value: Any) -> Union[dict[str, Any], str, None]:
    """Return our settings for a ``value`` of our field ``name`` that is spelled differently here, or a text that says
    what to do instead; None for any other value. An existing dataset of that name wins."""
    if not isinstance(value, str):
        return None
    if name == "resume" and value.lower() not in (*TRUE, *FALSE):  # a switch here, a path in other programs
        return {"resume_from_checkpoint": value}
    spelled = VALUE_SPELLINGS.get(name, {}).get(value.lower())
    return None if spelled and name == "dataset" and Path(value).exists() else spelled


def _in_our_values(meaning: Meaning) -> Meaning:
    settings: dict[str, Any] = {}
    for name, value in meaning.settings.items():
        spelled = our_spelling(name, value)
        if isinstance(spelled, str):
            raise SettingsError(f"{value} has no counterpart here: {spelled}")
        settings.update({name: value} if spelled is None else spelled)
    return Meaning(settings, meaning.said, meaning.is_lost)


def merged_settings(keys: Iterable[Key]) -> dict[str, Any]:
    """Return the settings of all keys. Raises SettingsError if two keys set a field to different values, if our name of
    a field and another one are both given, or if a key needs a field that no key sets."""
    settings: dict[str, Any] = {}
    setter: dict[str, Key] = {}
    needs: list[tuple[Key, str]] = []
    for key in keys:
        for name, value in key.meaning.settings.items():
            if value is NEEDED:
                needs.append((key, name))
            elif name in settings and (
                as_word(settings[name]) != as_word(value) or key.is_ours or setter[name].is_ours
            ):
                raise SettingsError(_conflict_message(setter[name], key, name))
            else:
                settings[name], setter[name] = value, key
    missing = next(((key, name) for key, name in needs if name not in settings), None)
    if missing is not None:
        raise SettingsError(f"this {missing[0].name} needs {missing[1]}; give both in the same place")
    return settings


def _conflict_message(first: Key, second: Key, field: str) -> str:
    if not (first.is_ours or second.is_ours):
        return f"{first.name} and {second.name} set {field} to two values here; keep one of them"
    other = first if second.is_ours else second
    return f"{other.name} sets {field} here, and both are given; keep one of them"


def as_word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(as_word, value))
    return as_typed(value)
