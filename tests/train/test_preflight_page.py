"""docs/preflight.md lists every check and every seeded mistake as they are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from scu_trainer.train.preflight import CHECKS
from tests.train.seeded_mistakes import MISTAKES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("write_preflight", ROOT / "docs" / "write_preflight.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_checks_and_mistakes(writer):
    page = writer.PAGE.read_text()
    assert page.count("<!-- table ") == 2
    assert writer.written(page, writer.tables()) == page, "run: python docs/write_preflight.py"


def test_ids_are_kebab_case_and_every_check_says_what_to_do():
    for check in CHECKS.values():
        assert check.id == "-".join(check.id.lower().split()) and check.id.replace("-", "").isalnum(), check.id
        assert check.level in ("error", "warning", "note") and check.says
        assert check.fix or check.level == "note", check.id


def test_mistakes_have_names_of_their_own():
    assert len({mistake.id for mistake in MISTAKES}) == len(MISTAKES)
