"""What is a secret, and text without it.

First the values that are known to be secret on this machine, wherever they appear: environment variables whose names
say so, the Hub token that was given or stored. Then what has the shape of a credential. Hashes of commits and files
have no such shape and stay: a long hexadecimal number is hidden only if it is a known value.

Only the standard library is used, so that every room can call this.
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
"""Characters. Shorter values are words like "true" or "dummy" that stand everywhere."""

LONGEST_WORD = 15
"""Characters. Up to here digits alone, or letters of one case, are taken for a number or a word."""

SECRET_PARTS = {
    *("TOKEN", "SECRET", "APIKEY", "PAT"),
    *("PASSWORD", "PASSWD", "PGPASSWORD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS"),
}
KEY_PARTS = {"API", "ACCESS", "PRIVATE", "AUTH", "MASTER", "SIGNING", "ENCRYPTION"}
"""Parts of a name beside KEY that tell a secret key from that of a cache or a table."""

POINTER_PARTS = {"FILE", "PATH", "DIR", "NAME", "TYPE", "LENGTH", "LIMIT", "CAP"}
"""Last parts of names that say where a secret lies, or how long it is."""

SHAPES = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{20,}\b                                        # Hugging Face
    | \bapi_org_[A-Za-z0-9]{20,}\b                                   # the same, of an organization
    | \bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}                     # OpenAI, Anthropic and their like
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
"""Names of entries whose values are secret. A bare ``token`` is not among them: tokenizers have many."""

RANDOM_LOOKING = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\w{16,}")
"""What the value of a key must look like where its name does not say what the key is for."""

_known: set[str] = set()


class Secret(str):
    """Text that works as it is, and is gone from every copy on disk: it is pickled as None."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple]:
        return type(None), ()

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __repr__(self) -> str:
        return repr(HIDDEN)


def secret(value: Optional[str]) -> Optional[Secret]:
    """``value`` for use in memory alone, from here on a known secret; None stays None."""
    if value is None:
        return None
    remember(value)
    return Secret(value)


def remember(*values: str) -> None:
    """From here on these are hidden wherever they appear; those that are too short or plain words are not."""
    _known.update(str(value) for value in values if not _is_plain(value))


def remember_environment(environment: Optional[Mapping[str, str]] = None) -> None:
    """Learn the secrets of ``environment`` (default: of this process) and the Hub token that was stored by a login."""
    environment = os.environ if environment is None else environment
    remember(*(value for name, value in environment.items() if says_secret(name)))
    keys = (value for name, value in environment.items() if name.upper().endswith("KEY"))
    remember(*(value for value in keys if RANDOM_LOOKING.fullmatch(value)))
    remember(_stored_token(environment))


def says_secret(name: str) -> bool:
    """Whether the name of an environment variable says that its value is secret."""
    parts = name.upper().split("_")
    is_key = "KEY" in parts and not KEY_PARTS.isdisjoint(parts)
    return (is_key or not SECRET_PARTS.isdisjoint(parts)) and parts[-1] not in POINTER_PARTS


def redact(text: str) -> str:
    """``text`` with ``***`` in place of every secret."""
    for value in sorted(_known, key=len, reverse=True):  # one may be part of another
        if value in text:
            text = re.sub(_pattern(value), HIDDEN, text)
    return SHAPES.sub(HIDDEN, HEADERS.sub(rf"\1{HIDDEN}", text))


def redact_data(data: Any) -> Any:
    """A copy of JSON-like ``data`` without secrets at any depth: in texts, and whole under names like ``api_key``."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, Mapping):
        return {key: _redacted_entry(key, value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_data(item) for item in data]
    return data


def where_secret(data: Mapping[str, Any]) -> Optional[str]:
    """The first name of ``data`` whose value holds a secret, at any depth; None if none does."""
    return next((name for name, value in data.items() if redact_data(value) != _as_lists(value)), None)


def hide_in_tracebacks() -> None:
    """What the interpreter prints of an error that nobody caught goes through ``redact``."""
    sys.excepthook = _print_redacted
    threading.excepthook = lambda thrown: _print_redacted(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)


def _print_redacted(kind: type[BaseException], error: Any, trace: Any) -> None:
    if not issubclass(kind, SystemExit):  # which only a thread brings here, and means no error there
        print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _redacted_entry(key: Any, value: Any) -> Any:
    is_secret = isinstance(value, str) and value and SECRET_KEYS.search(str(key))
    return HIDDEN if is_secret else redact_data(value)


def _as_lists(data: Any) -> Any:
    """As ``redact_data`` gives what holds no secret."""
    if isinstance(data, Mapping):
        return {key: _as_lists(value) for key, value in data.items()}
    return [_as_lists(item) for item in data] if isinstance(data, (list, tuple)) else data


def _pattern(value: str) -> str:
    """A short value is hidden as a word of its own only, not inside of a longer one."""
    return re.escape(value) if len(value) > LONGEST_WORD else rf"(?<!\w){re.escape(value)}(?!\w)"


def _is_plain(value: str) -> bool:
    """Whether hiding ``value`` would tear holes into text that has nothing to do with it."""
    if len(value) < SHORTEST or value.startswith(("/", "~", "./", "../")):
        return True
    is_word = value.isdigit() or (value.isalpha() and (value.islower() or value.isupper() or value.istitle()))
    return is_word and len(value) <= LONGEST_WORD


def _stored_token(environment: Mapping[str, str]) -> str:
    """What ``hf auth login`` has left; empty where nobody logged in or may read it."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError):
        return ""  # the libraries cannot read it either, so it cannot leak from here
