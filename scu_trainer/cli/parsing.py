"""An argument parser that reports a mistake in one line and with exit code 2, as all commands of this project do."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Optional

from scu_trainer.cli.names.meaning import FALSE, TRUE
from scu_trainer.errors import SettingsError, did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, which raises SettingsError instead of printing its usage and exiting."""

    def __init__(self, **options) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args, namespace=None):
        """Parse ``args``, in which options may have hyphens instead of underscores."""
        return super().parse_known_args(
            with_explicit_switches(self, [self._with_underscores(word) for word in args]), namespace
        )

    def _with_underscores(self, word: str) -> str:
        name, equals, value = word.partition("=")
        flag = f"--{name.removeprefix('--').replace('-', '_')}"
        return f"{flag}{equals}{value}" if name.startswith("--") and flag in self._option_string_actions else word

    def parser_of_action(self, action: str) -> Parser:
        """Return the parser of the words after ``action``."""
        return next(item for item in self._actions if isinstance(item, argparse._SubParsersAction)).choices[action]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (?:.*? )?(--[\w-]+)", message)
        if unknown:
            raise unknown_option(unknown[1], self._option_string_actions)
        raise SettingsError(with_choice(message))


def add_switch(parser: argparse._ActionsContainer, flag: str, help: str, default: Optional[bool] = False) -> None:
    """Add a flag that is true without a value and also takes true or false, as the flags of transformers do."""
    parser.add_argument(
        flag, type=_true_or_false, nargs="?", const=True, default=default, metavar="true|false", help=help
    )


def _true_or_false(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in TRUE


def with_explicit_switches(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return ``words`` with ``=true`` after each switch without a value, so that it does not take the next word."""
    actions = parser._option_string_actions
    valueless = {flag for flag, action in actions.items() if action.nargs == "?" and action.const is True}
    return [
        f"{word}=true" if word in valueless and next_word.lower() not in (*TRUE, *FALSE) else word
        for word, next_word in zip(words, [*words[1:], ""], strict=False)
    ]


def unknown_option(word: str, names: Iterable[str]) -> SettingsError:
    """Return the error for an unknown option. ``names``: the known options, with or without dashes."""
    typed = word.partition("=")[0]
    bare = sorted({name.lstrip("-") for name in names})
    # Dashes would make any two short names look similar, and so would names of one letter.
    suggestion = did_you_mean(typed.lstrip("-").replace("-", "_"), [name for name in bare if len(name) > 1])
    suggestion = suggestion.replace("'", "'--", 1) or "; --help lists the options"
    return SettingsError(f"unknown option {typed}{suggestion}")


def add_consent(parser: argparse._ActionsContainer) -> None:
    """Add the flags that only the user may set for a model from elsewhere: see ``Subject.with_consent``."""
    add_switch(parser, "--trust_remote_code", "run Python code that comes with a model")
    add_switch(parser, "--allow_pickle", "also read weights stored as pickle files")


def require_new_file(path: Path, flag: str) -> None:
    """Raise SettingsError if ``path`` exists or its folder does not. ``flag``: the option that names another path."""
    if path.exists():
        raise SettingsError(f"{path} already exists; remove it, or give {flag} another name")
    if not path.parent.is_dir():
        raise SettingsError(f"the folder of {path} does not exist; create it, or give {flag} another name")


def with_choice(message: str) -> str:
    """Add to argparse's "invalid choice: 'x' (choose from 'a', 'b')" the choice that was probably meant, and explain
    its "expected one argument", which it also reports for a value that looks like an option."""
    if option := re.search(r"(--\w+)\S*: expected one argument$", message):
        return f"{option[1]} needs a value; one that begins with a dash is written {option[1]}=VALUE"
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    return message + (did_you_mean(choice[1], [word.strip("'") for word in choice[2].split(", ")]) if choice else "")
