"""Translates names of other programs in our flags and files, with notes, or raises an error that explains a name.

>>> translated(["--epochs", "3", "--qlora", "--lr=1e-4"], {"num_train_epochs", "tuning", "learning_rate"})
(['--num_train_epochs=3', '--tuning=qlora', '--learning_rate=1e-4'], \
['epochs as num_train_epochs', 'qlora as tuning: qlora', 'lr as learning_rate'])
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scu_trainer.cli.names.common import NEEDED, VALUE_SPELLINGS
from scu_trainer.cli.names.meaning import KeySource
from scu_trainer.cli.names.tools import ALL_KEYS, Key, as_word, keys_of, merged_settings, our_spelling
from scu_trainer.cli.parsing import unknown_option
from scu_trainer.errors import SettingsError


def translated(flags: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the command line in our names, and a note for each translated name. ``known``: names of our flags. Raises
    SettingsError for a name without a counterpart, and for two names that contradict each other."""
    given = list(_split_flags(flags))
    entries = {name: value for name, value, _ in given if name}
    foreign = _foreign_keys(entries, known)
    words: list[str] = []
    for name, value, typed in given:
        settings = _settings_of(foreign[name]) if name in foreign else {}
        if isinstance(value, list) and [*settings.values()] == [value]:  # several words, not one list as in a file
            words += [f"--{next(iter(settings))}", *value]
        else:
            words += as_flags(settings) if name in foreign else typed
    return words, notes_of(foreign.values())


def entries_of(flags: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Return flags as entries of a file, in our names. Raises SettingsError, also for an unknown name."""
    words, _ = translated(flags, known)
    entries = {}
    for name, value, typed in _split_flags(words):
        if not name:
            raise SettingsError(f"{typed[0]!r} belongs to no flag; write --NAME VALUE")
        if name not in known:
            raise unknown_option(f"--{name}", known)
        entries[name] = value
    return entries


def as_flags(entries: Mapping[str, Any]) -> list[str]:
    """Return entries of a file as command-line words. An entry that is null is left out, so its default applies."""
    words: list[str] = []
    for name, value in entries.items():
        if isinstance(value, bool):
            words += [f"--{name}", str(value).lower()]
        elif isinstance(value, dict) or is_mixture(name, value):
            words.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, list) and name == "optim_target_modules":  # for transformers, a list of one is not text
            words.append(f"--{name}={json.dumps([*map(str, value)])}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")  # "=" keeps -1 from looking like a flag
    return words


def is_mixture(name: str, value: Any) -> bool:
    """Whether ``value`` is a list of datasets, which is one value, however many there are."""
    return name == "dataset" and isinstance(value, list)


def name_of(flag: str) -> str:
    """Return the name of the field that a flag sets: "learning_rate" for "--learning-rate=1e-4"."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def flags_of(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the name and value of each flag; the value is True if there is none."""
    return [(name, value) for name, value, _ in _split_flags(words) if name]


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return ``words`` without the flags ``names`` and their values."""
    return [word for name, _, typed in _split_flags(words) if name not in names for word in typed]


def translated_entries(entries: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Do what ``translated`` does for the entries of a file, in which names have underscores."""
    foreign = _foreign_keys(entries, known)
    translated_values: dict[str, Any] = {}
    for name, value in entries.items():
        translated_values.update(_settings_of(foreign[name]) if name in foreign else {name: value})
    return translated_values, notes_of(foreign.values())


def _split_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield the name, value (True without one) and words of each flag; words before the first have an empty name."""
    rest = list(flags)
    while rest:
        typed = [rest.pop(0)]
        if not typed[0].startswith("--"):
            yield "", None, typed
            continue
        _, equals, value = typed[0].partition("=")
        while not equals and rest and not rest[0].startswith("--"):
            typed.append(rest.pop(0))
        values = [value] if equals else typed[1:]
        yield name_of(typed[0]), values[0] if len(values) == 1 else (values or True), typed


def _foreign_keys(entries: Mapping[str, Any], known: Collection[str]) -> dict[str, Key]:
    """Return the keys that are not ours, or whose values are not. Raises SettingsError if one has no counterpart."""
    foreign_names = [
        name
        for name, value in entries.items()
        if our_spelling(name, value) is not None or (name not in known and name in ALL_KEYS)
    ]
    table = {name: ALL_KEYS[name] for name in foreign_names if name in ALL_KEYS and name not in known}
    keys = {key.name: key for key in keys_of(KeySource(entries), table, entries)}
    lost = next((key for key in keys.values() if key.meaning.is_lost), None)
    if lost is not None:
        raise SettingsError(f"{lost.name} is unknown here: {lost.meaning.said}")
    merged_settings(keys.values())
    return {name: keys[name] for name in foreign_names}


def _settings_of(key: Key) -> dict[str, Any]:
    return {name: value for name, value in key.meaning.settings.items() if value is not NEEDED}


def notes_of(keys: Iterable[Key]) -> list[str]:
    """Return a note for each key that is not ours."""
    return [_note(key) for key in keys if not key.is_ours]


def _note(key: Key) -> str:
    settings = _settings_of(key)
    if not settings:
        return f"{key.name}: {key.meaning.said}"
    # In VALUE_SPELLINGS the names are ours, and only the value is another one.
    shown_key = f"{key.name}: {as_word(key.value)}" if key.name in VALUE_SPELLINGS else key.name
    targets = [name if value == key.value else f"{name}: {as_word(value)}" for name, value in settings.items()]
    return f"{shown_key} as {', '.join(targets)}" + (f" ({key.meaning.said})" if key.meaning.said else "")
