"""Facts about a source of data: what is learned, lengths, repetitions and strange documents. Prints nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy

from scu_trainer.data.text.encode import NOT_LEARNED, Document

OUTLIER_DEVIATIONS = 6.0
"""Distance from the median, in robust standard deviations, from which a document counts as strange."""

LEAST_SPREAD = 0.05
"""Least spread, as a share of the median: among almost equal documents, a tiny difference is not strange."""

MEASURES = ("tokens", "characters per token", "share of letters", "share of learned tokens", "repetition")
MOST_SHOWN = 5
MOST_TOKENS = 600
"""Tokens of a row that are shown; the others are only counted."""


class Outlier(NamedTuple):
    """A strange document, by its number in the sample. ``measure``: what is strange about it, with its ``value`` and
    the ``median`` of all documents."""

    number: int
    measure: str
    value: float
    median: float

    @property
    def values(self) -> str:
        first, second = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in (self.value, self.median))
        return f"{first}, median {second}"


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about a sample of documents. ``texts``: the text of each document, decoded from its tokens. ``lengths``:
    tokens of each document, shape (documents,). ``learned``: those that are learned. ``repeated``: groups of documents
    with the same tokens, as numbers, the largest group first. ``longest``: numbers of the longest documents."""

    documents: Sequence[Document]
    texts: Sequence[str]
    lengths: numpy.ndarray
    learned: numpy.ndarray
    repeated: list[list[int]]
    longest: list[int]
    strange: list[Outlier]

    @property
    def duplicates(self) -> int:
        """Number of documents that repeat an earlier one."""
        return sum(len(numbers) - 1 for numbers in self.repeated)

    def longer_than(self, tokens: int) -> int:
        return int((self.lengths > tokens).sum())


def facts_of(documents: Sequence[Document], texts: Sequence[str]) -> DatasetFacts:
    lengths = numpy.array([len(document.input_ids) for document in documents])
    learned = numpy.array([int((document.labels != NOT_LEARNED).sum()) for document in documents])
    longest = numpy.argsort(-lengths, kind="stable")[:MOST_SHOWN].tolist()
    strange = _strange_documents(lengths, learned, texts)
    return DatasetFacts(documents, texts, lengths, learned, _repeated_documents(documents), longest, strange)


def histogram(lengths: numpy.ndarray) -> list[tuple[int, int, int]]:
    """Return (tokens from, tokens below, documents) of bins of doubling width, from shortest to longest document."""
    edges = [0, 8]
    while edges[-1] <= lengths.max():
        edges.append(2 * edges[-1])
    counts = numpy.histogram(lengths, edges)[0].tolist()
    filled = numpy.flatnonzero(counts)
    return list(zip(edges, edges[1:], counts, strict=False))[filled[0] : filled[-1] + 1]


def bar(count: int, largest: int, width: int) -> str:
    """Return a bar, ``width`` characters long for the count ``largest``, and visible for every count above 0."""
    return "█" * round(width * count / largest) or "▏" * bool(count)


def _repeated_documents(documents: Sequence[Document]) -> list[list[int]]:
    numbers: dict[int, list[int]] = {}
    for number, document in enumerate(documents):
        numbers.setdefault(document.digest, []).append(number)
    return sorted((group for group in numbers.values() if len(group) > 1), key=len, reverse=True)


def _strange_documents(lengths: numpy.ndarray, learned: numpy.ndarray, texts: Sequence[str]) -> list[Outlier]:
    """Return the strangest documents, each by the measure in which it is farthest from the others."""
    values = numpy.array(
        [_measures(*figures) for figures in zip(lengths.tolist(), learned.tolist(), texts, strict=True)], dtype=float
    )
    medians = numpy.median(values, axis=0)
    spread = 1.4826 * numpy.median(numpy.abs(values - medians), axis=0)  # of normal values, the standard deviation
    deviations = numpy.abs(values - medians) / numpy.maximum(spread, numpy.maximum(LEAST_SPREAD * medians, 1e-9))
    deviations[:, 0] = numpy.abs(numpy.log(values[:, 0] / max(medians[0], 1))) * 3  # lengths differ by factors
    worst = deviations.argmax(axis=1)
    far = [number for number in range(len(values)) if deviations[number, worst[number]] >= OUTLIER_DEVIATIONS]
    far.sort(key=lambda number: -deviations[number, worst[number]])
    return [
        Outlier(number, MEASURES[worst[number]], float(values[number, worst[number]]), float(medians[worst[number]]))
        for number in far[:MOST_SHOWN]
    ]


def _measures(tokens: int, learned: int, text: str) -> tuple[float, ...]:
    """Return the values in the order of ``MEASURES``. Repetition is the factor by which zlib shrinks the text."""
    raw = text.encode("utf-8", "replace")
    letters = sum(map(str.isalpha, text)) / max(1, len(text))
    return tokens, len(text) / max(1, tokens), letters, learned / max(1, tokens), len(raw) / len(zlib.compress(raw))


class TextSpan(NamedTuple):
    text: str
    is_learned: bool


@dataclass
class DataReport:
    """Everything to show of one source. ``sample``: which documents are counted, in words. ``lines``: statistics as
    text. ``shown``: the rows that are shown in full."""

    name: str
    sample: str
    tokenizer: Any
    lines: list[str]
    shown: list[tuple[Document, list[TextSpan]]]
    facts: DatasetFacts
    block_size: int


def text_spans(tokenizer: Any, document: Document) -> list[TextSpan]:
    """Split a document into learned and other text. Special tokens are written out, and line breaks are kept."""
    labelled = list(zip(document.input_ids.tolist(), (document.labels != NOT_LEARNED).tolist(), strict=True))
    parts = [
        TextSpan(tokenizer.decode([token for token, _ in part], clean_up_tokenization_spaces=False), is_learned)
        for is_learned, part in ((key, list(group)) for key, group in groupby(labelled[:MOST_TOKENS], itemgetter(1)))
    ]
    hidden = len(labelled) - MOST_TOKENS
    return [*parts, TextSpan(f" … and {hidden:,} tokens more", False)] if hidden > 0 else parts


def excerpt(text: str, characters: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"
