"""How a field says what it is for, and how a value that cannot be used is refused."""

from __future__ import annotations

import functools
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Optional, Union, get_args, get_origin, get_type_hints

from scu_trainer.errors import SettingsError, nearest

MOST_COUNT = 2**31 - 1
"""Largest whole number: what libraries keep in 32 bits would overflow silently."""

MOST_NUMBER = 1e15
"""Numbers beyond are slips, and their squares are not finite in float32."""

LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4095
"""Limits of file systems (NAME_MAX, PATH_MAX without its final zero)."""


class Allowed(NamedTuple):
    """Limits of a number. Without ``least`` or ``above``: 0, or the default if that is below 0. Without ``most``:
    MOST_COUNT or MOST_NUMBER. ``unit``: what it counts, where its name does not say that."""

    least: Optional[float] = None
    most: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None
    unit: str = ""


NO_LIMITS: Mapping[str, Allowed] = types.MappingProxyType({})

NOT_GIVEN = {"max_steps": "it must be 1 or more, or -1 to train for num_train_epochs"}
"""Messages for fields whose default is below 0 and means "not given"."""


def option(default, help: str):
    """A dataclass field."""
    return field(default=default, metadata={"help": help})


@functools.cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Types of the fields of a dataclass. Cached, because Python compiles the annotations on every call."""
    return types.MappingProxyType(get_type_hints(kind))


def changed(settings) -> list[str]:
    """Names of the fields that have another value than their default."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != item.default]


def check_fields(settings, allowed: Mapping[str, Allowed] = NO_LIMITS, prefix: str = "") -> None:
    """Reject an unknown choice, a value of the wrong type, a number that is negative or not finite, a text that cannot
    be a name. ``allowed``: narrower limits of single fields."""
    _check_choices(settings)
    _check_kinds(settings, prefix)
    check_values(type(settings), vars(settings), allowed, prefix)


def _check_choices(settings) -> None:
    """Reject a value outside a ``Literal`` field's choices, naming the nearest one."""
    for name, hint in hints_of(settings.__class__).items():
        value, choices = getattr(settings, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise SettingsError(
                f"{name} is {value!r}; allowed: {', '.join(map(str, choices))}{nearest(str(value), choices)}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    """Also 1e3."""
    return _is_number(value) and (isinstance(value, int) or float(value).is_integer())


KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole, "a whole number"),
    float: (_is_number, "a number"),
    list: (lambda value: isinstance(value, (list, tuple)), "a list, such as [a, b]"),
}
"""Type of a field -> (whether a value fits, the words for it in a message)."""


def _check_kinds(settings, prefix: str = "") -> None:
    """Reject text for a number or a switch: to Python "false" is true."""
    hints = hints_of(settings.__class__)
    for item in fields(settings):
        value, parts = getattr(settings, item.name), {get_origin(part) or part for part in _parts(hints[item.name])}
        kinds = parts - {type(None)}
        if len(kinds) > 1 or not kinds <= KINDS.keys() or (value is None and type(None) in parts):
            continue
        takes, words = KINDS[kinds.pop()]
        require(takes(value), f"{prefix}{item.name} is {short(value)}; it must be {words}")


def check_values(
    kind: type, values: Mapping[str, Any], allowed: Mapping[str, Allowed] = NO_LIMITS, prefix: str = ""
) -> None:
    """Reject numbers and texts among ``values`` that do not fit the fields of the dataclass ``kind``; ``allowed``
    narrows single fields. ``prefix``: of their names on the command line. Raises SettingsError."""
    hints = hints_of(kind)
    for item in fields(kind):
        if item.name not in values:
            continue
        is_name = {*_parts(hints[item.name])} <= {str, type(None)}
        given = values[item.name]
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, str):
                check_text(prefix + item.name, value, is_name=is_name)
            elif _is_number(value):
                _check_number(prefix + item.name, item.default, value, allowed.get(item.name, Allowed()))


def _parts(hint: Any) -> Iterator[Any]:
    """The types of a Union, or the type itself."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def _check_number(name: str, default: Any, value: float, allowed: Allowed) -> None:
    default = default if isinstance(default, (int, float)) else None
    if default is not None and default < 0 and value < 0:  # -1 of max_steps: a word for "not given"
        said = NOT_GIVEN.get(name, f"it must be 0 or more, or {default} for not given")
        require(value == default, f"{name} is {short(value)}; {said}")
        return
    least = 0 if allowed.least is None else allowed.least
    most = (MOST_COUNT if isinstance(value, Integral) else MOST_NUMBER) if allowed.most is None else allowed.most
    usual = "" if default is None else f", such as {default} {allowed.unit}".rstrip()
    is_finite = isinstance(value, Integral) or math.isfinite(value)  # an int may be too large for a float
    says_why = is_finite or (least > -MOST_NUMBER and not value > least)
    require(says_why, f"{name} is {value}; it must be a finite number{usual}")
    is_enough = value >= least if allowed.above is None else value > allowed.above
    lowest = f"{least:,} or more" if allowed.above is None else f"above {allowed.above}"
    require(is_finite and is_enough, f"{name} is {short(value)}; it must be {lowest}{usual}")
    is_below = allowed.below is None or value < allowed.below
    require(is_below, f"{name} is {short(value)}; it must be below {allowed.below}{usual}")
    require(value <= most, f"{name} is {short(value)}; it must be {most:,} or less{usual}")


def short(value: Any) -> str:
    """For a message: not longer than a line."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} letters)"


def plain(value: Any) -> str:
    """As it is typed; also a member of an enum, such as ``optim`` of the stock arguments."""
    value = getattr(value, "value", value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_text(name: str, text: str, *, is_name: bool) -> None:
    """Reject text that neither files nor libraries accept; ``is_name``: also one too long for a path."""
    require("\0" not in text, f"{name} is {short(text)}, with a NUL character, which names cannot contain; take it out")
    encoding = sys.getfilesystemencoding()
    way_out = "give the file or folder a name in UTF-8 (mv, or convmv)"
    if encoding != "utf-8":
        way_out = f"this process reads names as {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    is_unicode = text.encode(errors="ignore").decode() == text
    require(is_unicode, f"{name} is {short(text)}, which is not valid UTF-8; {way_out}")
    if not is_name:
        return
    can_be_named = text.encode(encoding, "ignore").decode(encoding) == text  # from a file, which is read as UTF-8
    require(can_be_named, f"{name} is {short(text)}; {way_out}")
    longest = max(len(part.encode()) for part in text.split("/"))
    require(
        longest <= LONGEST_NAME_BYTES and len(text.encode()) <= LONGEST_PATH_BYTES,
        f"{name} is {short(text)}; a path has at most {LONGEST_PATH_BYTES} bytes and each name in it at most "
        f"{LONGEST_NAME_BYTES}, this one has {len(text.encode()):,} and {longest:,}; give a shorter one",
    )
    require(
        not text.startswith("~") or os.path.expanduser(text) != text,
        f"{name} is {short(text)}, and there is no user of that name; write ./{text[:40]} for a file of that name",
    )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
