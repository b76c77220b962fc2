"""Names of other programs in our flags and files: translated, with a note, where the meaning is the same; else an
error that explains them.

>>> translated(["--epochs", "3", "--qlora", "--lr=1e-4"], {"num_train_epochs", "tuning", "learning_rate"})
(['--num_train_epochs=3', '--tuning=qlora', '--learning_rate=1e-4'], \
['epochs as num_train_epochs', 'qlora as tuning: qlora', 'lr as learning_rate'])
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scu_trainer.cli.names.common import NEEDED, WORDS
from scu_trainer.cli.names.meaning import Source
from scu_trainer.cli.names.tools import ANYWHERE, Key, as_word, is_path, is_word, keys_of, together
from scu_trainer.cli.parsing import unknown_option
from scu_trainer.errors import SettingsError


def translated(flags: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The command line in our names, and a note for each name that was translated. ``known``: names of our flags.

    Raises SettingsError for a name without a counterpart, and for two names that contradict each other.
    """
    given = list(_split(flags))
    entries = {name: value for name, value, _ in given if name}
    meant = _others(entries, known)
    words: list[str] = []
    for name, value, typed in given:
        settings = _set(meant[name]) if name in meant else {}
        if isinstance(value, list) and [*settings.values()] == [value]:  # several words are not the list of a file
            words += [f"--{next(iter(settings))}", *value]
        else:
            words += as_flags(settings) if name in meant else typed
    return words, notes_of(meant.values())


def entries_of(flags: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Flags as entries of a file, in our names. Raises SettingsError, also for an unknown name."""
    words, _ = translated(flags, known)
    found = {}
    for name, value, typed in _split(words):
        if not name:
            raise SettingsError(f"{typed[0]!r} belongs to no flag; write --NAME VALUE")
        if name not in known:
            raise unknown_option(f"--{name}", known)
        found[name] = value
    return found


def as_flags(entries: Mapping[str, Any]) -> list[str]:
    """Entries of a file as command-line words; null means the default."""
    words: list[str] = []
    for name, value in entries.items():
        if isinstance(value, bool):
            words += [f"--{name}", str(value).lower()]
        elif isinstance(value, dict) or is_mixture(name, value):
            words.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, list) and name == "optim_target_modules":  # a list of one is no text for transformers
            words.append(f"--{name}={json.dumps([*map(str, value)])}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")  # "=" keeps -1 from looking like a flag
    return words


def is_mixture(name: str, value: Any) -> bool:
    """A list of sources is one value, however many there are."""
    return name == "dataset" and isinstance(value, list)


def name_of(flag: str) -> str:
    """ "learning_rate" of "--learning-rate=1e-4"."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def flags_of(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Name and value of each flag; True for one without a value."""
    return [(name, value) for name, value, _ in _split(words) if name]


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """``words`` without the flags ``names`` and their values."""
    return [word for name, _, typed in _split(words) if name not in names for word in typed]


def translated_entries(entries: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """As ``translated``, for the entries of a file, whose names have underscores."""
    meant = _others(entries, known)
    found: dict[str, Any] = {}
    for name, value in entries.items():
        found.update(_set(meant[name]) if name in meant else {name: value})
    return found, notes_of(meant.values())


def _split(flags: Sequence[str]) -> Iterator[tuple[str, Any, list[str]]]:
    """Name, value (True without one) and words of each flag; words before the first flag have no name."""
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


def _others(entries: Mapping[str, Any], known: Collection[str]) -> dict[str, Key]:
    """Keys that are not ours, or whose value is not. Raises SettingsError for one without a counterpart."""
    others = [
        name
        for name, value in entries.items()
        if is_path(name, value) or is_word(name, value) or (name not in known and name in ANYWHERE)
    ]
    table = {name: ANYWHERE[name] for name in others if name in ANYWHERE and name not in known}
    keys = {key.name: key for key in keys_of(Source(entries), table, entries)}
    lost = next((key for key in keys.values() if key.meaning.is_lost), None)
    if lost is not None:
        raise SettingsError(f"{lost.name} is unknown here: {lost.meaning.said}")
    together(keys.values())
    return {name: keys[name] for name in others}


def _set(key: Key) -> dict[str, Any]:
    return {name: value for name, value in key.meaning.settings.items() if value is not NEEDED}


def notes_of(keys: Iterable[Key]) -> list[str]:
    """A note for each key that is not ours."""
    return [_note(key) for key in keys if not key.is_ours]


def _note(key: Key) -> str:
    settings = _set(key)
    if not settings:
        return f"{key.name}: {key.meaning.said}"
    written = f"{key.name}: {as_word(key.value)}" if key.name in WORDS else key.name  # of ours the value is another one
    said = [name if value == key.value else f"{name}: {as_word(value)}" for name, value in settings.items()]
    return f"{written} as {', '.join(said)}" + (f" ({key.meaning.said})" if key.meaning.said else "")
