"""How a loss is reduced over rows: what it divides the sum by, and how much each row counts in that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.train.step.batches.rows import NOT_LEARNED, Batch


@dataclass(frozen=True, eq=False)
class Targets:
    """The entries of an input over which a mean runs, and their weights.

    name: the input.
    shifted: without its first column.
    ignored: the entry that does not count.
    weight: class weights, (classes,); None if all are 1.
    """

    name: str
    shifted: bool = False
    ignored: int = NOT_LEARNED
    weight: Optional[torch.Tensor] = None

    @property
    def kind(self) -> str:
        """The name of this divisor among the kinds of ``Reduction``."""
        is_plain = self.name == "labels" and self.ignored == NOT_LEARNED and self.weight is None
        return ("shifted_labels" if self.shifted else "labels") if is_plain else "targets"

    def items(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return how much each row counts, (rows,)."""
        entries = inputs[self.name][..., 1:] if self.shifted else inputs[self.name]
        counted = entries.ne(self.ignored)
        if self.weight is None:
            return _row_sums(counted)
        weight = self.weight.to(entries.device)
        return _row_sums(torch.where(counted, weight[torch.where(counted, entries, 0)], 0.0))


SUMS = ("sum", "num_items")
"""Kinds of losses that are sums over the batch; all others are means."""

COLUMN = "column "
"""Prefix of a kind: followed by the name of an input with weights of the rows."""

COUNT = "count "
"""Prefix of a kind in ``tied``: followed by the name of an input that may say which entries count."""

INPUTS = {"labels": "labels", "shifted_labels": "labels", "mask": "attention_mask", "shifted_mask": "attention_mask"}
"""Other kinds that count the entries of an input, and its name."""

OF_ENTRIES = ("labels", "mask", "weights")
"""Suffixes of the names of such inputs."""


@dataclass(frozen=True)
class Reduction:
    """How the loss is reduced over rows.

    kind: what the loss divides its sum by. ``num_items``: the ``num_items_in_batch`` that it receives. ``sum``:
    nothing. All others are means of the batch: over its ``rows``; over its learned ``labels``, or these without the
    first of each row (``shifted_labels``); over the tokens of its attention ``mask`` (``shifted_mask``); by a column of
    row weights (COLUMN and the name of the input); over ``targets``, with class weights.
    mixes: why no split is exact, if rows affect each other; ``kind`` is then the nearest one.
    trims: cutting off padding does not change the loss; None while no padded row has been seen.
    reads_padding: how it was seen that padding does change the loss.
    may_be_cut: False if the model fails on few rows or takes them for something else (pairs), however short memory is.
    known: full name of the public function that computes the loss; None if that was found out by trials.
    tied: other kinds in which the tried rows count alike.
    left_out_by: of a sum of several means, the inputs that leave a row out of one of them, and the entry that does;
    None for any entry past the last column.
    """

    kind: str
    trims: Optional[bool] = True
    mixes: Optional[str] = None
    reads_padding: Optional[str] = None
    known: Optional[str] = None
    targets: Optional[Targets] = None
    tied: tuple[str, ...] = ()
    may_be_cut: bool = True
    left_out_by: tuple[tuple[str, Optional[int]], ...] = ()

    @property
    def is_exact(self) -> bool:
        return self.mixes is None

    @property
    def is_mean(self) -> bool:
        return self.kind not in SUMS

    def row_items(self, inputs: Any, rows: int) -> list[float]:
        """Return what each row counts in the mean over ``inputs``; zeros if it is not a mean. All count the same if the
        input that counts them is missing, which ``obstacle_in`` reports. Waits for the device."""
        kind = "rows" if self._lacks_input(self.kind, inputs) else self.kind
        return row_items(kind, inputs, rows, self.targets)

    def _lacks_input(self, kind: str, inputs: Any) -> bool:
        name = _input_of(kind, self.targets)
        return name is not None and inputs.get(name) is None

    def obstacle_in(self, batch: Batch) -> Optional[str]:
        """Return why the loss of ``batch`` does not follow from its rows, unlike that of the tried ones: the input that
        counts them is missing, or one of several means leaves a row out."""
        if batch.obstacle:
            return None
        if self._lacks_input(self.kind, batch.inputs):
            return f"some batches have no {_input_of(self.kind, self.targets)}, which says how much a row counts"
        for name, entry in self.left_out_by:
            entries = batch.inputs.get(name)
            if entries is not None and bool((entries.ge(batch.width) if entry is None else entries.eq(entry)).any()):
                return f"in some batches {name} leaves rows out of one of several means"
        return None

    def tells_apart(self, inputs: Any, rows: int) -> bool:
        """Return whether the kinds that were ``tied`` differ on these rows."""
        own, given = _shares(self.row_items(inputs, rows)), [k for k in self.tied if not self._lacks_input(k, inputs)]
        return any(_shares(row_items(kind, inputs, rows)) != own for kind in given)


def kinds_of_counts(inputs: Any) -> list[str]:
    """Return kinds for inputs such as chosen_labels or loss_mask, which may say which entries count. If all rows have
    equally many such entries, a loss that is a mean over them looks like a mean over rows."""
    names = [name for name in sorted(inputs) if name.endswith(OF_ENTRIES) and name not in ("labels", "attention_mask")]
    return [f"{COUNT}{name}" for name in names if torch.is_tensor(inputs[name]) and inputs[name].dim() == 2]


def _input_of(kind: str, targets: Optional[Targets]) -> Optional[str]:
    """Return the name of the input from which ``kind`` counts what each row counts; None if it needs none."""
    if kind == "targets":
        return targets.name
    prefix = next(filter(kind.startswith, (COLUMN, COUNT)), None)
    return INPUTS.get(kind) if prefix is None else kind.removeprefix(prefix)


def row_items(kind: str, inputs: Any, rows: int, targets: Optional[Targets] = None) -> list[float]:
    """See ``Reduction.row_items``."""
    if kind == "rows":
        return [1.0] * rows
    if kind in SUMS:
        return [0.0] * rows
    name = _input_of(kind, targets)
    entries = inputs[name]
    if kind.startswith(COLUMN):
        counted = entries
    elif kind.startswith(COUNT):
        counted = _row_sums(entries.ne(NOT_LEARNED) if name.endswith("labels") else entries)
    elif kind in ("mask", "shifted_mask"):
        counted = _row_sums(entries[:, int(kind == "shifted_mask") :].ne(0))
    else:
        own = targets if kind == "targets" else Targets(name, shifted=kind == "shifted_labels")
        counted = own.items(inputs)
    return counted.float().tolist()


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(len(values), -1).sum(dim=1)


def _shares(items: list[float]) -> list[float]:
    total = sum(items)
    return [round(item / total, 6) for item in items] if total else items
