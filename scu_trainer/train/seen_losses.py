"""Losses of rows as a training run sees them, until they are needed."""

from __future__ import annotations

import logging
import math

import numpy
import torch

from scu_trainer.errors import NonFiniteLoss
from scu_trainer.train.row_readings import RowLosses

logger = logging.getLogger("scu_trainer")

MOST_BAD_ROWS = 16
"""Rows one after the other without a finite loss from which on it is the model and not the data."""

Losses = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]
"""(optimizer step, sample, mean loss in nats, class or -1), shape (k,) each; in the order in which they were seen."""


class SeenLosses:
    """Keeps them on the device: nothing waits for it before ``drain``."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, torch.Tensor, RowLosses]] = []
        self._bad_in_a_row = 0

    def record(self, step: int, ids: torch.Tensor, losses: RowLosses) -> None:
        self._bad_in_a_row = 0
        self._pending.append((step, ids, losses))

    def quarantine(self, step: int, ids: torch.Tensor) -> None:
        """Rows whose loss is no finite number. Raises NonFiniteLoss where it is not single rows any more."""
        self._bad_in_a_row += len(ids)
        nothing = torch.full(ids.shape, math.nan, device=ids.device)
        self._pending.append((step, ids, RowLosses(nothing, torch.ones_like(nothing))))
        logger.warning(
            "step %d: the loss of sample %s is not a finite number; set aside, not trained on again",
            step + 1,
            ", ".join(map(str, ids.tolist())),
        )
        if self._bad_in_a_row >= MOST_BAD_ROWS:
            raise NonFiniteLoss(
                f"step {step + 1}: {self._bad_in_a_row} rows one after the other gave no finite loss: it is the model "
                "and not its data. Lower learning_rate, use bf16 instead of fp16, or resume from the newest checkpoint"
            )

    def drain(self) -> Losses:
        """All since the last call. A row counts once per step: what ran again after an out-of-memory comes several
        times, and its last time holds. A row of which nothing is learned has no loss."""
        pending, self._pending = self._pending, []
        if not pending:
            empty = numpy.zeros(0, numpy.int64)
            return empty, empty, numpy.zeros(0), empty
        steps = numpy.repeat([entry[0] for entry in pending], [len(entry[1]) for entry in pending])
        ids = _joined([entry[1] for entry in pending])
        sums, counts = (_joined([getattr(entry[2], name) for entry in pending]) for name in ("sums", "counts"))
        labels = _joined([_labels(entry[2]) for entry in pending])
        keep = _last_of_each(steps, ids)
        keep = keep[counts[keep] > 0]
        return steps[keep], ids[keep], sums[keep].astype(numpy.float64) / counts[keep], labels[keep]


def _joined(parts: list[torch.Tensor]) -> numpy.ndarray:
    return torch.cat(parts).cpu().numpy()


def _labels(losses: RowLosses) -> torch.Tensor:
    return torch.full_like(losses.sums, -1, dtype=torch.int64) if losses.labels is None else losses.labels


def _last_of_each(steps: numpy.ndarray, ids: numpy.ndarray) -> numpy.ndarray:
    """Positions of the last entry of every (step, id), ascending."""
    key = steps * (ids.max() + 1) + ids
    _, first_from_behind = numpy.unique(key[::-1], return_index=True)
    return numpy.sort(len(ids) - 1 - first_from_behind)
