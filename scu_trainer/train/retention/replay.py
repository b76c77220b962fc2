"""Add anchor rows to a batch: how many, which ones, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.nn import functional

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.errors import ControlError
from scu_trainer.train.step.batches.rows import NOT_LEARNED

NO_NUMBER = -1
"""``sample_index`` of a row that does not belong to the training data."""


@dataclass
class Replay:
    """Rows of ``rows`` in an order that depends on ``seed``, reshuffled each time all were used.

    ``rank`` takes every ``world``-th of them. ``used``: rows used on each rank so far. ``owed``: the fraction of a row
    that the share has asked for but that was not used yet.
    """

    rows: Sequence[Mapping[str, Any]]
    collate: Callable[[list], Mapping[str, Any]]
    seed: int
    rank: int = 0
    world: int = 1
    used: int = 0
    owed: float = 0.0
    _order: tuple[int, numpy.ndarray] = field(default=(-1, numpy.empty(0, dtype=int)), repr=False)

    def add_to_batch(self, inputs: Any, nominal_rows: int, share: float) -> Any:
        """Add so many rows to ``inputs`` that they make up ``share`` of ``nominal_rows`` plus themselves. Over time
        this is exact to within one row. Every rank adds the same number."""
        self.owed += nominal_rows * share / (1.0 - share)
        count = int(self.owed)
        if not count:
            return inputs
        joined = joined_rows(inputs, self.collate([self.rows[number] for number in self._next_numbers(count)]))
        self.owed, self.used = self.owed - count, self.used + count
        return joined

    def _next_numbers(self, count: int) -> list[int]:
        places = [(self.used + place) * self.world + self.rank for place in range(count)]
        return [int(self._order_of_pass(place // len(self.rows))[place % len(self.rows)]) for place in places]

    def _order_of_pass(self, number: int) -> numpy.ndarray:
        if self._order[0] != number:
            self._order = number, numpy.random.default_rng([self.seed, number]).permutation(len(self.rows))
        return self._order[1]


def joined_rows(inputs: Any, more: Mapping[str, Any]) -> Any:
    """Return one batch of the rows of both, padded on the right to the longer one, on the device of ``inputs``. Raises
    ControlError if their columns differ."""
    more = dict(more)
    if SAMPLE_INDEX in inputs:
        more[SAMPLE_INDEX] = torch.full((len(more["input_ids"]),), NO_NUMBER, dtype=torch.int64)
    if {*inputs} != {*more}:
        raise ControlError(
            f"replay adds rows with {', '.join(sorted(more))} to batches with {', '.join(sorted(inputs))}; set "
            "retain_actuator: lambda, or train on batches with the same columns"
        )
    width = max(inputs["input_ids"].size(1), more["input_ids"].size(1))
    joined = {
        name: torch.cat([_pad_to_width(name, part, width) for part in (inputs[name], more[name].to(inputs[name]))])
        for name in inputs
    }
    return type(inputs)(joined)


def _pad_to_width(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pad (rows, time) to ``width``; return (rows,) unchanged. Positions of the padding start at 0 again, as in the
    collator, because it is a document of its own."""
    missing = width - tensor.size(1) if tensor.dim() == 2 else 0
    if not missing:
        return tensor
    if name == "position_ids":
        padding = torch.arange(missing, device=tensor.device, dtype=tensor.dtype).expand(len(tensor), missing)
        return torch.cat([tensor, padding], dim=1)
    return functional.pad(tensor, (0, missing), value=NOT_LEARNED if name == "labels" else 0)
