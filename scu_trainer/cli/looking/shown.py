"""What is seen of a source of data: its documents as stretches of text that are learned, and that are not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from scu_trainer.cli.looking.facts import Facts
from scu_trainer.data.text.encode import NOT_LEARNED, Document

MOST_TOKENS = 600
"""Of a row that is shown; the rest is counted."""


class Stretch(NamedTuple):
    text: str
    is_learned: bool


@dataclass
class Look:
    """What was seen of one source. ``sample``: which documents are counted, in words. ``lines``: statistics for a
    person. ``shown``: rows in full."""

    name: str
    sample: str
    tokenizer: Any
    lines: list[str]
    shown: list[tuple[Document, list[Stretch]]]
    facts: Facts
    block_size: int


def stretches(tokenizer: Any, document: Document) -> list[Stretch]:
    """Special tokens are written out; line breaks stay."""
    labelled = list(zip(document.input_ids.tolist(), (document.labels != NOT_LEARNED).tolist(), strict=True))
    found = [
        Stretch(tokenizer.decode([token for token, _ in part], clean_up_tokenization_spaces=False), is_learned)
        for is_learned, part in ((key, list(group)) for key, group in groupby(labelled[:MOST_TOKENS], itemgetter(1)))
    ]
    left = len(labelled) - MOST_TOKENS
    return [*found, Stretch(f" … and {left:,} tokens more", False)] if left > 0 else found


def excerpt(text: str, characters: int = 90) -> str:
    """The beginning, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"
