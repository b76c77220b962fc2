"""Score anchor rows: row by row for the base, by samples during training, and by document for the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy
from accelerate.utils import gather_object
from transformers import Trainer

from scu_trainer.data.text.anchor import round_robin_rows
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.train.evaluation.scoring import DocumentScores, evaluation_path_of, score_documents
from scu_trainer.train.loss.evaluation_path import EvaluationPath
from scu_trainer.train.step.distributed.sharded import training_precision

FEW_ROWS = 32
"""Up to this many rows are scored without checking again whether the model can run without logits and padding, because
that check would take a fifth of the time."""

MOST_JUDGED = 256
"""Maximum number of held-out rows that show what scaling costs; more would take time and change little."""


@dataclass(frozen=True)
class _RowSubset:
    """Some rows in the form that ``score_documents`` reads; each counts as a document."""

    rows: Any
    numbers: numpy.ndarray

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return list(range(len(self.numbers))) if key == "document" else self.rows[self.numbers.tolist()][key]
        return self.rows[int(self.numbers[key])]


class Passages:
    """Scores rows of text. ``rows``: numbered, like held-out rows; each is scored by one rank, and all get all scores.

    ``documents``: the document of each row, shape (rows,). Running out of memory halves the batch size.
    """

    def __init__(self, rows: Any, trainer: Trainer, collate: Any) -> None:
        self.rows, self._trainer, self._collate = rows, trainer, collate
        self.documents = numpy.asarray(rows["document"])
        self.order = round_robin_rows(self.documents)
        self._path: Optional[EvaluationPath] = None

    def __len__(self) -> int:
        return len(self.documents)

    def all(self) -> numpy.ndarray:
        return numpy.arange(len(self))

    def some(self) -> numpy.ndarray:
        """Return at most MOST_JUDGED row numbers, from as many documents as possible."""
        return self.order[:MOST_JUDGED]

    def sample(self, start: int, count: int) -> numpy.ndarray:
        """Return ``count`` row numbers from ``start`` on, cyclically, with neighbors from different documents."""
        return self.order[(start + numpy.arange(min(count, len(self)))) % len(self)]

    def scored(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """Return the summed loss in nats and the predicted tokens of each row in ``numbers``, shape (numbers, 2). Uses
        the model as it is, without dropout."""
        accelerator = self._trainer.accelerator
        own = numbers[accelerator.process_index :: accelerator.num_processes]
        found = self._score_on_this_rank(own) if len(own) else numpy.zeros((0, 2))
        parts = gather_object([found])
        whole = numpy.empty((len(numbers), 2))
        for rank, part in enumerate(parts):
            whole[rank :: len(parts)] = part
        return whole

    def _score_on_this_rank(self, numbers: numpy.ndarray) -> numpy.ndarray:
        model = self._trainer.model
        with training_precision(self._trainer):
            if self._path is None or self._path.model is not model or len(numbers) > FEW_ROWS:
                self._path = evaluation_path_of(model)
            scores = score_documents(model, _RowSubset(self.rows, numbers), self._collate, path=self._path)
        return numpy.stack([scores.nats, scores.tokens], axis=1)

    def by_document(self, numbers: numpy.ndarray, scores: numpy.ndarray) -> DocumentScores:
        """Return the ``scores`` of the rows ``numbers``, summed by document."""
        _, document_index = numpy.unique(self.documents[numbers], return_inverse=True)
        nats, tokens = (numpy.bincount(document_index, weights=scores[:, column]) for column in (0, 1))
        return DocumentScores(nats, tokens.astype(numpy.int64))


def extra_bits(before: DocumentScores, after: DocumentScores) -> tuple[Sequence[float], Sequence[float]]:
    """Return, for each document, how many more bits it costs than before, and its number of tokens."""
    return ((after.nats - before.nats) / NATS_PER_BIT).tolist(), before.tokens.tolist()
