"""Batches on their way from the loader to the step: counted, and cut while the length warms up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.train.rows import NOT_LEARNED, Batch, follows_time, layout_for


@dataclass
class Counts:
    """What was delivered. ``padded_tokens``: as the batches came; ``cut_tokens``: taken from rows by length warm-up.

    Tokens are rows for inputs without a length.
    """

    rows: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    cut_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Deliveries:
    """Of this rank, since ``drain`` was last called."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._counts = Counts()
        self._real_tokens: Optional[torch.Tensor] = None

    def drain(self) -> Counts:
        """Waits for the device once."""
        counts, self._counts = self._counts, Counts()
        if self._real_tokens is not None:
            counts.real_tokens += int(self._real_tokens)
            self._real_tokens = None
        return counts

    def pass_on(self, inputs: Any, limit: Optional[int]) -> Any:
        """The batch, with rows of at most ``limit`` tokens."""
        if limit is not None:
            inputs = self._cut(inputs, limit)
        mask, rows = inputs.get("attention_mask"), len(inputs["sample_index"])
        padded = rows * _width(inputs, mask)
        self._counts.rows += rows
        self._counts.padded_tokens += padded
        if torch.is_tensor(mask) and mask.dim() == 2:
            real = mask.sum()  # stays on the device
            self._real_tokens = real if self._real_tokens is None else self._real_tokens + real
        else:
            self._counts.real_tokens += padded
        return inputs

    def _cut(self, inputs: Any, limit: int) -> Any:
        batch = layout_for(self._model, inputs)
        if not batch.trimmable or batch.is_encoder_decoder or batch.width <= limit:
            return inputs
        cut = {
            name: value[:, :limit].contiguous() if follows_time(name, value, batch) else value
            for name, value in inputs.items()
        }
        if not _has_targets(cut, batch):
            return inputs  # cut there, nothing would be left to learn
        self._counts.cut_tokens += sum(max(0, length - limit) for length in batch.needed)
        return type(inputs)(cut)


def _width(inputs: Any, mask: Any) -> int:
    """Columns of the time axis; 1 without one."""
    for value in (mask, inputs.get("input_ids")):
        if torch.is_tensor(value) and value.dim() == 2:
            return value.size(1)
    return 1


def _has_targets(inputs: dict[str, Any], batch: Batch) -> bool:
    labels = inputs.get("labels")
    if not torch.is_tensor(labels) or labels.dim() != 2:
        return True
    return bool((labels[:, 1:] != NOT_LEARNED).any())
