"""Choose the few rows for trials of a loss: which rows, how much of each, and with which labels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Optional

import torch

from scu_trainer.train.step.batches.reduction import kinds_of_counts, row_items
from scu_trainer.train.step.batches.rows import (
    NOT_LEARNED,
    Batch,
    Row,
    follows_time,
    has_time,
    pick,
    read_layout,
    signature,
    take,
)

MOST_ROWS = 3
MOST_CLASSES = 12
"""Maximum number of rows in a trial, and of classes that were not seen before, one row each."""

BEGINNING_TOKENS = 48
"""Number of tokens to which rows are cut for a trial, at the right."""

ENOUGH_LABELS = 3
"""Learned positions per row that tell means over rows and over labels apart; rows with fewer are a last resort."""


def are_classes(labels: Any) -> bool:
    """Return whether each row has one integer label."""
    return torch.is_tensor(labels) and labels.dim() == 1 and not labels.is_floating_point()


def rows_for_trial(batches: Sequence[Batch], seen: Collection[int] = (), more: bool = True) -> Optional[list[Row]]:
    """Return the rows for a trial; None if there are no two rows in which something is learned.

    The shortest row, the next longer one that can be in a batch with it, and, with ``more``, others that differ: first
    rows of classes not in ``seen``.
    """
    if sum(batch.rows for batch in batches if not batch.obstacle) < 2:
        return None
    learned = {
        (number, row): count
        for number, batch in enumerate(batches)
        if not batch.obstacle
        for row, count in enumerate(_learned_counts(batch))
    }
    candidates = [row for row, count in learned.items() if count >= ENOUGH_LABELS]
    if len(candidates) < 2:
        candidates = [row for row, count in learned.items() if count]
    if not candidates:
        return None
    counts = _counts(batches)
    informative = {number for number, of_rows in counts.items() if len(set(of_rows)) > 1}
    candidates = [row for row in candidates if row[0] in informative] or candidates

    def length(row: Row) -> int:
        return batches[row[0]].length(row[1])

    first = min(candidates, key=length)
    kind = signature(batches[first[0]])
    others = [row for row in candidates if row != first and signature(batches[row[0]]) == kind]
    if not others:
        return None
    longer = [row for row in others if length(row) > length(first)]
    unlike = [row for row in others if informative and _count(counts, row) != _count(counts, first)]
    second = min(longer or unlike or others, key=length)
    different = []
    if more:
        others = sorted(others, key=length)
        different = _pick_different(batches, [first, second], others, seen)
        different += _pick_other_counts(counts, [first, second, *different], others)
    # Grouped by batch, as in ``take``; the first row stays first.
    return sorted([first, second, *different], key=lambda row: (row[0] != first[0], row[0]))


def _pick_different(batches: Sequence[Batch], chosen: list[Row], others: list[Row], seen: Collection[int]) -> list[Row]:
    """Return rows with classes that the ``chosen`` rows do not have, or simply more rows."""
    others = [row for row in others if row not in chosen]
    if not are_classes(batches[chosen[0][0]].inputs.get("labels")):
        return others[: MOST_ROWS - len(chosen)]
    labels = {row: int(batches[row[0]].inputs["labels"][row[1]]) for row in (*chosen, *others)}
    of_class: dict[int, Row] = {}
    for row in sorted(others, key=lambda row: labels[row] in seen):
        if labels[row] not in {labels[chosen_row] for chosen_row in chosen}:
            of_class.setdefault(labels[row], row)
    unseen = [row for label, row in of_class.items() if label not in seen]
    known = [row for label, row in of_class.items() if label in seen]
    # Every unseen class and one that was seen, because weights only show between classes.
    found = [*unseen[:MOST_CLASSES], *known[:1]]
    return found or others[: MOST_ROWS - len(chosen)]


def _counts(batches: Sequence[Batch]) -> dict[int, list[tuple[float, ...]]]:
    """Return, for each batch, how many entries of each row count in those inputs that may define a count."""
    kinds = {number: kinds_of_counts(batch.inputs) for number, batch in enumerate(batches) if not batch.obstacle}
    return {
        number: list(zip(*(row_items(kind, batches[number].inputs, batches[number].rows) for kind in own), strict=True))
        for number, own in kinds.items()
        if own
    }


def _count(counts: dict[int, list[tuple[float, ...]]], row: Row) -> tuple[float, ...]:
    return counts[row[0]][row[1]] if row[0] in counts else ()


def _pick_other_counts(counts: dict[int, list[tuple[float, ...]]], chosen: list[Row], others: list[Row]) -> list[Row]:
    """For each input in which the ``chosen`` rows have equal counts, return a row with another count."""
    found: list[Row] = []
    for column in range(len(_count(counts, chosen[0]))):
        own = {_count(counts, row)[column] for row in (*chosen, *found)}
        if len(own) == 1:
            found += [row for row in others if _count(counts, row)[column] not in own][:1]
    return found


def _learned_counts(batch: Batch) -> list[int]:
    labels = batch.inputs.get("labels")
    if not has_time("labels", labels):
        return [ENOUGH_LABELS] * batch.rows
    return labels.ne(NOT_LEARNED).reshape(batch.rows, -1).sum(dim=1).tolist()


def batch_in_order(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int, trim: bool) -> Any:
    """Return a batch of ``rows`` in exactly this order."""
    batch_of_rows = take(batches, rows, pad_token_id, trim=trim)
    first = batches[rows[0][0]]
    if batch_of_rows is not first.inputs:
        return batch_of_rows
    return pick(batch_of_rows, torch.tensor([row for _, row in rows]), first.rows)


def first_rows(batch: Batch, pad_token_id: int) -> Iterator[Any]:
    """Yield two rows of a batch, first only their beginnings; yield the whole batch if it cannot be read by rows."""
    if batch.obstacle:
        yield batch.inputs
        return
    rows = [(0, row) for row in range(min(2, batch.rows))]
    short = cut_to_beginnings([batch], rows, pad_token_id)
    if short is not None:
        yield short.inputs
    yield batch_in_order([batch], rows, pad_token_id, trim=True)


def cut_to_beginnings(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int) -> Optional[Batch]:
    """Return the first columns of the rows as a batch, wide enough for every row to learn something. If the first row
    is shorter than another one, it stays shorter. None if this would not be shorter than the rows."""
    owner = batches[rows[0][0]]
    if not owner.trimmable or owner.decoder_width or not has_time("labels", owner.inputs.get("labels")):
        return None
    whole = batch_in_order(batches, rows, pad_token_id, trim=True)
    lengths = [batches[number].length(row) for number, row in rows]
    learned = whole["labels"].ne(NOT_LEARNED).cumsum(1)
    # One label more than enough, because the first may be shifted out.
    start = int((learned < ENOUGH_LABELS + 1).sum(1).max()) + 1
    width = max(start, BEGINNING_TOKENS)
    if width >= whole["labels"].size(1):
        return None
    cut = {
        name: value[:, :width].clone() if follows_time(name, value, owner) else value for name, value in whole.items()
    }
    if width <= lengths[0] < max(lengths):
        cut["attention_mask"][0, start:] = 0
        cut["labels"][0, start:] = NOT_LEARNED
    return read_layout(type(whole)(cut), owner.main_input_name)


def with_other_labels(inputs: Any, rows: int) -> Optional[Any]:
    """Return the same rows with labels moved to other positions, and some removed if not all are learned anyway. None
    if the labels leave no such choice."""
    labels = inputs.get("labels")
    if not has_time("labels", labels) or labels.is_floating_point() or labels.dim() != 2:
        return None
    labels = labels.clone()
    has_gaps = not bool(labels.ne(NOT_LEARNED).all())
    for row in range(rows):
        learned = labels[row].ne(NOT_LEARNED).nonzero().flatten()
        labels[row, learned] = labels[row, learned].roll(1)
        if has_gaps and row != 1:
            labels[row, learned[: len(learned) // (row + 2)]] = NOT_LEARNED
    if has_gaps and rows > 1:
        _learn_first_column(inputs, labels)
    return type(inputs)({**inputs, "labels": labels})


def _learn_first_column(inputs: Any, labels: torch.Tensor) -> None:
    """Learn the first column of the second row, which counts in a mean over labels but not over shifted labels."""
    mask = inputs.get("attention_mask")
    learned = labels[1].ne(NOT_LEARNED).nonzero().flatten()
    if len(learned) and (not torch.is_tensor(mask) or mask.shape != labels.shape or bool(mask[1, 0])):
        labels[1, 0] = labels[1, learned[-1]]
