"""Count batches on their way from the loader to the step, and cut their rows while the length warms up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.errors import ControlError
from scu_trainer.train.step.batches.rows import NOT_LEARNED, PADDING, has_time


@dataclass
class DeliveryCounts:
    """Counts of delivered rows and tokens.

    ``real_tokens``: in the rows of the dataset. ``padded_tokens``: in the batches made of them. ``cut_tokens``: removed
    by length warm-up. ``classified``: rows for which the model predicted a class in training. ``correct``: those with
    the right class. Tokens are those of ``input_ids``; inputs without a length count as one token per row.
    """

    rows: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    cut_tokens: int = 0
    classified: int = 0
    correct: int = 0

    def __add__(self, other: DeliveryCounts) -> DeliveryCounts:
        return DeliveryCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Deliveries:
    """Counts the deliveries of this rank since the last ``drain``."""

    def __init__(self, model: torch.nn.Module) -> None:
        config = getattr(model, "config", None)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self._counts = DeliveryCounts()

    def drain(self) -> DeliveryCounts:
        counts, self._counts = self._counts, DeliveryCounts()
        return counts

    def cut_and_count(self, inputs: Any, limit: Optional[int]) -> Any:
        """Return the batch with rows of at most ``limit`` tokens, and count it."""
        if limit is not None and _width(inputs) > limit:
            inputs = self._cut(inputs, limit)
        rows = sum(number >= 0 for number in inputs[SAMPLE_INDEX].tolist())  # others are not from the training data
        self._counts.rows += rows
        self._counts.padded_tokens += rows * _width(inputs)
        return inputs

    def _cut(self, inputs: Any, limit: int) -> Any:
        """Cut rows on the right. Raises ControlError if the batch is not text that can be cut there."""
        self._require_cuttable_text(inputs)
        timed = {name: value for name, value in inputs.items() if name in PADDING and has_time(name, value)}
        cut = {**inputs, **{name: value[:, :limit].contiguous() for name, value in timed.items()}}
        labels = cut.get("labels")
        if has_time("labels", labels) and not bool((labels[:, 1:] != NOT_LEARNED).any()):
            return inputs  # after the cut, nothing would be left to learn
        mask = inputs.get("attention_mask")
        rest = torch.ones_like(inputs["input_ids"])[:, limit:] if mask is None else mask[:, limit:]
        cut_tokens, batch = int(rest.sum()), type(inputs)(cut)
        self._counts.cut_tokens += cut_tokens  # last, because all of this is repeated after running out of memory
        return batch

    def _require_cuttable_text(self, inputs: Any) -> None:
        mask, width = inputs.get("attention_mask"), _width(inputs)
        others = [
            name
            for name, value in inputs.items()
            if torch.is_tensor(value) and value.dim() > 1 and (name not in PADDING or value.size(1) != width)
        ]
        reason = None
        if self._is_encoder_decoder:
            reason = "an encoder-decoder has two lengths"
        elif "input_ids" not in inputs or others:
            reason = f"batches hold {', '.join(others) or 'no input_ids'}, so their columns are not tokens"
        elif mask is not None and not bool(mask[:, 0].all()):
            reason = "rows are padded on the left, where cutting would leave the padding"
        if reason is not None:
            raise ControlError(f"curriculum length_warmup: {reason}; leave length_warmup out")


def _width(inputs: Any) -> int:
    """Return the length of the time axis; 1 if there is none."""
    for value in (inputs.get("attention_mask"), inputs.get("input_ids")):
        if torch.is_tensor(value) and value.dim() == 2:
            return value.size(1)
    return 1
