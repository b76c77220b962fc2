"""An argument parser whose mistakes are one line and exit code 2, as everywhere in this project."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from scu_trainer.errors import SettingsError, nearest


class Parser(argparse.ArgumentParser):
    """No abbreviations; raises SettingsError instead of printing its usage and leaving."""

    def __init__(self, **options) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args, namespace=None):
        """An option is known by its name with hyphens as well."""
        return super().parse_known_args([self._spelled(word) for word in args], namespace)

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        own = f"--{name.removeprefix('--').replace('-', '_')}"
        return f"{own}{equals}{value}" if name.startswith("--") and own in self._option_string_actions else word

    def of_action(self, action: str) -> Parser:
        """What reads the words after ``action``."""
        return next(found for found in self._actions if isinstance(found, argparse._SubParsersAction)).choices[action]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (?:.*? )?(--[\w-]+)", message)
        if unknown:
            raise unknown_option(unknown[1], self._option_string_actions)
        raise SettingsError(with_choice(message))


def unknown_option(word: str, names: Iterable[str]) -> SettingsError:
    """For a typed option that nobody knows. ``names``: of those that there are, with dashes or without."""
    typed = word.partition("=")[0]
    bare = sorted({name.lstrip("-") for name in names})
    # Without the dashes, which would bring any two short names near each other, as one letter is to any other.
    near = nearest(typed.lstrip("-").replace("-", "_"), [name for name in bare if len(name) > 1])
    near = near.replace("'", "'--", 1) or "; --help lists the options"
    return SettingsError(f"unknown option {typed}{near}")


def add_consent(parser: argparse._ActionsContainer) -> None:
    """What a model from elsewhere must not allow itself: see ``Subject.consenting``."""
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with a model")
    parser.add_argument("--allow_pickle", action="store_true", help="also read weights stored as pickle files")


def require_new_file(path: Path, flag: str) -> None:
    """Raise SettingsError where something stands in the way of ``path``, which ``flag`` names."""
    if path.exists():
        raise SettingsError(f"{path} already exists; remove it, or give {flag} another name")
    if not path.parent.is_dir():
        raise SettingsError(f"the folder of {path} does not exist; create it, or give {flag} another name")


def with_choice(message: str) -> str:
    """argparse's "invalid choice: 'x' (choose from 'a', 'b')", with the choice that was probably meant; and "expected
    one argument", which is also said of a value that looks like an option."""
    if option := re.search(r"(--\w+)\S*: expected one argument$", message):
        return f"{option[1]} needs a value; one that begins with a dash is written {option[1]}=VALUE"
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    return message + (nearest(choice[1], [word.strip("'") for word in choice[2].split(", ")]) if choice else "")
