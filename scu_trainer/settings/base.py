"""How a field says what it is for, and how a value that cannot be used is refused."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Literal, get_args, get_type_hints

from scu_trainer.errors import SettingsError, nearest


def option(default, help: str):
    """A dataclass field; a default of several values becomes a list, as HfArgumentParser reads it."""
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def check_choices(settings) -> None:
    """Reject a value outside a ``Literal`` field's choices, naming the nearest one."""
    hints = get_type_hints(type(settings))
    for item in fields(settings):
        choices = get_args(hints[item.name])
        if getattr(hints[item.name], "__origin__", None) is not Literal:
            continue
        value = getattr(settings, item.name)
        if value not in choices:
            raise SettingsError(
                f"{item.name} is {value!r}; allowed: {', '.join(map(str, choices))}{nearest(str(value), choices)}"
            )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
