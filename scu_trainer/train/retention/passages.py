"""Losses on anchor rows: by row for the base, by sample while training, by document for what is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy
from accelerate.utils import gather_object
from transformers import Trainer

from scu_trainer.data.text.anchor import spread
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.train.evaluation.scoring import DocumentScores, evaluation_path_of, score_documents
from scu_trainer.train.loss.evaluation_path import EvaluationPath
from scu_trainer.train.step.distributed.sharded import training_precision

BATCH_TOKENS = 8192
"""Padded tokens of a forward pass; fewer where that does not fit."""

FEW_ROWS = 32
"""Scored without asking the model again whether it can do without logits and padding, which would take a fifth of the
time; with more rows it is asked each time."""

MOST_JUDGED = 256
"""Rows of what is held out, that say what a scale costs: more would take time and change little."""


@dataclass(frozen=True)
class _Chosen:
    """What ``score_documents`` reads, of some rows: each counts as a document."""

    rows: Any
    numbers: numpy.ndarray

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return list(range(len(self.numbers))) if key == "document" else self.rows[self.numbers.tolist()][key]
        return self.rows[int(self.numbers[key])]


class Passages:
    """``rows``: as held-out rows, numbered; each is scored by one rank, and all ranks know all scores.

    ``documents``: of each row, shape (rows,). Running out of memory halves what is scored at once.
    """

    def __init__(self, rows: Any, trainer: Trainer, collate: Any) -> None:
        self.rows, self._trainer, self._collate = rows, trainer, collate
        self.documents = numpy.asarray(rows["document"])
        self.order = spread(self.documents)
        self._path: Optional[EvaluationPath] = None

    def __len__(self) -> int:
        return len(self.documents)

    def all(self) -> numpy.ndarray:
        return numpy.arange(len(self))

    def some(self) -> numpy.ndarray:
        """What is judged of rows that may be many: MOST_JUDGED at most, of as many documents as there are."""
        return self.order[:MOST_JUDGED]

    def sample(self, start: int, count: int) -> numpy.ndarray:
        """``count`` row numbers from ``start`` on, around and around, next to each other of different documents."""
        return self.order[(start + numpy.arange(min(count, len(self)))) % len(self)]

    def scored(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """Summed loss in nats and predicted tokens of each of ``numbers``, shape (numbers, 2). Of the model as it is,
        without dropout."""
        accelerator = self._trainer.accelerator
        own = numbers[accelerator.process_index :: accelerator.num_processes]
        found = self._scored_here(own) if len(own) else numpy.zeros((0, 2))
        if accelerator.num_processes == 1:
            return found
        parts = gather_object([found])
        whole = numpy.empty((len(numbers), 2))
        for rank, part in enumerate(parts):
            whole[rank :: len(parts)] = part
        return whole

    def _scored_here(self, numbers: numpy.ndarray) -> numpy.ndarray:
        model = self._trainer.model
        with training_precision(self._trainer):
            if self._path is None or self._path.model is not model or len(numbers) > FEW_ROWS:
                self._path = evaluation_path_of(model)
            scores = score_documents(model, _Chosen(self.rows, numbers), self._collate, BATCH_TOKENS, self._path)
        return numpy.stack([scores.nats, scores.tokens], axis=1)

    def by_document(self, numbers: numpy.ndarray, scores: numpy.ndarray) -> DocumentScores:
        """``scores`` of ``numbers``, added up."""
        _, place = numpy.unique(self.documents[numbers], return_inverse=True)
        nats, tokens = (numpy.bincount(place, weights=scores[:, column]) for column in (0, 1))
        return DocumentScores(nats, tokens.astype(numpy.int64))


def extra_bits(before: DocumentScores, after: DocumentScores) -> tuple[Sequence[float], Sequence[float]]:
    """Of each document: what it costs more than before, in bits, and its tokens."""
    return ((after.nats - before.nats) / NATS_PER_BIT).tolist(), before.tokens.tolist()
