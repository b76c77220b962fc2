"""The output of ``scu-trainer data`` on a terminal. Without colors, as in a pipe, learned text is in brackets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scu_trainer.cli.looking.facts import (
    MOST_SHOWN,
    OUTLIER_DEVIATIONS,
    DatasetFacts,
    TextSpan,
    bar,
    excerpt,
    histogram,
)
from scu_trainer.data.text.encode import NOT_LEARNED, Document
from scu_trainer.figures import count_text, first_few

LEARNED, OPEN, CLOSE = "bold green", "⟦", "⟧"
BAR_WIDTH = 40


def print_row(console: Console, document: Document, parts: Sequence[TextSpan]) -> None:
    learned = int((document.labels != NOT_LEARNED).sum())
    console.print(
        f"\n{document.name}: {count_text(len(document.input_ids), 'token')}, {learned:,} learned", style="bold"
    )
    console.print(_marked(console, parts), soft_wrap=True)


def legend(console: Console) -> str:
    return "green is learned" if _has_color(console) else f"{OPEN}learned{CLOSE}"


def print_facts(console: Console, facts: DatasetFacts, block_size: int) -> None:
    _print_lengths(console, facts, block_size)
    _print_repeated(console, facts)
    table = _excerpt_table("the longest", "row", "tokens")
    for number in facts.longest:
        table.add_row(facts.documents[number].name, f"{facts.lengths[number]:,}", excerpt(facts.texts[number]))
    console.print("", table, sep="\n")
    _print_strange(console, facts)


def _print_lengths(console: Console, facts: DatasetFacts, block_size: int) -> None:
    median, high = numpy.percentile(facts.lengths, [50, 95])
    longer = facts.longer_than(block_size)
    console.print(
        f"\nlengths in tokens: median {median:,.0f}, 95 % below {high:,.0f}, longest {facts.lengths.max():,}; longer "
        f"than block_size {block_size:,}: {longer:,} ({longer / len(facts.lengths):.1%})",
        soft_wrap=True,
    )
    bins = histogram(facts.lengths)
    largest = max(count for *_, count in bins)
    for start, end, count in bins:
        mark = "  <- block_size" if start <= block_size < end else ""
        console.print(f"{start:>9,} to {end - 1:<9,} {bar(count, largest, BAR_WIDTH):<{BAR_WIDTH}} {count:,}{mark}")


def _print_repeated(console: Console, facts: DatasetFacts) -> None:
    if not facts.repeated:
        console.print("\nno document appears twice")
        return
    console.print(f"\ndocuments that repeat an earlier one, token by token: {facts.duplicates:,}")
    for group in facts.repeated[:MOST_SHOWN]:
        names = first_few(facts.documents[number].name for number in group)
        console.print(f"  {len(group)} x {excerpt(facts.texts[group[0]], 50)!r}: {names}", soft_wrap=True)


def _print_strange(console: Console, facts: DatasetFacts) -> None:
    if not facts.strange:
        console.print(f"\nno document is unlike the others (by {OUTLIER_DEVIATIONS:g} robust standard deviations)")
        return
    table = _excerpt_table(
        f"the strangest (by {OUTLIER_DEVIATIONS:g} robust standard deviations or more)", "row", "what is strange", ""
    )
    for outlier in facts.strange:
        table.add_row(
            facts.documents[outlier.number].name, outlier.measure, outlier.values, excerpt(facts.texts[outlier.number])
        )
    console.print("", table, sep="\n")


def _excerpt_table(title: str, *columns: str) -> Table:
    """Return a table with a last column that is cut at the width of the terminal."""
    table = Table(*columns, title=title, title_justify="left", box=None, expand=True)
    table.add_column("begins with", no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _marked(console: Console, parts: Sequence[TextSpan]) -> Any:
    if _has_color(console):
        return Text.assemble(*((part.text, LEARNED if part.is_learned else "dim") for part in parts))
    return Text("".join(f"{OPEN}{part.text}{CLOSE}" if part.is_learned else part.text for part in parts))


def _has_color(console: Console) -> bool:
    return console.is_terminal and not console.no_color
