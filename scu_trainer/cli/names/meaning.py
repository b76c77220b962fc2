"""What a key of another program means here: settings, nothing to do, or no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from scu_trainer.errors import SettingsError

TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n", "none", "null", "")


@dataclass(frozen=True)
class Meaning:
    """What a key means here. ``settings``: our settings, by field. ``said``: what differs here, or, without settings,
    why there is nothing to do. ``is_lost``: the key has no counterpart, and ``said`` is what to do instead."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""
    is_lost: bool = False


@dataclass(frozen=True)
class KeySource:
    """All entries of the file or command line that a key is from. ``folder``: that of the file; None for flags."""

    entries: Mapping[str, Any]
    folder: Optional[Path] = None

    def get(self, name: str, default: Any = None) -> Any:
        value = self.entries.get(name)
        return default if value is None else value

    def has(self, *names: str) -> bool:
        """Whether one of these switches is on."""
        return any(is_on(self.entries.get(name)) for name in names)


@dataclass(frozen=True)
class Alias:
    """An alias of the field ``name``, which may be a function of the value. ``values``: our spelling of values that
    differ here. ``form``: a template for the value."""

    name: Union[str, Callable[[str], str]]
    values: Mapping[str, Any] = field(default_factory=dict)
    form: Optional[str] = None

    def __call__(self, value: Any, source: KeySource) -> Meaning:
        if value is True:
            raise SettingsError("it has no value; write one after it")
        name = self.name if isinstance(self.name, str) else self.name(str(value))
        value = self.values.get(str(value).lower(), value)
        return Meaning({name: value if self.form is None else self.form.format(value)})


@dataclass(frozen=True)
class Switch:
    """A switch, possibly with true or false as its value. ``means``: our settings if it is on; ``otherwise``: if
    off."""

    means: Mapping[str, Any]
    otherwise: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, value: Any, source: KeySource) -> Meaning:
        if str(value).lower() not in (*TRUE, *FALSE):
            raise SettingsError(f"it is a switch and does not take {value!r}; leave the value out")
        settings = self.means if is_on(value) else self.otherwise
        return Meaning(settings, "" if settings else "off here too")


def boolean(name: str) -> Switch:
    """Return the reader of another name for a field that is true or false."""
    return Switch({name: True}, {name: False})


@dataclass(frozen=True)
class NoAction:
    """A key for which there is nothing to do, for the reason ``why``."""

    why: str

    def __call__(self, value: Any, source: KeySource) -> Meaning:
        return Meaning(said=self.why)


Reader = Callable[[Any, KeySource], Meaning]
Table = Mapping[str, Union[Reader, str]]
"""Reader of each key. A key without a counterpart has a text instead, which says what to do."""


def read(table: Table, key: str, value: Any, source: KeySource) -> Meaning:
    """Return what a key of ``table`` means. Raises SettingsError if the value means other training, or nothing."""
    reader = table[key]
    if isinstance(reader, str):
        reader = if_on(lambda *_: Meaning(said=table[key], is_lost=True))
    return reader(value, source)


def if_on(reader: Reader) -> Reader:
    """Return a reader that calls ``reader`` for values that are on. A value that is off needs no action."""
    return lambda value, source: reader(value, source) if is_on(value) else Meaning(said="off here too")


def is_on(value: Any) -> bool:
    """Whether ``value`` is on; words that mean no, an empty list and an empty mapping are off."""
    return str(value).lower() not in FALSE and value != [] and value != {}


def words(value: Any) -> list[str]:
    """Return the items of a list, or of a text with commas, as texts."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def tuning(source: KeySource, *, adapts: bool) -> Meaning:
    """Return our ``tuning`` for a program with separate switches for quantized weights and for adapters."""
    is_8_bits = source.has("load_in_8bit") or str(source.get("quantization_bit")) == "8"
    is_quantized = is_8_bits or source.has("load_in_4bit", "quantization_bit") or source.get("adapter") == "qlora"
    if is_quantized and not adapts:
        raise SettingsError(
            "weights in 4 or 8 bits are frozen, and without adapters nothing would be trained; use lora"
        )
    if not is_quantized:
        return Meaning({"tuning": "lora" if adapts else "full"})
    says_8_bits = is_8_bits and "load_in_8bit" not in source.entries
    return Meaning({"tuning": "qlora", **({"load_in_8bit": True} if says_8_bits else {})})


def quantized(adapts: Callable[[KeySource], bool], **more: Any) -> Reader:
    """Return the reader of a switch for weights in 4 bits, or in 8 bits with ``load_in_8bit`` among ``more``.
    ``adapts``: whether adapters are trained."""
    return if_on(lambda value, source: Meaning({**tuning(source, adapts=adapts(source)).settings, **more}))
