"""An argument parser whose mistakes are one line and exit code 2, as everywhere in this project."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Optional

from scu_trainer.cli.names.meaning import FALSE, TRUE
from scu_trainer.errors import SettingsError, nearest


class Parser(argparse.ArgumentParser):
    """No abbreviations; raises SettingsError instead of printing its usage and leaving."""

    def __init__(self, **options) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args, namespace=None):
        """An option is known by its name with hyphens as well."""
        return super().parse_known_args(with_switches(self, [self._spelled(word) for word in args]), namespace)

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


def add_switch(parser: argparse._ActionsContainer, flag: str, help: str, default: Optional[bool] = False) -> None:
    """A flag that is on alone, and takes true or false as well, as the flags of transformers do."""
    parser.add_argument(
        flag, type=_true_or_false, nargs="?", const=True, default=default, metavar="true|false", help=help
    )


def _true_or_false(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in TRUE


def with_switches(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """``words``, where a switch that stands alone says true: what follows it is no value of it."""
    actions = parser._option_string_actions
    alone = {flag for flag, action in actions.items() if action.nargs == "?" and action.const is True}
    return [
        f"{word}=true" if word in alone and after.lower() not in (*TRUE, *FALSE) else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]


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
    add_switch(parser, "--trust_remote_code", "run Python code that comes with a model")
    add_switch(parser, "--allow_pickle", "also read weights stored as pickle files")


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
