"""Help texts and value checks for the fields of settings dataclasses."""

from __future__ import annotations

import functools
import math
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Optional, Union, get_args, get_origin, get_type_hints

from scu_trainer.errors import SettingsError, did_you_mean

LARGEST_WHOLE_NUMBER = 2**31 - 1
"""Largest whole number, because libraries that use 32 bits would silently overflow beyond it."""

LARGEST_NUMBER = 1e15
"""Largest number: a larger one is a mistake, and its square can be infinite in float32."""

LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4095
"""Limits of file systems (NAME_MAX, PATH_MAX without its final zero)."""


class Allowed(NamedTuple):
    """Limits of a number. ``least``, ``above``: lower limit, inclusive or exclusive; by default 0, but a default below
    0 is also allowed. ``most``, ``below``: upper limit; by default LARGEST_WHOLE_NUMBER or LARGEST_NUMBER. ``unit``:
    what the number counts, if its name does not say it."""

    least: Optional[float] = None
    most: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None
    unit: str = ""


NO_LIMITS: Mapping[str, Allowed] = types.MappingProxyType({})

NOT_GIVEN = {"max_steps": "it must be 1 or more, or -1 to train for num_train_epochs"}
"""Messages for fields with a default below 0 that means "not given"."""


def option(default, help: str):
    """Return a dataclass field with a help text."""
    return field(default=default, metadata={"help": help})


@functools.cache
def field_types_of(kind: type) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass. Cached, because Python evaluates the annotations on every call."""
    return types.MappingProxyType(get_type_hints(kind))


def changed_fields(settings) -> list[str]:
    """Return the names of the fields whose value differs from the default."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != item.default]


def check_fields(settings, allowed: Mapping[str, Allowed] = NO_LIMITS, prefix: str = "") -> None:
    """Raise SettingsError for an unknown choice, a value of the wrong type, a number outside its limits, or a text that
    cannot be a name. ``allowed``: limits by field. ``prefix``: of the names on the command line."""
    _check_choices(settings)
    _check_types(settings, prefix)
    check_values(type(settings), vars(settings), allowed, prefix)


def _check_choices(settings) -> None:
    """Raise SettingsError for a value that is not among a ``Literal`` field's choices, with the most similar one."""
    for name, hint in field_types_of(settings.__class__).items():
        value, choices = getattr(settings, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise SettingsError(
                f"{name} is {value!r}; allowed: {', '.join(map(str, choices))}{did_you_mean(str(value), choices)}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole_number(value: Any) -> bool:
    """Whether ``value`` is a whole number, including floats such as 1e3."""
    return _is_number(value) and (isinstance(value, int) or float(value).is_integer())


KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole_number, "a whole number"),
    float: (_is_number, "a number"),
    str: (lambda value: isinstance(value, (str, os.PathLike)), "text"),
    list: (lambda value: isinstance(value, (list, tuple)), "a list, such as [a, b]"),
}
"""Type of a field -> (check of a value, description of allowed values in messages)."""


def _check_types(settings, prefix: str = "") -> None:
    """Raise SettingsError for a value of the wrong type, such as text for a switch: Python takes "false" as true."""
    hints = field_types_of(settings.__class__)
    for item in fields(settings):
        value, kinds = getattr(settings, item.name), {*_union_members(hints[item.name])}
        is_mixture = item.name == "dataset" and isinstance(value, list)  # HfArgumentParser must take it for text
        if len(kinds - {type(None)}) > 1 or (value is None and type(None) in kinds) or is_mixture:
            continue
        (kind,) = kinds - {type(None)}
        _check_type(value, get_origin(kind) or kind, f"{prefix}{item.name} is {short(value)}; it must be")
        for part in value if get_origin(kind) is list else ():
            _check_type(part, get_args(kind)[0], f"{prefix}{item.name} has {short(part)}, which must be")


def _check_type(value: Any, kind: Any, must_be: str) -> None:
    takes, words = KINDS.get(kind, (None, ""))
    require(takes is None or takes(value), f"{must_be} {words}")


def check_values(
    kind: type, values: Mapping[str, Any], allowed: Mapping[str, Allowed] = NO_LIMITS, prefix: str = ""
) -> None:
    """Raise SettingsError for numbers and texts among ``values`` that the fields of the dataclass ``kind`` do not
    allow. ``allowed``: limits by field. ``prefix``: of the names on the command line."""
    hints = field_types_of(kind)
    for item in fields(kind):
        if item.name not in values:
            continue
        is_name = {*_union_members(hints[item.name])} <= {str, type(None)}
        given = values[item.name]
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, str):
                check_text(prefix + item.name, value, is_name=is_name)
            elif _is_number(value):
                _check_number(prefix + item.name, item.default, value, allowed.get(item.name, Allowed()))


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a Union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _check_number(name: str, default: Any, value: float, allowed: Allowed) -> None:
    default = default if isinstance(default, (int, float)) else None
    if default is not None and default < 0 and value < 0:  # such as max_steps: -1, which means "not given"
        message = NOT_GIVEN.get(name, f"it must be 0 or more, or {default} for not given")
        require(value == default, f"{name} is {short(value)}; {message}")
        return
    least = 0 if allowed.least is None else allowed.least
    most = (
        (LARGEST_WHOLE_NUMBER if isinstance(value, Integral) else LARGEST_NUMBER)
        if allowed.most is None
        else allowed.most
    )
    usual = "" if default is None else f", such as {default} {allowed.unit}".rstrip()
    is_finite = isinstance(value, Integral) or math.isfinite(value)  # an int may be too large for a float
    is_reported_later = is_finite or (least > -LARGEST_NUMBER and not value > least)
    require(is_reported_later, f"{name} is {value}; it must be a finite number{usual}")
    is_enough = value >= least if allowed.above is None else value > allowed.above
    lowest = f"{least:,} or more" if allowed.above is None else f"above {allowed.above}"
    require(is_finite and is_enough, f"{name} is {short(value)}; it must be {lowest}{usual}")
    is_below = allowed.below is None or value < allowed.below
    require(is_below, f"{name} is {short(value)}; it must be below {allowed.below}{usual}")
    require(value <= most, f"{name} is {short(value)}; it must be {most:,} or less{usual}")


def short(value: Any) -> str:
    """Return ``value`` for a message, shortened to at most a line."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} letters)"


def as_typed(value: Any) -> str:
    """Return ``value`` as a user would type it; also enum members, such as ``optim`` of the stock arguments."""
    value = getattr(value, "value", value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_text(name: str, text: str, *, is_name: bool) -> None:
    """Raise SettingsError for text that files and libraries do not accept; ``is_name``: or that cannot be a path."""
    require("\0" not in text, f"{name} is {short(text)}, with a NUL character, which names cannot contain; remove it")
    encoding = sys.getfilesystemencoding()
    advice = "give the file or folder a name in UTF-8 (mv, or convmv)"
    if encoding != "utf-8":
        advice = f"this process reads names as {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    is_unicode = text.encode(errors="ignore").decode() == text
    require(is_unicode, f"{name} is {short(text)}, which is not valid UTF-8; {advice}")
    if not is_name:
        return
    can_be_named = text.encode(encoding, "ignore").decode(encoding) == text  # settings files are read as UTF-8
    require(can_be_named, f"{name} is {short(text)}; {advice}")
    longest = max(len(part.encode()) for part in text.split("/"))
    require(
        longest <= LONGEST_NAME_BYTES and len(text.encode()) <= LONGEST_PATH_BYTES,
        f"{name} is {short(text)}; a path may have at most {LONGEST_PATH_BYTES} bytes, and each name in it at most "
        f"{LONGEST_NAME_BYTES}, but this one has {len(text.encode()):,} and {longest:,}; give a shorter one",
    )
    require(
        not text.startswith("~") or os.path.expanduser(text) != text,
        f"{name} is {short(text)}, but there is no user of that name; write ./{text[:40]} for a file of that name",
    )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
