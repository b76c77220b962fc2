"""The pages and messages read as English that a colleague speaks: `make lint` checks grammar as well."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "english" / "check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("english_check", CHECK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def phrases(check):
    return check.linter(grammar=False)


def test_each_phrase_is_found_in_its_sentence(check, phrases):
    missed = [phrase["in"] for phrase in check.RULES["phrases"] if not phrases.lint(phrase["in"])]
    assert missed == []


def test_plain_english_passes(phrases):
    plain = "The run resumes from the newest checkpoint, and the log reports which files it skipped."
    assert phrases.lint(plain) == []


def test_the_pages_have_none_of_the_phrases(check, phrases):
    assert [line for page in check.PAGES for line in check.findings(page, phrases)] == []


def test_messages_are_read_from_the_source(check, phrases, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text(
        'def f(x):\n    raise ValueError(\n        f"{x} is gone: the run goes on "\n        "from the newest one")\n'
    )
    (found,) = check.findings(bad, phrases)
    assert found.startswith("bad.py:3: 'goes on from'") and "resumes from" in found
