"""Statistics of all rows that were read. Nothing is dropped without being counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scu_trainer.figures import count_text

MOST_EXAMPLES = 3  # per reason


def unused_column_lines(columns: Mapping[str, int]) -> list[str]:
    """Return a line about unused columns. ``columns``: number of rows with a value, by name of the unused column."""
    names = ", ".join(f"{name or 'without a name'} ({count_text(count, 'row')})" for name, count in columns.items())
    return [f"unused columns: {names}"] if names else []


class DropCounts:
    """Base of data classes that count what is dropped, by reason, with the first few places as examples."""

    dropped: dict[str, int]
    examples: dict[str, list[str]]

    def drop(self, reason: str, example: str) -> None:
        """``example``: the place of what is dropped."""
        self.add_dropped({reason: 1}, {reason: [example]})

    def add_dropped(self, counts: Mapping[str, int], examples: Mapping[str, list[str]]) -> None:
        """Add counts and examples of other statistics."""
        add_counts(self.dropped, counts)
        for reason in counts:
            self.examples[reason] = [*self.examples.get(reason, []), *examples[reason]][:MOST_EXAMPLES]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines_of_dropped(self, so_far: str = "") -> list[str]:
        """Return one line per reason, with its count and first example."""
        return [
            f"dropped{so_far}: {count:,} × {reason}, first: {self.examples[reason][0]}"
            for reason, count in sorted(self.dropped.items())
        ]

    def describe_dropped(self) -> str:
        """Return a phrase for a message, for instance "2 × empty text (notes.jsonl row 3)", or "nothing"."""
        parts = [f"{count:,} × {reason} ({self.examples[reason][0]})" for reason, count in self.dropped.items()]
        return "; ".join(parts) or "nothing"


def add_counts(into: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count


@dataclass
class DataStatistics(DropCounts):
    """Counts of one preparation. With streaming they grow as training reads rows, and start over in each pass.

    documents, eval_documents: training and held-out documents. documents_cut: documents longer than a row, which are
    split over several rows without loss. answers_cut: conversations, and prompts with completions, with an answer that
    continues in a row without the question. rows_read: rows read from the sources. rows_dropped: counts by reason.
    blocks, eval_rows: training and held-out rows of tokens. train_tokens: tokens in training rows. supervised_tokens,
    eval_tokens: labels other than -100, which are what the loss counts after the causal shift. heldout_duplicates:
    held-out documents with the same tokens as a training document (None with streaming, which does not look for them).
    formats: rows by format, including the columns read. columns_not_used: rows with a value, by unused column.
    rendered_away: conversations by the part that the chat template leaves out. roles_not_known: turns that are not
    learned because their role is unknown, by role. role_places: the first row with each such role. empty_answers: empty
    answers, which are not learned, in conversations with other answers. sources: counts of each source of a mixture,
    see ``SourceStatistics``; blocks and tokens are then those of one epoch.
    """

    streaming: bool = False
    rows_read: int = 0
    documents: int = 0
    eval_documents: int = 0
    documents_cut: int = 0
    answers_cut: int = 0
    blocks: int = 0
    eval_rows: int = 0
    train_tokens: int = 0
    supervised_tokens: int = 0
    eval_tokens: int = 0
    heldout_duplicates: int | None = None
    rows_dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    columns_not_used: dict[str, int] = field(default_factory=dict)
    rendered_away: dict[str, int] = field(default_factory=dict)
    roles_not_known: dict[str, int] = field(default_factory=dict)
    role_places: dict[str, str] = field(default_factory=dict)
    empty_answers: int = 0
    sources: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> dict[str, int]:
        return self.rows_dropped

    def add(self, other: DataStatistics) -> None:
        """Add the rows that ``other`` has read and dropped."""
        self.rows_read += other.rows_read
        self.add_dropped(other.rows_dropped, other.examples)
        for name in ("formats", "columns_not_used", "rendered_away", "roles_not_known"):
            add_counts(getattr(self, name), getattr(other, name))
        self.empty_answers += other.empty_answers
        self.role_places = {**other.role_places, **self.role_places}

    def lines(self) -> list[str]:
        so_far = " so far" if self.streaming else ""
        lines = self._lines_of_columns()
        lines += [
            f"documents: {self.rows_read:,} read, {self.documents:,} for training{so_far}, "
            f"{self.eval_documents:,} held out",
            f"training: {count_text(self.blocks, 'row')}, {count_text(self.train_tokens, 'token')}, "
            f"{self.supervised_tokens:,} learned{so_far}",
            f"held out: {count_text(self.eval_rows, 'row')}, {count_text(self.eval_tokens, 'token')} predicted",
        ]
        lines += [SourceStatistics(**source).line(so_far) for source in self.sources]
        if self.documents_cut:
            longer = count_text(self.documents_cut, "document is", "documents are")
            lines.append(f"{longer} longer than a row; what does not fit continues in the next rows")
        if self.answers_cut:
            cut = count_text(self.answers_cut, "conversation is", "conversations are")
            lines.append(
                f"{cut} cut: answers continue in a row without their question (a larger block_size keeps more of them "
                "whole, and so does packing: false if rows are packed)"
            )
        lines += self._lines_of_omissions(so_far)
        if self.heldout_duplicates:
            twice = count_text(self.heldout_duplicates, "held-out document is", "held-out documents are")
            lines.append(f"{twice} also in the training data, word for word")
        return [*lines, *self.notes]

    def lines_of_reading(self) -> list[str]:
        """Return lines about what was read and dropped, without those about the resulting rows."""
        return [*self._lines_of_columns(), *self._lines_of_omissions(""), *self.notes]

    def _lines_of_columns(self) -> list[str]:
        lines = [f"read as: {name} ({count_text(count, 'row')})" for name, count in self.formats.items()]
        return lines + unused_column_lines(self.columns_not_used)

    def _lines_of_omissions(self, so_far: str) -> list[str]:
        lines = self.lines_of_dropped(so_far)
        for what, count in self.rendered_away.items():
            lines.append(f"the chat template leaves out {what}, in {count_text(count, 'conversation')}")
        if self.empty_answers:
            lines.append(f"empty answers in conversations with other answers: {self.empty_answers:,}, not learned")
        for role, count in self.roles_not_known.items():
            lines.append(
                f"role {role!r} is not known ({count_text(count, 'turn')}, first in {self.role_places[role]}): not "
                "learned; rename it to assistant in the data if its words should be learned"
            )
        return lines


@dataclass
class SourceStatistics:
    """Counts of one source of a mixture.

    available_rows: its training rows (None with streaming: unknown). rows: its rows in an epoch, including repeated
    ones; with streaming, the rows yielded so far. rows_left_out: those of available_rows that no epoch contains.
    passes: rows / available_rows; with streaming, how often it was started. supervised_tokens: tokens to learn in
    ``rows``. Shares are between 0 and 1. asked_share: requested share of the rows (None without weights). row_share,
    token_share: actual shares of the rows and of the learned tokens.
    """

    name: str
    dataset: str
    rows_read: int = 0
    rows_dropped: int = 0
    documents: int = 0
    eval_documents: int = 0
    available_rows: int | None = None
    rows: int = 0
    rows_left_out: int | None = None
    passes: float = 0.0
    supervised_tokens: int = 0
    asked_share: float | None = None
    row_share: float = 0.0
    token_share: float = 0.0

    def line(self, so_far: str) -> str:
        asked = "" if self.asked_share is None else f"{self.asked_share:.2%} asked, "
        if not self.rows:  # streaming, before the first row
            return f"source {self.name}: {asked}no row{so_far}, {count_text(self.eval_documents, 'document')} held out"
        return (
            f"source {self.name}: {count_text(self.rows_read, 'row')} read, {count_text(self.documents, 'document')} "
            f"for training, {self.eval_documents:,} held out; {asked}{self.row_share:.2%} of the rows ({self.rows:,}) "
            f"and {self.token_share:.2%} of the tokens learned ({self.supervised_tokens:,}){so_far}{self._repetition()}"
        )

    def _repetition(self) -> str:
        if self.available_rows is None:
            return f"; begun {self.passes:g} times" if self.passes > 1 else ""
        if self.rows_left_out:
            return f"; an epoch leaves out {self.rows_left_out:,} of its {self.available_rows:,} rows"
        if self.rows > self.available_rows:
            return f"; an epoch has each of its {self.available_rows:,} rows {self.passes:.2f} times on average"
        return ""


def set_shares(sources: list[SourceStatistics]) -> None:
    """Set the actual shares of all sources from their counts."""
    rows, tokens = (sum(getattr(source, name) for source in sources) for name in ("rows", "supervised_tokens"))
    for source in sources:
        source.row_share = source.rows / rows if rows else 0.0
        source.token_share = source.supervised_tokens / tokens if tokens else 0.0
