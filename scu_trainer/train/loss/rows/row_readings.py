"""Read each row's loss from a model's outputs, and find out whether the model's own loss is the sum of these.

A reading is found on the first batch by comparison: it is exact if the model's loss is the sum of the rows' losses
divided by one of the usual divisors. If no reading is exact, the likeliest one can still be used to compare rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch.nn import functional

from scu_trainer.train.loss.rows.kernels import token_losses_of_logits
from scu_trainer.train.loss.rows.known import Call, divisor_of
from scu_trainer.train.step.batches.rows import NOT_LEARNED

CLOSE = 1e-3
"""Relative difference at which a loss and its reading are the same; the nearest wrong reading is off by percents."""


@dataclass(frozen=True)
class RowLosses:
    """Losses of rows: ``sums`` in nats over ``counts`` terms, and in a classification the ``labels`` and ``predicted``
    classes; each of shape (rows,)."""

    sums: torch.Tensor
    counts: torch.Tensor
    labels: Optional[torch.Tensor] = None
    predicted: Optional[torch.Tensor] = None

    @property
    def scores(self) -> torch.Tensor:
        """Return ``sums`` and ``counts`` as (rows, 2), like ``row_scores``."""
        return torch.stack([self.sums.float(), self.counts.float()], dim=1)


def row_losses(token_losses: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of losses in nats, number of targets other than -100) of each row, both (rows,).

    token_losses (rows · time,), targets (rows, time) or (rows,): already shifted. A NaN only affects its own row.
    """
    rows = len(targets)
    counts = (targets.reshape(rows, -1) != NOT_LEARNED).sum(dim=1)
    return token_losses.view(rows, -1).sum(dim=1), counts


def row_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed next-token loss in nats and the number of predicted tokens of each row, (rows, 2) in float32.

    logits (rows, time, vocab), labels (rows, time) with -100 where nothing is predicted. Works on one row at a time, so
    a float32 copy of all logits never exists.
    """
    scores = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    for i in range(logits.shape[0]):
        targets = labels[i, 1:]
        loss = functional.cross_entropy(logits[i, :-1].float(), targets, ignore_index=NOT_LEARNED, reduction="sum")
        scores[i, 0], scores[i, 1] = loss, (targets != NOT_LEARNED).sum()
    return scores


def preprocess_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Reduce logits to two numbers per row on the device, for ``Trainer(preprocess_logits_for_metrics=...)``.

    ``logits`` may already be such scores, (rows, 2), from an evaluation without logits.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits if logits.dim() == 2 else row_scores(logits, labels)


@dataclass(frozen=True)
class RowLossReading:
    """How to read the losses of rows from a model's outputs.

    ``kind``: "shifted" (logits (rows, time, words) predict the next label), "tokens" (the label at the same position),
    "classes" (logits (rows, classes)), "numbers" (regression), "several" (one binary decision per class), "own" (the
    model returns ``losses``, shape (rows,)), "log_probs" (of the labels, (rows, time), next to ``label_mask``: TRL's
    fused head). ``exact``: whether the returned loss follows from it. ``classes``: their number, for "classes".
    ``divides_by``: "items" (num_items_in_batch), "counts" (tokens or rows of the batch), "rows", "nothing".
    ``has_gradient``: whether the outputs have a gradient, so that rows can be weighted.
    """

    kind: str
    exact: bool
    classes: Optional[int] = None
    divides_by: str = "items"
    has_gradient: bool = True

    @property
    def counts_rows(self) -> bool:
        """Whether each row counts once, regardless of its length."""
        return self.kind in ("classes", "numbers", "several", "own") or self.divides_by == "rows"

    def rows(self, outputs: Any, labels: Any) -> RowLosses:
        """Return the losses of rows, without gradient; for "numbers" squared errors instead of nats."""
        with torch.no_grad():
            sums, counts = _sums_and_counts(self.kind, outputs, labels)
            if self.kind != "classes":
                return RowLosses(sums, counts)
            return RowLosses(sums, counts, labels.reshape(-1), logits_of(outputs).argmax(dim=-1).reshape(-1))

    def with_gradient_of(self, outputs: Any) -> RowLossReading:
        """Return this reading with ``has_gradient`` as these ``outputs`` have it."""
        name = {"own": "losses", "log_probs": "log_probs"}.get(self.kind)
        tensor = logits_of(outputs) if name is None else outputs[name]
        return replace(self, has_gradient=tensor is None or tensor.requires_grad)

    def sums_with_gradient(self, outputs: Any, labels: Any) -> torch.Tensor:
        """Return only the sums, differentiable. All logits are converted to float32 at once, as in the stock loss."""
        if self.kind not in ("shifted", "tokens", "classes"):
            return _sums_and_counts(self.kind, outputs, labels)[0]
        logits, targets = logits_of(outputs).flatten(0, -2).float(), _targets(self.kind, labels)
        losses = functional.cross_entropy(logits, targets.flatten(), ignore_index=NOT_LEARNED, reduction="none")
        return losses.view(len(targets), -1).sum(dim=1)


CAUSAL = RowLossReading("shifted", True, divides_by="items")
"""The reading of an opened loss, which needs no comparison."""


def find_reading(
    outputs: Any,
    labels: Any,
    loss: float,
    num_items: Any,
    processes: int,
    shifts: bool = False,
    rough: float = CLOSE,
    is_changed: bool = False,
    calls: Sequence[Call] = (),
) -> Optional[RowLossReading]:
    """Return the reading that fits ``loss``; None if the losses of rows cannot be read from the outputs.

    ``calls``: calls of public loss functions while this loss was computed; they decide first. ``shifts``: whether the
    stock Trainer treats the loss as a next-token loss; it decides next, because near a random start all readings give
    about the same number. ``rough``: relative rounding of the model's matrix products. ``processes``: number of ranks
    over which ``num_items`` is counted. ``is_changed``: whether the loss is label-smoothed or not the model's own; then
    no reading is exact.
    """
    found = list(_candidates(outputs, labels, shifts))
    stated = _kind_of_calls(calls, labels)
    if stated in found:
        found = [stated]
    for kind in found if not is_changed else ():
        with torch.no_grad():
            sums, counts = _sums_and_counts(kind, outputs, labels)
        total, bound = float(sums.sum()), max(CLOSE, rough) * max(abs(loss), 1e-6)
        for name, divisor in _divisors(sums, counts, num_items, processes):
            if abs(total / divisor - loss) <= bound:
                return RowLossReading(kind, True, _classes(kind, outputs), name)
    return RowLossReading(found[0], False, _classes(found[0], outputs)) if found else None


def _kind_of_calls(calls: Sequence[Call], labels: Any) -> Optional[str]:
    """Return the kind that the only called public loss function computes; None if that is not clear."""
    if len(calls) != 1 or not torch.is_tensor(labels):
        return None
    (call,) = calls
    if call.function in NUMBERS:
        return NUMBERS[call.function]
    if not call.is_of_classes or call.arguments.get("label_smoothing"):
        return None
    divisor = divisor_of(calls, {"labels": labels}, len(labels))
    if divisor is None or divisor.targets is None or divisor.targets.weight is not None:
        return None
    if divisor.targets.shifted:
        return "shifted"
    return "classes" if labels.dim() == 1 else "tokens"


NUMBERS = {functional.mse_loss: "numbers", functional.binary_cross_entropy_with_logits: "several"}


def with_wrong_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Replace every label by another class; a reading that fits only by chance does not fit these labels."""
    step = 1 + torch.arange(len(labels), device=labels.device).reshape(-1, *([1] * (labels.dim() - 1)))
    return torch.where(labels >= 0, (labels + step) % classes, labels)


def _divisors(sums: torch.Tensor, counts: torch.Tensor, num_items: Any, processes: int) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of everything that losses are commonly divided by, the likeliest first."""
    of_batch = [("counts", max(1.0, float(counts.sum()))), ("rows", float(len(sums))), ("nothing", 1.0)]
    if num_items is not None:
        items = float(torch.as_tensor(num_items).float().mean())
        if items:
            yield "items", items
            yield "items", items / processes  # the stock Trainer multiplies by the number of ranks
        if processes > 1:  # before ``of_batch``, which it could match by chance: not every loss divides by items
            yield from ((name, divisor / processes) for name, divisor in of_batch)
    yield from of_batch


def _candidates(outputs: Any, labels: Any, shifts: bool) -> Iterator[str]:
    """Yield the kinds that fit the shapes of outputs and labels, the likelier first."""
    if isinstance(outputs, Mapping) and torch.is_tensor(outputs.get("losses")):
        yield "own"
    if isinstance(outputs, Mapping) and torch.is_tensor(outputs.get("log_probs")) and "label_mask" in outputs:
        yield "log_probs"
    logits = logits_of(outputs)
    if logits is None or not torch.is_tensor(labels):
        return
    if labels.is_floating_point():
        if logits.squeeze().shape == labels.squeeze().shape:
            yield "numbers"
            yield "several"
    elif logits.dim() == 3 and labels.dim() == 2 and logits.shape[:2] == labels.shape:
        yield from ("shifted", "tokens") if shifts else ("tokens", "shifted")
    elif logits.dim() == 2 and labels.reshape(-1).shape == logits.shape[:1]:
        yield "classes"


def logits_of(outputs: Any) -> Optional[torch.Tensor]:
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        found = outputs[1] if isinstance(outputs, (tuple, list)) and len(outputs) > 1 else None
    return found if torch.is_tensor(found) and found.dim() > 0 else None


def _classes(kind: str, outputs: Any) -> Optional[int]:
    return logits_of(outputs).size(-1) if kind == "classes" else None


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the targets of a causal model, (rows, time): the next label of each position, none for the last one."""
    return functional.pad(labels, (0, 1), value=NOT_LEARNED)[..., 1:]


def _targets(kind: str, labels: torch.Tensor) -> torch.Tensor:
    if kind == "shifted":
        return shifted(labels)
    return labels.reshape(-1) if kind == "classes" else labels


def _sums_and_counts(kind: str, outputs: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss sums of rows and their number of terms, (rows,) each."""
    if kind == "own":
        losses = outputs["losses"].float()
        losses = losses if torch.is_grad_enabled() else losses.detach()
        return losses, torch.ones_like(losses)
    if kind == "log_probs":  # 0 where nothing is learned
        return -outputs["log_probs"].float().sum(dim=1), outputs["label_mask"].sum(dim=1)
    logits = logits_of(outputs)
    if kind in ("numbers", "several"):
        return _row_errors(kind, logits, labels)
    targets = _targets(kind, labels)
    losses = token_losses_of_logits(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
    return row_losses(losses, targets)


def _row_errors(kind: str, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, expected = logits.float().reshape(len(labels), -1), labels.float().reshape(len(labels), -1)
    if kind == "numbers":
        each = (found - expected).square()
    else:
        each = functional.binary_cross_entropy_with_logits(found, expected, reduction="none")
    return each.sum(dim=1), torch.full((len(labels),), float(each.size(1)), device=each.device)
