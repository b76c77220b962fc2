"""What the documentation shows as a Python session gives what it shows."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_sessions_in_the_docs(page):
    get_accelerator()  # says on standard output what it has found, once in a process
    failed, _ = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, verbose=False)
    assert failed == 0


def test_there_are_sessions_to_run():
    text = (ROOT / "docs" / "memory.md").read_text()
    assert len(doctest.DocTestParser().get_examples(text)) >= 20
