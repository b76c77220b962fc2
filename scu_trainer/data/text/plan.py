"""The plan for preparing text data, and the prepared data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from scu_trainer.data.sources import Source, notes_of
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import digest_of
from scu_trainer.data.text import documents
from scu_trainer.data.text.encode import Encoder
from scu_trainer.settings import DataSettings

if TYPE_CHECKING:
    import datasets

ROWS_VERSION = 2  # raise it when the same documents and settings would give other rows


class HeldOutDocument(NamedTuple):
    """A held-out document. ``document`` is its number, as in the column ``document`` of the held-out rows."""

    document: int
    name: str
    tokens: int
    utf8_bytes: int


@dataclass(frozen=True)
class PreparedData:
    """Rows for a Trainer. ``eval`` is None if nothing is held out.

    train: input_ids, labels, length, documents (numbers of the documents in the row), and position_ids if documents are
    isolated. eval: input_ids, labels, length, document. ``fingerprint`` changes with data, settings or tokenizer.
    ``sources``: names of a mixture's sources, in order, so that document d belongs to source d modulo their number;
    empty without a mixture, or with a separate eval_dataset. ``stream``: the TrainingStream behind ``train``, if any.
    """

    train: Union[datasets.Dataset, datasets.IterableDataset]
    eval: Optional[datasets.Dataset]
    statistics: DataStatistics
    fingerprint: str
    eval_documents: tuple[HeldOutDocument, ...]
    sources: tuple[str, ...] = field(default=(), kw_only=True)
    stream: Any = field(default=None, kw_only=True)


class EncodingPlan(NamedTuple):
    """Everything that decides the rows."""

    settings: DataSettings
    encoder: Encoder
    source: Source
    held_out: Optional[Source]
    seed: int
    cache_dir: Path

    @property
    def notes(self) -> tuple[str, ...]:
        return notes_of(self.source, self.held_out)

    @property
    def fingerprint(self) -> str:
        settings = self.settings
        names = ("block_size", "packing", "isolate_documents", "validation_split_percentage", "max_eval_documents")
        rules = {name: getattr(settings, name) for name in (*names, "dataset_size", "streaming")}
        held_out = self.held_out.identity if self.held_out else None
        versions = [ROWS_VERSION, documents.DOCUMENTS_VERSION]
        return digest_of(versions, self.source.identity, held_out, self.encoder.identity, rules, self.seed)
