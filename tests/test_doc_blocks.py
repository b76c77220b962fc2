"""Code blocks of the docs: commands, flags, files, targets and imports exist; Python compiles, YAML has known keys."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest
import yaml

from scu_trainer.cli import main as command

ROOT = Path(__file__).parents[1]
RUN_ELSEWHERE = ROOT / "docs" / "seeds.md"
"""Its commands, mistyped ones among them, are run by tests/test_seeds.py."""

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {RUN_ELSEWHERE})]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LANGUAGES = {"", "text", "json", "pycon", "python", "yaml", "bash", "console"}
OURS = r"(?:recipes|scripts|ds_configs|accelerate_configs|examples|benchmarks|tests)/[\w./-]+"
GROUPS = {"runs", "hardware"}
"""Commands whose first word names another command."""

TAKE_FIELDS = {("data",), ("plan",), ("runs", "start")}
"""Commands that accept every flag of train beside their own."""


def blocks(*languages: str) -> list[tuple[str, str]]:
    found = [(page, block) for page in PAGES for block in BLOCK.finditer(page.read_text())]
    return [(str(page.relative_to(ROOT)), block[3]) for page, block in found if block[2] in languages]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Page and words of every line that starts with the program, with the parts joined that a backslash splits."""
    lines = []
    for page, text in blocks("", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in line.strip().removeprefix("$ ").split(" && "):
                if re.match(rf"(?:[A-Z_]+=\S+ )*{program} ", part):
                    words = shlex.split(part, comments=True)
                    lines.append((page, words[words.index(program) + 1 :]))
    return lines


@functools.cache
def flags(*words: str) -> frozenset[str]:
    """All flags in the help of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        command.main([*words, "--help_all" if words == ("train",) else "--help"])
    return frozenset(flag.replace("-", "_") for flag in re.findall(r"--\w[\w-]*", printed.getvalue()))


def known(words: list[str]) -> frozenset[str]:
    name = tuple(words[:2] if words[0] in GROUPS and len(words) > 1 and words[1].isalpha() else words[:1])
    return flags(*name) | (flags("train") if name in TAKE_FIELDS else set()) | {"__help"}


def test_there_are_blocks_to_check():
    assert len(commands("scu-trainer")) >= 80 and len(commands("make")) >= 5
    assert len(blocks("python")) >= 10 and len(blocks("yaml")) >= 1


@pytest.mark.parametrize(
    "words", [["plan", "--gpus", "2"], ["eval", "RUN", "--tuning", "full"], ["runs", "list", "--x"]]
)
def test_an_unknown_flag_is_seen(words):
    assert not {word for word in words if word.startswith("--")} <= known(words)


def test_languages():
    unknown = {block[2] for page in PAGES for block in BLOCK.finditer(page.read_text())} - LANGUAGES
    assert not unknown


@pytest.mark.parametrize(("page", "words"), commands("scu-trainer"))
def test_commands_and_their_flags(page, words):
    assert words[0] in command.COMMANDS or words[0].startswith("--"), page
    if words[0] in command.COMMANDS:
        typed = {word.split("=")[0].replace("-", "_") for word in words if re.match(r"--\w", word)}
        assert typed <= known(words), page


@pytest.mark.parametrize(("page", "words"), commands("make"))
def test_targets(page, words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets, page


@pytest.mark.parametrize("program", ["scu-trainer", "python", "deepspeed", "accelerate", "pytest"])
def test_files_named_in_commands(program):
    lines = commands(program)
    assert lines
    named = [(page, file) for page, words in lines for word in words for file in re.findall(rf"^{OURS}$", word)]
    assert [(page, file) for page, file in named if not (ROOT / file).exists()] == []


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python(page, text):
    for node in ast.walk(ast.parse(text, page)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "scu_trainer":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), page


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml(page, text):
    settings = yaml.safe_load(text)
    assert {f"__{key}" for key in settings} <= flags("train"), page
