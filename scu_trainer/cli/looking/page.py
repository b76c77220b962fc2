"""The output of ``scu-trainer data`` as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from scu_trainer.cli.looking.facts import (
    OUTLIER_DEVIATIONS,
    DataReport,
    DatasetFacts,
    TextSpan,
    bar,
    excerpt,
    histogram,
)
from scu_trainer.data.text.encode import Document
from scu_trainer.figures import count_text
from scu_trainer.report.page import MarkedText, Page, Section, Table, TextBlock, html

BAR_WIDTH = 10
"""Characters of the longest bar, which must fit a phone that is 390 pixels wide."""


def data_page(report: DataReport, written: str) -> str:
    """Return the page. ``written``: program, version and time, for the footer."""
    facts = report.facts
    sections = [
        Section("What is read", [TextBlock(line) for line in report.lines]),
        Section("Some rows, as they are learned", _rows(report.shown)),
        Section("Lengths in tokens", _lengths(facts, report.block_size)),
        Section("The longest", [_document_table(facts, facts.longest, lambda n: f"{facts.lengths[n]:,} tokens")]),
        Section("The strangest", _strangest(facts)),
        Section("Repeated documents", _repetitions(facts)),
    ]
    return html(Page(report.name, report.sample, [], sections, written))


def _rows(shown: Sequence[tuple[Document, Sequence[TextSpan]]]) -> list[MarkedText | TextBlock]:
    rows = [
        MarkedText(f"{document.name}: {count_text(len(document.input_ids), 'token')}", parts)
        for document, parts in shown
    ]
    return [TextBlock("Marked text is learned; the rest is only read."), *rows]


def _lengths(facts: DatasetFacts, block_size: int) -> list[TextBlock | Table]:
    median, high = numpy.percentile(facts.lengths, [50, 95])
    longer = facts.longer_than(block_size)
    summary = f"Median {median:,.0f}, 95 % below {high:,.0f}, longest {facts.lengths.max():,}. Longer than block_size "
    bins = histogram(facts.lengths)
    largest = max(count for *_, count in bins)
    rows = [
        (
            f"{start:,} to {end - 1:,}",
            f"{count:,}",
            bar(count, largest, BAR_WIDTH) + ("  block_size" if start <= block_size < end else ""),
        )
        for start, end, count in bins
    ]
    return [TextBlock(f"{summary}{block_size:,}: {longer:,}."), Table(("tokens", "documents", ""), rows)]


def _document_table(facts: DatasetFacts, numbers: Sequence[int], note_of) -> Table:
    rows = [(facts.documents[number].name, note_of(number), excerpt(facts.texts[number])) for number in numbers]
    return Table(("row", "", "begins with"), rows)


def _strangest(facts: DatasetFacts) -> list[TextBlock | Table]:
    if not facts.strange:
        return [TextBlock(f"No document is unlike the others by {OUTLIER_DEVIATIONS:g} robust standard deviations.")]
    by_number = {outlier.number: f"{outlier.measure}: {outlier.values}" for outlier in facts.strange}
    return [_document_table(facts, list(by_number), by_number.get)]


def _repetitions(facts: DatasetFacts) -> list[TextBlock | Table]:
    if not facts.repeated:
        return [TextBlock("No document appears twice.")]
    counts = {group[0]: f"{len(group)} times" for group in facts.repeated[:10]}
    summary = f"Documents that repeat an earlier one, token by token: {facts.duplicates:,}."
    return [TextBlock(summary), _document_table(facts, list(counts), counts.get)]
