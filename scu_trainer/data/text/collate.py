"""Collate rows into one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from scu_trainer.data.text.encode import NOT_LEARNED


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right to the longest one and returns int64 tensors of shape (rows, time).

    Padding is recognized by its position, never by the pad token: many models pad with eos, and eos must be learned.
    Rows with ``position_ids`` hold isolated documents and get no attention_mask: with a mask of ones, models would not
    read the positions as document borders, and documents would silently attend to each other. For the same reason the
    model must run with ``use_cache=False``, as a Trainer does. All other rows get a mask.
    ``carry`` names integer columns that the batch keeps, as tensors of shape (rows,), if the rows have them.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: Optional[int] = None
    carry: tuple[str, ...] = ("sample_index",)

    @classmethod
    def of(cls, tokenizer, pad_to_multiple_of: Optional[int] = None) -> Collator:
        """Pad with the tokenizer's pad token, else its eos, else token 0. The choice does not affect the loss."""
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return cls(next(token for token in candidates if token is not None), pad_to_multiple_of)

    def __call__(self, rows: Sequence[dict]) -> dict:
        import torch

        lengths = [len(row["input_ids"]) for row in rows]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        batch = {
            "input_ids": _padded_tensor([row["input_ids"] for row in rows], width, self.pad_token_id),
            "labels": _padded_tensor([row["labels"] for row in rows], width, NOT_LEARNED),
        }
        if "position_ids" in rows[0]:
            batch["position_ids"] = _padded_positions([row["position_ids"] for row in rows], width)
        else:
            batch["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        for name in self.carry:
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.int64)
        return batch


def _padded_tensor(sequences: list[Sequence[int]], width: int, value: int):
    import torch

    filled = torch.full((len(sequences), width), value, dtype=torch.int64)
    for row, sequence in zip(filled, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
    return filled


def _padded_positions(sequences: list[Sequence[int]], width: int):
    """Pad position ids. The padding restarts at position 0, so that it is a separate document."""
    padded = [[*sequence, *range(width - len(sequence))] for sequence in sequences]
    return _padded_tensor(padded, width, 0)
