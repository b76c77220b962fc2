"""Find secrets, and remove them from text.

Two kinds are hidden: values that are known to be secret on this machine, such as environment variables with a telling
name and the Hub token that was given or stored; and text that has the format of a credential. Hashes of commits and
files do not: a long hexadecimal number is hidden only if it is a known value.

This module uses only the standard library, so that every other module can import it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

HIDDEN = "***"

SHORTEST = 8
"""Characters. Shorter values are words like "true" or "dummy", which appear everywhere and are not hidden."""

LONGEST_WORD = 15
"""Characters. Up to this length, a value of only digits or only letters of one case counts as a number or a word."""

SECRET_PARTS = {
    *("TOKEN", "SECRET", "APIKEY", "PAT"),
    *("PASSWORD", "PASSWD", "PGPASSWORD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS"),
}
KEY_PARTS = {"API", "ACCESS", "PRIVATE", "AUTH", "MASTER", "SIGNING", "ENCRYPTION"}
"""Parts of a name that, next to KEY, mark a secret key, unlike the key of a cache or a table."""

POINTER_PARTS = {"FILE", "PATH", "DIR", "NAME", "TYPE", "LENGTH", "LIMIT", "CAP"}
"""Last parts of names whose values say where a secret is stored or how long it is, not the secret itself."""

SHAPES = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{20,}\b                                        # Hugging Face
    | \bapi_org_[A-Za-z0-9]{20,}\b                                   # the same, of an organization
    | \bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}                     # OpenAI, Anthropic and similar
    | \bgh[pousr]_[A-Za-z0-9]{30,}\b                                 # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}\b
    | \bglpat-[\w-]{20,}                                             # GitLab
    | \bxox[abprs]-[A-Za-z0-9-]{10,}                                 # Slack
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                                  # Amazon
    | \bAIza[\w-]{35}\b                                              # Google
    | \beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*                         # JSON web token
    | (?<=://)[^\s/@:'"]*:[^\s/@'"]+(?=@)                            # user:password@ in an address
    | (?<=://)[^\s/@:'"]{20,}(?=@)                                   # token@ in an address
    """,
    re.VERBOSE,
)
HEADERS = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\",;]+")
SECRET_KEYS = re.compile(
    r"(?i)(?:^|_)(?:(?:api|access|auth|secret|private|hub|hf)_?(?:key|token)|password|passwd|secret)$"
)
"""Names of entries whose values are secret. A bare ``token`` is not among them, because tokenizers have many."""

RANDOM_LOOKING = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\w{16,}")
"""The format that the value of a variable ending in KEY must have to count as secret, if its name says no more."""

_known: set[str] = set()


class Secret(str):
    """A string that is usable in memory, but never written to disk: it is pickled as None."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple]:
        return type(None), ()

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __repr__(self) -> str:
        return repr(HIDDEN)


def secret(value: Optional[str]) -> Optional[Secret]:
    """Mark ``value`` as a known secret, and return it for use in memory only. None stays None."""
    if value is None:
        return None
    remember(value)
    return Secret(value)


def remember(*values: str) -> None:
    """Hide these values wherever they appear from now on, except those that are too short or are plain words."""
    _known.update(str(value) for value in values if not _is_plain(value))


def remember_environment(environment: Optional[Mapping[str, str]] = None) -> None:
    """Remember the secrets in ``environment`` (default: that of this process), and the Hub token stored by a login."""
    environment = os.environ if environment is None else environment
    remember(*(value for name, value in environment.items() if is_secret_name(name)))
    keys = (value for name, value in environment.items() if name.upper().endswith("KEY"))
    remember(*(value for value in keys if RANDOM_LOOKING.fullmatch(value)))
    remember(_stored_token(environment))


def is_secret_name(name: str) -> bool:
    """Whether the name of an environment variable says that its value is secret."""
    parts = name.upper().split("_")
    is_key = "KEY" in parts and not KEY_PARTS.isdisjoint(parts)
    return (is_key or not SECRET_PARTS.isdisjoint(parts)) and parts[-1] not in POINTER_PARTS


def redact(text: str) -> str:
    """Return ``text`` with all secrets replaced by ``***``."""
    for value in sorted(_known, key=len, reverse=True):  # longest first, because one may be part of another
        if value in text:
            text = re.sub(_pattern(value), HIDDEN, text)
    return SHAPES.sub(HIDDEN, HEADERS.sub(rf"\1{HIDDEN}", text))


def redact_data(data: Any) -> Any:
    """Return a copy of JSON-like ``data`` without secrets at any depth. Parts of texts are replaced, and whole values
    under names like ``api_key``."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, Mapping):
        return {key: _redacted_entry(key, value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_data(item) for item in data]
    return data


def find_secret(data: Mapping[str, Any]) -> Optional[str]:
    """Return the first name in ``data`` with a value that holds a secret, at any depth; None if there is none."""
    return next((name for name, value in data.items() if redact_data(value) != _as_lists(value)), None)


def hide_in_tracebacks() -> None:
    """Redact the tracebacks that the interpreter prints for uncaught errors."""
    sys.excepthook = _print_redacted
    threading.excepthook = lambda thrown: _print_redacted(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)


def _print_redacted(kind: type[BaseException], error: Any, trace: Any) -> None:
    if not issubclass(kind, SystemExit):  # reaches this hook only in a thread, where it is not an error
        print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _redacted_entry(key: Any, value: Any) -> Any:
    is_secret = isinstance(value, str) and value and SECRET_KEYS.search(str(key))
    return HIDDEN if is_secret else redact_data(value)


def _as_lists(data: Any) -> Any:
    """Return ``data`` with lists instead of tuples, as ``redact_data`` returns data without secrets."""
    if isinstance(data, Mapping):
        return {key: _as_lists(value) for key, value in data.items()}
    return [_as_lists(item) for item in data] if isinstance(data, (list, tuple)) else data


def _pattern(value: str) -> str:
    """Return a pattern for ``value``. A short value matches as a separate word only, not inside a longer one."""
    return re.escape(value) if len(value) > LONGEST_WORD else rf"(?<!\w){re.escape(value)}(?!\w)"


def _is_plain(value: str) -> bool:
    """Whether ``value`` is an ordinary word, number or path, which would also be hidden in unrelated text."""
    if len(value) < SHORTEST or value.startswith(("/", "~", "./", "../")):
        return True
    is_word = value.isdigit() or (value.isalpha() and (value.islower() or value.isupper() or value.istitle()))
    return is_word and len(value) <= LONGEST_WORD


def _stored_token(environment: Mapping[str, str]) -> str:
    """Return the token that ``hf auth login`` stored; "" if there is none or it is not readable."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError):
        return ""  # the Hub libraries cannot read it either, so it cannot leak
