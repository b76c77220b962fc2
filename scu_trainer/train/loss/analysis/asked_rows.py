"""The few rows that a loss is asked about: which, how much of each, and with which labels."""

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
"""Rows that are asked together; of classes that were not seen before one each, up to so many."""

BEGINNING_TOKENS = 48
"""Tokens that rows are cut to, at the right, before the model is asked about them."""

ENOUGH_LABELS = 3
"""Learned positions per row that tell means over rows and over labels apart; fewer only if there are no such rows."""


def are_classes(labels: Any) -> bool:
    """Whether each row has one integer label."""
    return torch.is_tensor(labels) and labels.dim() == 1 and not labels.is_floating_point()


def rows_to_ask(batches: Sequence[Batch], seen: Collection[int] = (), more: bool = True) -> Optional[list[Row]]:
    """The shortest row in which something is learned, the next longer one that fits into a batch with it, and, with
    ``more``, others that differ: first of classes that are not ``seen``. None where there are no two such rows."""
    if sum(batch.rows for batch in batches if not batch.obstacle) < 2:
        return None
    learned = {
        (number, row): count
        for number, batch in enumerate(batches)
        if not batch.obstacle
        for row, count in enumerate(_learned(batch))
    }
    candidates = [row for row, count in learned.items() if count >= ENOUGH_LABELS]
    if len(candidates) < 2:
        candidates = [row for row, count in learned.items() if count]
    if not candidates:
        return None
    counts = _counts(batches)
    telling = {number for number, of_rows in counts.items() if len(set(of_rows)) > 1}
    candidates = [row for row in candidates if row[0] in telling] or candidates

    def length(row: Row) -> int:
        return batches[row[0]].length(row[1])

    first = min(candidates, key=length)
    kind = signature(batches[first[0]])
    others = [row for row in candidates if row != first and signature(batches[row[0]]) == kind]
    if not others:
        return None
    longer = [row for row in others if length(row) > length(first)]
    unlike = [row for row in others if telling and _count(counts, row) != _count(counts, first)]
    second = min(longer or unlike or others, key=length)
    different = []
    if more:
        others = sorted(others, key=length)
        different = _that_differ(batches, [first, second], others, seen)
        different += _that_count(counts, [first, second, *different], others)
    # Grouped by batch, as ``take`` gives them; the first stays first.
    return sorted([first, second, *different], key=lambda row: (row[0] != first[0], row[0]))


def _that_differ(batches: Sequence[Batch], chosen: list[Row], others: list[Row], seen: Collection[int]) -> list[Row]:
    others = [row for row in others if row not in chosen]
    if not are_classes(batches[chosen[0][0]].inputs.get("labels")):
        return others[: MOST_ROWS - len(chosen)]
    labels = {row: int(batches[row[0]].inputs["labels"][row[1]]) for row in (*chosen, *others)}
    of_class: dict[int, Row] = {}
    for row in sorted(others, key=lambda row: labels[row] in seen):
        if labels[row] not in {labels[one] for one in chosen}:
            of_class.setdefault(labels[row], row)
    unseen = [row for label, row in of_class.items() if label not in seen]
    known = [row for label, row in of_class.items() if label in seen]
    # Every unseen class, and one that was seen: weights show between classes only.
    found = [*unseen[:MOST_CLASSES], *known[:1]]
    return found or others[: MOST_ROWS - len(chosen)]


def _counts(batches: Sequence[Batch]) -> dict[int, list[tuple[float, ...]]]:
    """Of each batch, how many entries of each row count in those of its inputs that may say so."""
    kinds = {number: kinds_of_counts(batch.inputs) for number, batch in enumerate(batches) if not batch.obstacle}
    return {
        number: list(zip(*(row_items(kind, batches[number].inputs, batches[number].rows) for kind in own), strict=True))
        for number, own in kinds.items()
        if own
    }


def _count(counts: dict[int, list[tuple[float, ...]]], row: Row) -> tuple[float, ...]:
    return counts[row[0]][row[1]] if row[0] in counts else ()


def _that_count(counts: dict[int, list[tuple[float, ...]]], chosen: list[Row], others: list[Row]) -> list[Row]:
    """Of each input in which the ``chosen`` count alike, a row that counts differently."""
    found: list[Row] = []
    for column in range(len(_count(counts, chosen[0]))):
        own = {_count(counts, row)[column] for row in (*chosen, *found)}
        if len(own) == 1:
            found += [row for row in others if _count(counts, row)[column] not in own][:1]
    return found


def _learned(batch: Batch) -> list[int]:
    labels = batch.inputs.get("labels")
    if not has_time("labels", labels):
        return [ENOUGH_LABELS] * batch.rows
    return labels.ne(NOT_LEARNED).reshape(batch.rows, -1).sum(dim=1).tolist()


def in_order(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int, trim: bool) -> Any:
    """A batch of ``rows`` in just this order."""
    made = take(batches, rows, pad_token_id, trim=trim)
    first = batches[rows[0][0]]
    if made is not first.inputs:
        return made
    return pick(made, torch.tensor([row for _, row in rows]), first.rows)


def first_rows(batch: Batch, pad_token_id: int) -> Iterator[Any]:
    """Two rows of a batch, first their beginnings; all of it where it cannot be read by rows."""
    if batch.obstacle:
        yield batch.inputs
        return
    rows = [(0, row) for row in range(min(2, batch.rows))]
    short = beginnings([batch], rows, pad_token_id)
    if short is not None:
        yield short.inputs
    yield in_order([batch], rows, pad_token_id, trim=True)


def beginnings(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int) -> Optional[Batch]:
    """The first columns of the rows as a batch of their own; as many columns as it takes for all to learn something.
    Where the first is shorter than another it is so here too. None if that would not be less."""
    owner = batches[rows[0][0]]
    if not owner.trimmable or owner.decoder_width or not has_time("labels", owner.inputs.get("labels")):
        return None
    whole = in_order(batches, rows, pad_token_id, trim=True)
    lengths = [batches[number].length(row) for number, row in rows]
    learned = whole["labels"].ne(NOT_LEARNED).cumsum(1)
    # A label more than enough: the first may be shifted out.
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
    """The same rows with labels of other positions, and unequally many of them where some are not learned anyway.
    None where the labels leave no such choice."""
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
    """In the second row: a mean over shifted labels does not count it, one over labels does."""
    mask = inputs.get("attention_mask")
    learned = labels[1].ne(NOT_LEARNED).nonzero().flatten()
    if len(learned) and (not torch.is_tensor(mask) or mask.shape != labels.shape or bool(mask[1, 0])):
        labels[1, 0] = labels[1, learned[-1]]
