"""Whether a value from a JSON file has the type that the code declares for it: other programs and people write files,
too."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Optional

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""Errors that reading malformed content raises."""

Inside = Callable[[Any, Any, str], Optional[str]]


def misfit(value: Any, hint: Any, name: str, null_is_nan: bool = True) -> Optional[str]:
    """Return why ``value``, from JSON, is not a ``hint``; None if it is. An int passes as a float, and 3.0 as an int.
    ``null_is_nan``: None passes as a float, because JSON has no NaN."""

    def inside(value: Any, hint: Any, name: str) -> Optional[str]:
        return misfit(value, hint, name, null_is_nan)

    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        fits = any(inside(value, part, name) is None for part in parts)
        return None if fits else _as_line(name, value)
    if origin is typing.Literal:
        return None if value in parts else _as_line(name, value)
    if hint in (int, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_number = is_number and (hint is float or isinstance(value, int) or value.is_integer())
        return None if is_number or (null_is_nan and hint is float and value is None) else _as_line(name, value)
    if dataclasses.is_dataclass(hint):
        return _misfit_of_dataclass(value, hint, name, inside)
    if origin is tuple and parts[-1] is Ellipsis:
        return inside(value, list[parts[0]], name)
    if origin is tuple:  # JSON writes a tuple as a list
        if not isinstance(value, list) or len(value) != len(parts):
            return _as_line(name, value)
        return first_misfit(inside(item, part, name) for item, part in zip(value, parts, strict=True))
    if not isinstance(value, origin or hint):
        return _as_line(name, value)
    if origin is dict:
        return first_misfit(inside(item, parts[1], f"{name}.{key}") for key, item in value.items())
    items = enumerate(value) if origin is list else ()
    return first_misfit(inside(item, parts[0], f"{name}[{i}]") for i, item in items)


def _misfit_of_dataclass(value: Any, kind: type, name: str, inside: Inside) -> Optional[str]:
    if not isinstance(value, dict):
        return _as_line(name, value)
    hints = typing.get_type_hints(kind)
    unknown = next((key for key in value if key not in hints), None)
    if unknown is not None:
        return f"{name}.{unknown} is not known"
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    missing = next((key for key in required if key not in value), None)
    if missing is not None:
        return f"{name}.{missing} is missing"
    if hasattr(kind, "from_dict"):  # some of its fields are written in another form
        try:
            kind.from_dict(value)
        except MALFORMED as error:
            return f"{name}: {type(error).__name__} {error}"
    plain = {key: hint for key, hint in hints.items() if key in value and not hasattr(hint, "from_dict")}
    return first_misfit(inside(value[key], hint, f"{name}.{key}") for key, hint in plain.items())


def _as_line(name: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{name} is {text if len(text) <= 40 else text[:37] + '...'}"


def first_misfit(found: Iterable[Optional[str]]) -> Optional[str]:
    return next(filter(None, found), None)
