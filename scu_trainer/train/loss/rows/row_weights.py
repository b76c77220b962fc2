"""Factors of rows' losses: those of the epoch plan, and those that make rows of batches of unequal size count alike."""

from __future__ import annotations

from typing import Optional

import numpy
import torch

from scu_trainer.control.curriculum import EpochPlan
from scu_trainer.train.loss.rows.row_readings import RowLossReading


class RowWeights:
    """Row weights of one epoch. ``batches_per_window``: micro-batches of all ranks in one optimizer step.

    ``equal_rows``: batches of the plan have unequal numbers of rows, but each row should count once. A loss that is
    divided by tokens needs no correction, because such batches have about equal numbers of tokens. In a mean over rows,
    or a sum divided by the rows of the window, rows of large batches would count less.
    """

    def __init__(
        self, plan: EpochPlan, samples: int, batches_per_window: int, equal_rows: bool, device: torch.device
    ) -> None:
        self._plan, self._samples, self._device = plan, samples, device
        self._batches_per_window = batches_per_window if equal_rows else None
        self._known: dict[str, Optional[torch.Tensor]] = {}

    def of(self, ids: torch.Tensor, reading: Optional[RowLossReading]) -> Optional[torch.Tensor]:
        """Return the weights of rows, (rows,); None if all are 1."""
        grouping = self._grouping(reading)
        if grouping not in self._known:
            weights = self._make_factors(grouping)
            self._known[grouping] = None if weights is None else torch.from_numpy(weights).to(self._device)
        weights = self._known[grouping]
        return None if weights is None else weights[ids]

    def _grouping(self, reading: Optional[RowLossReading]) -> str:
        if self._batches_per_window is None or reading is None or not reading.counts_rows:
            return "plan"
        return {"items": "window", "nothing": "plan"}.get(reading.divides_by, "batch")

    def _make_factors(self, grouping: str) -> Optional[numpy.ndarray]:
        if grouping == "plan":
            return self._plan.weights
        group = 1 if grouping == "batch" else self._batches_per_window
        sizes = self._plan.batches.sizes
        rows = numpy.add.reduceat(sizes, numpy.arange(0, len(sizes), group))
        share = rows / rows.mean()
        factors = numpy.ones(self._samples, dtype=numpy.float32)
        factors[self._plan.batches.order] = numpy.repeat(share, rows)
        return factors if self._plan.weights is None else factors * self._plan.weights
