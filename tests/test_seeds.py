"""docs/seeds.md: every statement of the documents has its row, and what a row claims is what its command prints."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest

from tests import processes, tiny

ROOT = Path(__file__).parents[1]
LONGEST_S = 500
TESTS = "python -m pytest"
PROGRAMS = {"scu-trainer": ["-m", "scu_trainer.cli.main"], "torchrun": ["-m", "torch.distributed.run"], "python": []}


def _writer():
    spec = importlib.util.spec_from_file_location("write_seeds", ROOT / "docs" / "write_seeds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


seeds = _writer()
COMMANDS, ROWS = seeds.table()
CLAIMS = {name: [row for row in ROWS if row.command == name] for name in COMMANDS}


def test_every_statement_has_a_row():
    assert [row.number for row in ROWS] == list(range(1, 144))
    assert {row.verdict for row in ROWS} == {*seeds.MEANINGS}


def test_what_is_here_is_shown_and_what_is_not_has_a_reason():
    for row in ROWS:
        assert (row.command is None) == (row.holds is None) == (row.verdict == seeds.NOT_HERE), row
        assert row.here and (row.command is None or row.command in COMMANDS), row
    assert all(CLAIMS.values()), "a command that shows nothing"


def test_the_page_is_written_from_the_table():
    assert seeds.PAGE.read_text(encoding="utf-8") == seeds.page(), "run: python docs/write_seeds.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"), layers=1)


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].startswith(TESTS)])
def test_a_command_prints_what_its_rows_claim(name, model, tmp_path):
    code, printed = shell(COMMANDS[name], {"OUT": str(tmp_path), "MODEL": str(model)})
    assert code == 0, printed[-3000:]
    absent = {row.number: row.holds for row in CLAIMS[name] if row.holds not in printed}
    assert not absent, f"{absent}\n{printed[-6000:]}"


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].startswith(TESTS)])
def test_tests_that_rows_name_are_among_those_that_run_here(name):
    """They run with all others: here only that they are there, by the names that the rows look for."""
    files = [ROOT / word for word in COMMANDS[name].split() if word.startswith("tests/")]
    found = {one for file in files for one in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}
    claimed = {row.holds for row in CLAIMS[name]} - {"passed"}
    assert files and found and claimed <= found, claimed - found


def shell(command: str, variables: dict[str, str]) -> tuple[int, str]:
    """What bash does with ``command``: (exit code, what was printed). Python programs fork from one that has imported
    everything, but for a command that limits its memory, where that would count."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **variables, "PATH": paths, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    parts = [command] if "ulimit" in command else re.split(r"\s*(&&|;)\s", command)
    code, printed = 0, ""
    for separator, part in zip(["", *parts[1::2]], parts[::2], strict=True):
        if separator == "&&" and code:
            break
        words = shlex.split(Template(part).safe_substitute(variables))
        program = None if "ulimit" in command else PROGRAMS.get(words[0])
        if program is None:
            given = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": LONGEST_S}
            done = subprocess.run(["bash", "-c", part], **given)
        else:
            done = processes.launch([*program, *words[1:]], environment=environment)
        code, printed = done.returncode, printed + done.stdout + done.stderr
    return code, printed
