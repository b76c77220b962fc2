"""What became of every row that was read: nothing is dropped without a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

MOST_EXAMPLES = 3  # per reason


@dataclass
class DataStatistics:
    """Counts of one preparation. While streaming they grow as training reads, and start over with each pass.

    documents, eval_documents: documents in training and held out. documents_cut: documents longer than a row, cut into
    several (nothing of them is lost). rows_read: rows of the sources that were looked at. rows_dropped: by reason.
    blocks, eval_rows: rows of tokens. train_tokens: tokens in training rows. supervised_tokens, eval_tokens: labels
    other than -100, which is what the loss counts after the causal shift. heldout_duplicates: held-out documents whose
    tokens are also a training document (None while streaming: not looked for). formats: rows by the format that they
    were read in, with its columns. columns_not_used: rows that had a value in a column that is not read, by column.
    rendered_away: conversations of which the chat template leaves something out, by what.
    """

    streaming: bool = False
    rows_read: int = 0
    documents: int = 0
    eval_documents: int = 0
    documents_cut: int = 0
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
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: str, example: str, count: int = 1) -> None:
        """Count what is left out; the first few places are kept as examples."""
        self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + count
        if len(self.examples.setdefault(reason, [])) < MOST_EXAMPLES:
            self.examples[reason].append(example)

    def add(self, other: DataStatistics) -> None:
        """Take over the rows that ``other`` read and dropped."""
        self.rows_read += other.rows_read
        for reason, count in other.rows_dropped.items():
            self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + count
            self.examples[reason] = [*self.examples.get(reason, []), *other.examples[reason]][:MOST_EXAMPLES]
        for name in ("formats", "columns_not_used", "rendered_away"):
            count_all(getattr(self, name), getattr(other, name))

    def as_dict(self) -> dict:
        """JSON-like."""
        return asdict(self)

    def lines(self) -> list[str]:
        """A few lines for a person."""
        so_far = " so far" if self.streaming else ""
        lines = [f"read as: {name} ({count:,} rows)" for name, count in self.formats.items()]
        if self.columns_not_used:
            named = (f"{name} ({count:,} rows)" for name, count in self.columns_not_used.items())
            lines.append(f"columns not used: {', '.join(named)}")
        lines += [
            f"documents: {self.rows_read:,} read, {self.documents:,} for training{so_far}, "
            f"{self.eval_documents:,} held out",
            f"training: {self.blocks:,} rows, {self.train_tokens:,} tokens, {self.supervised_tokens:,} learned{so_far}",
            f"held out: {self.eval_rows:,} rows, {self.eval_tokens:,} tokens predicted",
        ]
        if self.documents_cut:
            lines.append(f"{self.documents_cut:,} documents are longer than a row and go on in the next ones")
        for reason, count in sorted(self.rows_dropped.items()):
            lines.append(f"dropped{so_far}: {count:,} × {reason}, first: {self.examples[reason][0]}")
        lines += [
            f"the chat template leaves out {what}, in {count:,} conversations"
            for what, count in self.rendered_away.items()
        ]
        if self.heldout_duplicates:
            lines.append(f"{self.heldout_duplicates:,} held-out documents are also in the training data, word for word")
        return [*lines, *self.notes]

    @property
    def is_anything_dropped(self) -> bool:
        return bool(self.rows_dropped)

    def dropped_in_words(self) -> str:
        """Phrase for an error message, for instance "2 × empty text (notes.jsonl row 3)", or "nothing"."""
        parts = [f"{count:,} × {reason} ({self.examples[reason][0]})" for reason, count in self.rows_dropped.items()]
        return "; ".join(parts) or "nothing"


def count_all(into: dict[str, int], more: Mapping[str, int]) -> None:
    """Add the counts of ``more``."""
    for name, count in more.items():
        into[name] = into.get(name, 0) + count
