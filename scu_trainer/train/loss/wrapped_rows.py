"""Rows of a wrapped module's inputs and outputs: choose those for checking a loss, and slice and join them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from accelerate.utils import recursively_apply

ROWS_TO_ASK = 4

LABELS = (torch.int64, torch.int32, torch.int16)
"""Types of targets in which -100 means "not learned"."""


def are_classes(targets: torch.Tensor) -> bool:
    return targets.dim() == 1 and targets.dtype in LABELS


def rows_for_wrapped_trial(targets: torch.Tensor, seen: Collection[int] = ()) -> list[int]:
    """Return a row of each class not in ``seen`` and other rows, seen classes first: one, or up to ``ROWS_TO_ASK``."""
    labels = targets.tolist() if are_classes(targets) else [None] * len(targets)
    first: dict[int, int] = {}
    for row, label in enumerate(labels):
        if label is not None and label not in seen:
            first.setdefault(label, row)
    of_classes = set(first.values())
    others = sorted(set(range(len(labels))) - of_classes, key=lambda row: (labels[row] not in seen, row))
    return sorted([*of_classes, *others[: max(ROWS_TO_ASK - len(of_classes), 1)]])


def take(outputs: Any, rows: slice | list[int]) -> Any:
    return recursively_apply(lambda tensor: tensor[rows], outputs)


def copied(outputs: Any) -> Any:
    """Return a copy for a loss that is called several times and may write to its arguments."""
    return recursively_apply(torch.clone, outputs)


def join(values: Sequence[Any]) -> Any:
    """Join the rows of all ``values``, which have the same structure; parts without rows are taken from the first."""
    tensors = [_tensors(value) for value in values]
    together = iter([torch.cat(parts) if parts[0].dim() else parts[0] for parts in zip(*tensors, strict=True)])
    return recursively_apply(lambda tensor: next(together), values[0])


def has_one_entry_per_row(outputs: Any, count: int) -> bool:
    tensors = _tensors(outputs)
    return bool(tensors) and all(tensor.dim() > 0 and tensor.size(0) == count for tensor in tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    recursively_apply(lambda tensor: found.append(tensor) or tensor, value)
    return found
