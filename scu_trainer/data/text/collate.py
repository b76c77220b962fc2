"""Rows -> one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from scu_trainer.data.text.encode import NOT_LEARNED


@dataclass(frozen=True)
class Collator:
    """Pads on the right to the longest row; the result has int64 tensors of shape (rows, time).

    Padding is known by its position, never by the pad token: many models pad with eos, and eos must be learned.
    Rows with ``position_ids`` hold isolated documents and get no attention_mask: next to a mask of ones the positions
    are not read as borders, and documents would see each other in silence. For the same reason the model must run
    with ``use_cache=False``, as a Trainer does. All other rows get a mask.
    ``carry`` names integer columns that go along as tensors of shape (rows,) when the rows have them.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: Optional[int] = None
    carry: tuple[str, ...] = ("sample_index",)

    @classmethod
    def of(cls, tokenizer, pad_to_multiple_of: Optional[int] = None) -> Collator:
        """Pads with the tokenizer's pad token, else its eos, else token 0: which one has no effect on the loss."""
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return cls(next(token for token in candidates if token is not None), pad_to_multiple_of)

    def __call__(self, rows: Sequence[dict]) -> dict:
        import torch

        lengths = [len(row["input_ids"]) for row in rows]
        width = self._padded(max(lengths))
        batch = {
            "input_ids": _filled([row["input_ids"] for row in rows], width, self.pad_token_id),
            "labels": _filled([row["labels"] for row in rows], width, NOT_LEARNED),
        }
        if "position_ids" in rows[0]:
            batch["position_ids"] = _positions([row["position_ids"] for row in rows], width)
        else:
            batch["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        for name in self.carry:
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.int64)
        return batch

    def _padded(self, length: int) -> int:
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple


def _filled(sequences: list[Sequence[int]], width: int, value: int):
    import torch

    filled = torch.full((len(sequences), width), value, dtype=torch.int64)
    for row, sequence in zip(filled, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
    return filled


def _positions(sequences: list[Sequence[int]], width: int):
    """Padding starts again at position 0, so it forms a document of its own."""
    padded = [[*sequence, *range(width - len(sequence))] for sequence in sequences]
    return _filled(padded, width, 0)
