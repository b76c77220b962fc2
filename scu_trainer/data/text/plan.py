"""What is to be prepared, and what comes out."""

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
    """One held-out document; ``document`` is its value in the column of that name of the held-out rows."""

    document: int
    name: str
    tokens: int
    utf8_bytes: int


@dataclass(frozen=True)
class PreparedData:
    """Rows for a Trainer. ``eval`` is None if nothing is held out.

    train: input_ids, labels, length, documents (numbers of those inside), and position_ids if they are isolated.
    eval: input_ids, labels, length, document. ``fingerprint`` names data, settings and tokenizer together.
    ``sources``: names of a mixture's sources, in order; empty without a mixture, or with held-out data of its own.
    Document d then belongs to source d modulo their number. ``stream``: the TrainingStream behind ``train``, if any.
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
