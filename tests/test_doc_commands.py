"""Commands that README and the pages show are ones that exist, with flags that they know, on files that are there."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from scu_trainer.cli.main import COMMANDS, MODULES
from scu_trainer.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
)
SHOWN = ("", "bash", "sh", "console")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r"^[A-Z_]+=\S*$")
LAUNCHERS = ("accelerate", "deepspeed", "torchrun")


class Parsed(Exception):
    """The flags were understood: nothing needs to run."""


def commands(page: Path) -> list[str]:
    """Lines of ``page`` that call something of ours, each whole, without prompt and comment."""
    found = []
    for language, text in BLOCK.findall(page.read_text()):
        if language in SHOWN:
            whole = re.sub(r"\\\n\s*", " ", text)
            found += [line.strip().removeprefix("$ ") for line in whole.splitlines()]
    return [
        line
        for line in found
        if line.split(" ")[0] in ("scu-trainer", "make", "python", *LAUNCHERS) or ASSIGNED.match(line.split(" ")[0])
    ]


def words_of(line: str) -> list[str]:
    """Of the first command in ``line``: without assignments before it and what it is piped into."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    while words and ASSIGNED.match(words[0]):
        words.pop(0)
    return words


@pytest.fixture
def only_parsed(monkeypatch, tmp_path) -> Iterator[None]:
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **named):
        original(self, *given, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.chdir(ROOT)
    yield


def wrong_with(line: str) -> str | None:
    words = words_of(line)
    if not words:
        return None
    kind, rest = words[0], words[1:]
    if kind == "make":
        return _of_make(rest)
    if kind in LAUNCHERS or kind == "python":
        return _of_script(kind, rest)
    if not rest or rest[0].startswith("-"):
        return None
    if rest[0].isupper():  # COMMAND, for any of them
        return None
    return _of_command(rest[0], rest[1:])


def _of_make(rest: list[str]) -> str | None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing = [word for word in rest if "=" not in word and not word.startswith("-") and word not in targets]
    return f"no target {missing}" if missing else None


def _of_script(kind: str, rest: list[str]) -> str | None:
    scripts = [word for word in rest if word.endswith(".py") and "/" in word]
    missing = [
        word
        for word in scripts
        if word.split("/")[0] in ("scripts", "benchmarks", "examples", "docs") and not (ROOT / word).is_file()
    ]
    if missing:
        return f"no file {missing}"
    configs = [word for word in rest if word.startswith(("accelerate_configs/", "ds_configs/", "recipes/"))]
    gone = [word for word in configs if not (ROOT / word).is_file()]
    if gone:
        return f"no file {gone}"
    if scripts and scripts[0] in ("scripts/train.py",):
        return _of_command("train", rest[rest.index(scripts[0]) + 1 :])
    if kind == "python" and scripts and scripts[0].startswith("benchmarks/"):
        source = (ROOT / scripts[0]).read_text()
        flags = [word.split("=")[0] for word in rest if word.startswith("--")]
        unknown = [flag for flag in flags if f'"{flag}"' not in source]
        return f"{scripts[0]} does not say {unknown}" if unknown else None
    return None


def _of_command(name: str, rest: list[str]) -> str | None:
    if name not in COMMANDS:
        return f"no command {name}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            importlib.import_module(f"scu_trainer.cli.{MODULES.get(name, name)}").main(rest)
    except Parsed:
        return None
    except SystemExit as end:
        return said.getvalue()[-300:] if end.code else None
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_understood(page, only_parsed):
    wrong = {line: problem for line in commands(page) if (problem := wrong_with(line))}
    assert not wrong


def test_there_are_commands_to_look_at():
    assert sum(len(commands(page)) for page in PAGES) > 200


@pytest.mark.parametrize(
    "line",
    [
        "make no-such-target",
        "python benchmarks/headline/gone.py",
        "python benchmarks/headline/variable_length.py --gone 3",
        "scu-trainer gone",
        "scu-trainer train --config scu_lora --no_such_flag 3",
        "scu-trainer report runs/a --no_such_flag",
        "accelerate launch --config_file accelerate_configs/gone.yaml scripts/train.py --config recipes/scu_lora.yaml",
    ],
)
def test_what_does_not_exist_is_found(line, only_parsed):
    assert wrong_with(line)
