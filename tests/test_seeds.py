"""docs/seeds.md: every statement of the documents has its row, and what a row claims is what its command prints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[1]
LONGEST_S = 500


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
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_rows_claim(name, model, tmp_path):
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "OUT": str(tmp_path), "MODEL": str(model), "PATH": paths, "COLUMNS": "200"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-c", COMMANDS[name]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    absent = {row.number: row.holds for row in CLAIMS[name] if row.holds not in printed}
    assert not absent, f"{absent}\n{printed[-6000:]}"
