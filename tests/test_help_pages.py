"""The pages that answer: messages are those of the source, words stand once and in order, questions have answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "scu_trainer").rglob("*.py")))
HEADINGS = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
MESSAGES = [message for heading in HEADINGS for message in re.findall(r"`([^`]+)`", heading)]
WORDS = re.findall(r"^\*\*(.*)\*\*$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_source(message):
    assert message in SOURCE


def test_there_are_messages_to_look_at():
    assert len(HEADINGS) >= 25
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_words_stand_once_and_in_order():
    assert len(WORDS) >= 25
    assert sorted(set(WORDS), key=str.lower) == WORDS


@pytest.mark.parametrize("page", ["troubleshooting.md", "glossary.md", "faq.md"])
def test_a_help_page_is_in_the_site(page):
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()
