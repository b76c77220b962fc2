"""Collect the losses of rows during training until they are needed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy
import torch

from scu_trainer.errors import NonFiniteLoss
from scu_trainer.train.loss.rows.row_readings import RowLosses
from scu_trainer.train.step.recovery.second_try import second_try

logger = logging.getLogger("scu_trainer")

MOST_BAD_ROWS = 16
"""Number of consecutive rows, from several batches, without a finite loss at which the model and not the data is at
fault."""

PENDING_BATCHES = 256
"""Maximum number of batches with losses on the device; then they move to the host together."""

MOST_ROWS = 2**20
"""Maximum number of rows on the host with a single process, because the losses of a whole epoch would take more memory
than all other knowledge about rows. Several ranks exchange theirs at the end of an epoch and at checkpoints."""


READING_LOSSES = "reading the losses of the rows"


@dataclass(frozen=True)
class Losses:
    """Arrays of shape (k,), in the order in which rows were seen, each row once per optimizer step.

    ``losses``: mean in nats; NaN if nothing in the row is learned or its loss cannot be read (then ``known`` is False),
    or if it is not finite. ``labels``: class, or -1. ``predicted``: the class that the model predicted, or -1.
    """

    steps: numpy.ndarray
    ids: numpy.ndarray
    losses: numpy.ndarray
    labels: numpy.ndarray
    predicted: numpy.ndarray
    known: numpy.ndarray

    @classmethod
    def join(cls, parts: Sequence[Losses]) -> Losses:
        """Join parts in the order of steps; within a step, in the order of ``parts``."""
        joined = {name: numpy.concatenate([getattr(part, name) for part in parts]) for name in cls.__annotations__}
        order = numpy.argsort(joined["steps"], kind="stable")
        return cls(**{name: values[order] for name, values in joined.items()})

    @property
    def is_bad(self) -> numpy.ndarray:
        return self.known & ~numpy.isfinite(self.losses)

    def take(self, which: numpy.ndarray) -> Losses:
        return Losses(*(getattr(self, name)[which] for name in type(self).__annotations__))


NOTHING = Losses(
    *(numpy.zeros(0, kind) for kind in (numpy.int64, numpy.int64, numpy.float64, numpy.int64, numpy.int64, bool))
)


class SeenLosses:
    """Keeps losses on the device; nothing waits for it before ``drain``."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, torch.Tensor, Optional[RowLosses]]] = []
        self._on_host: list[Losses] = []
        self._bad_in_a_row: set[int] = set()
        self._bad_batches = self._bad_since = 0

    def record(self, step: int, ids: torch.Tensor, losses: Optional[RowLosses]) -> None:
        """Record the losses of a batch. ``losses``: None if they cannot be read."""
        self._bad_in_a_row.clear()
        self._bad_batches = 0
        self._add(step, ids, losses)

    def _add(self, step: int, ids: torch.Tensor, losses: Optional[RowLosses]) -> None:
        self._pending.append((step, ids, losses))
        if len(self._pending) >= PENDING_BATCHES:
            second_try(self._to_host, READING_LOSSES)

    def quarantine(self, step: int, ids: torch.Tensor) -> None:
        """Set aside rows with a non-finite loss. Raises NonFiniteLoss if so many that the model is at fault."""
        nothing = torch.full(ids.shape, math.nan, device=ids.device)
        unread = RowLosses(nothing, torch.ones_like(nothing))  # allocate first, because this may be repeated
        new = set(ids.tolist()) - self._bad_in_a_row  # empty if a batch runs again after running out of memory
        self._bad_in_a_row |= new
        self._bad_batches += bool(new)
        self._bad_since = step if self._bad_batches == 1 else self._bad_since
        self._add(step, ids, unread)
        logger.warning(
            "step %d: the loss of sample %s is not a finite number; set aside, not trained on again",
            step + 1,
            ", ".join(map(str, ids.tolist())),
        )
        if len(self._bad_in_a_row) >= MOST_BAD_ROWS and self._bad_batches > 1:
            self._release_current_series()
            raise NonFiniteLoss(
                f"step {step + 1}: {len(self._bad_in_a_row)} rows in a row gave no finite loss, so the cause "
                "is the model and not its data. Lower learning_rate, use bf16 instead of fp16, or resume from the "
                "newest checkpoint"
            )

    def forget(self, step: int) -> None:
        """Forget what was recorded in ``step``, but keep non-finite rows set aside."""
        second_try(self._to_host, READING_LOSSES)
        self._on_host = [seen.take((seen.steps != step) | seen.is_bad) for seen in self._on_host]

    def _release_current_series(self) -> None:
        """Do not set aside the rows of the current series, so that a run that resumes from here does not miss them."""
        self._to_host()
        self._on_host = [seen.take((seen.steps < self._bad_since) | ~seen.is_bad) for seen in self._on_host]

    @property
    def is_full(self) -> bool:
        """Whether to call ``drain``: there are many losses, and no row among them may still be released."""
        return sum(len(part.ids) for part in self._on_host) >= MOST_ROWS and not self._bad_batches

    def drain(self) -> Losses:
        """Return all losses since the last call. For batches that ran again, only the last time counts."""
        second_try(self._to_host, READING_LOSSES)
        found = second_try(self._last_seen, READING_LOSSES)
        self._on_host = []
        return found

    def _last_seen(self) -> Losses:
        found = Losses.join(self._on_host) if self._on_host else NOTHING
        found = found.take(found.ids >= 0)  # rows that another loop has added have no number
        return found.take(_last_of_each(found.steps, found.ids)) if len(found.ids) else found

    def _to_host(self) -> None:
        """Move all losses to the host, or none: what could not be read stays pending."""
        pending = self._pending
        if not pending:
            return
        steps = numpy.repeat([step for step, _, _ in pending], [len(ids) for _, ids, _ in pending])
        ids = _to_numpy([ids for _, ids, _ in pending])
        columns = zip(*(_columns(ids, losses) for _, ids, losses in pending), strict=True)
        sums, counts, labels, predicted = (_to_numpy(column) for column in columns)
        known = counts > 0
        means = numpy.where(known, sums.astype(numpy.float64) / numpy.maximum(counts, 1), numpy.nan)
        self._on_host.append(Losses(steps.astype(numpy.int64), ids, means, labels, predicted, known))
        self._pending = []


def _columns(ids: torch.Tensor, losses: Optional[RowLosses]) -> tuple[torch.Tensor, ...]:
    """Return (sums, counts, labels, predicted), each of shape (rows,)."""
    nothing = torch.zeros(ids.shape, device=ids.device)
    no_label = torch.full_like(ids, -1)
    if losses is None:
        return nothing, nothing, no_label, no_label
    labels, predicted = (
        no_label if found is None else found.to(no_label) for found in (losses.labels, losses.predicted)
    )
    return losses.sums, losses.counts, labels, predicted


def _to_numpy(parts: Sequence[torch.Tensor]) -> numpy.ndarray:
    return torch.cat(list(parts)).cpu().numpy()


def _last_of_each(steps: numpy.ndarray, ids: numpy.ndarray) -> numpy.ndarray:
    """Return the positions of the last entry of every (step, id), in ascending order."""
    key = steps * (ids.max() + 1) + ids
    _, first_from_behind = numpy.unique(key[::-1], return_index=True)
    return numpy.sort(len(ids) - 1 - first_from_behind)
