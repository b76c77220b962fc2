"""What is seen of a source of data: which parts of its documents are learned, and what a sample of them shows: lengths,
repetitions, rows that are unlike the others. Prints nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy

from scu_trainer.data.text.encode import NOT_LEARNED, Document

STRANGE = 6.0
"""Distances from the median, in robust standard deviations, from which a document is shown as a strange one."""

LEAST_SPREAD = 0.05
"""Of the median: documents that are all alike make no other one strange by a hair."""

MEASURES = ("tokens", "characters per token", "share of letters", "share of learned tokens", "repetition")
MOST_SHOWN = 5
MOST_TOKENS = 600
"""Of a row that is shown; the rest is counted."""


class Strange(NamedTuple):
    """A document by its number in the sample. ``measure`` made it strange: its ``value``, the ``median`` of all, and
    how many robust standard deviations lie between."""

    number: int
    measure: str
    value: float
    median: float
    deviations: float

    @property
    def values(self) -> str:
        first, second = (f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in (self.value, self.median))
        return f"{first}, median {second}"


@dataclass(frozen=True)
class Facts:
    """``texts``: of each document, as it was tokenized. ``lengths``: its tokens, shape (documents,). ``learned``: of
    these, learned ones. ``repeated``: (places of the documents with the same tokens), the most frequent first.
    ``longest``: numbers of documents."""

    documents: Sequence[Document]
    texts: Sequence[str]
    lengths: numpy.ndarray
    learned: numpy.ndarray
    repeated: list[list[int]]
    longest: list[int]
    strange: list[Strange]

    @property
    def duplicates(self) -> int:
        """Documents beyond the first of each."""
        return sum(len(places) - 1 for places in self.repeated)

    def longer_than(self, tokens: int) -> int:
        return int((self.lengths > tokens).sum())


def facts_of(documents: Sequence[Document], texts: Sequence[str]) -> Facts:
    lengths = numpy.array([len(document.input_ids) for document in documents])
    learned = numpy.array([int((document.labels != NOT_LEARNED).sum()) for document in documents])
    longest = numpy.argsort(-lengths, kind="stable")[:MOST_SHOWN].tolist()
    strange = _strange(lengths, learned, texts)
    return Facts(documents, texts, lengths, learned, _repeated(documents), longest, strange)


def histogram(lengths: numpy.ndarray) -> list[tuple[int, int, int]]:
    """(tokens from, tokens below, documents): widths double, from the shortest to the longest."""
    edges = [0, 8]
    while edges[-1] <= lengths.max():
        edges.append(2 * edges[-1])
    counts = numpy.histogram(lengths, edges)[0].tolist()
    filled = numpy.flatnonzero(counts)
    return list(zip(edges, edges[1:], counts, strict=False))[filled[0] : filled[-1] + 1]


def bar(count: int, most: int, width: int) -> str:
    """Of ``width`` characters for the most; whatever is there is seen."""
    return "█" * round(width * count / most) or "▏" * bool(count)


def _repeated(documents: Sequence[Document]) -> list[list[int]]:
    places: dict[int, list[int]] = {}
    for number, document in enumerate(documents):
        places.setdefault(document.digest, []).append(number)
    return sorted((found for found in places.values() if len(found) > 1), key=len, reverse=True)


def _strange(lengths: numpy.ndarray, learned: numpy.ndarray, texts: Sequence[str]) -> list[Strange]:
    """Each document once, by the measure in which it is farthest from the others."""
    values = numpy.array(
        [_measured(*each) for each in zip(lengths.tolist(), learned.tolist(), texts, strict=True)], dtype=float
    )
    medians = numpy.median(values, axis=0)
    spread = 1.4826 * numpy.median(numpy.abs(values - medians), axis=0)  # of a normal distribution: its deviation
    deviations = numpy.abs(values - medians) / numpy.maximum(spread, numpy.maximum(LEAST_SPREAD * medians, 1e-9))
    deviations[:, 0] = numpy.abs(numpy.log(values[:, 0] / max(medians[0], 1))) * 3  # lengths differ by factors
    worst = deviations.argmax(axis=1)
    far = [number for number in range(len(values)) if deviations[number, worst[number]] >= STRANGE]
    far.sort(key=lambda number: -deviations[number, worst[number]])
    return [
        Strange(
            number,
            MEASURES[worst[number]],
            float(values[number, worst[number]]),
            float(medians[worst[number]]),
            float(deviations[number, worst[number]]),
        )
        for number in far[:MOST_SHOWN]
    ]


def _measured(tokens: int, learned: int, text: str) -> tuple[float, ...]:
    """In the order of ``MEASURES``. Repetition: how many times smaller zlib makes the text."""
    raw = text.encode("utf-8", "replace")
    letters = sum(map(str.isalpha, text)) / max(1, len(text))
    return tokens, len(text) / max(1, tokens), letters, learned / max(1, tokens), len(raw) / len(zlib.compress(raw))


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
