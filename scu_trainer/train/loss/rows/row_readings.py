"""What a model's outputs tell of the loss of each row, and whether the model's own loss is the sum of these.

Found on the first batch by comparing: a reading is exact when the loss that the model returned is the readings' sum,
divided by one of the numbers that losses are divided by. Where none is, the likeliest one still serves to compare rows.
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
"""Relative difference of a loss and a reading of it that are the same; the nearest wrong reading is percents away."""


@dataclass(frozen=True)
class RowLosses:
    """``sums`` in nats, the ``counts`` of what they run over, and in a classification the ``labels`` and what was
    ``predicted`` in their place; (rows,) each."""

    sums: torch.Tensor
    counts: torch.Tensor
    labels: Optional[torch.Tensor] = None
    predicted: Optional[torch.Tensor] = None

    @property
    def scores(self) -> torch.Tensor:
        """(rows, 2) as ``row_scores`` has it."""
        return torch.stack([self.sums.float(), self.counts.float()], dim=1)


def row_losses(token_losses: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of losses in nats, number of targets other than -100) of each row, both (rows,).

    token_losses (rows · time,), targets (rows, time) or (rows,): already shifted. A NaN stays in its own row.
    """
    rows = len(targets)
    counts = (targets.reshape(rows, -1) != NOT_LEARNED).sum(dim=1)
    return token_losses.view(rows, -1).sum(dim=1), counts


def row_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed next-token loss in nats and predicted tokens of each row, shape (rows, 2) in float32.

    logits (rows, time, vocab), labels (rows, time) with -100 where nothing is predicted. One row at a time: the float32
    copy of the logits never exists for the whole batch.
    """
    scores = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    for i in range(logits.shape[0]):
        targets = labels[i, 1:]
        loss = functional.cross_entropy(logits[i, :-1].float(), targets, ignore_index=NOT_LEARNED, reduction="sum")
        scores[i, 0], scores[i, 1] = loss, (targets != NOT_LEARNED).sum()
    return scores


def preprocess_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """For ``Trainer(preprocess_logits_for_metrics=...)``: two numbers per row leave the device instead of all logits.

    Where ``logits`` are such scores already, (rows, 2), an evaluation has made no logits.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits if logits.dim() == 2 else row_scores(logits, labels)


@dataclass(frozen=True)
class RowLossReading:
    """``kind``: "shifted" (logits (rows, time, words) predict the next label), "tokens" (the label at their place),
    "classes" (logits (rows, classes)), "numbers" (regression), "several" (one yes or no per class), "own" (the model
    returns ``losses``, shape (rows,)), "log_probs" (of the labels, (rows, time), beside ``label_mask``: TRL's fused
    head). ``exact``: the returned loss follows from it. ``classes``: for "classes".
    ``divides_by``: "items" (num_items_in_batch), "counts" (tokens or rows of the batch), "rows", "nothing".
    ``has_gradient``: whether the outputs have one, so that rows can be weighed.
    """

    kind: str
    exact: bool
    classes: Optional[int] = None
    divides_by: str = "items"
    has_gradient: bool = True

    @property
    def counts_rows(self) -> bool:
        """Whether each row counts once, however long it is."""
        return self.kind in ("classes", "numbers", "several", "own") or self.divides_by == "rows"

    def rows(self, outputs: Any, labels: Any) -> RowLosses:
        """Without gradient; squares instead of nats for "numbers"."""
        with torch.no_grad():
            sums, counts = _rows(self.kind, outputs, labels)
            if self.kind != "classes":
                return RowLosses(sums, counts)
            return RowLosses(sums, counts, labels.reshape(-1), logits_of(outputs).argmax(dim=-1).reshape(-1))

    def seen_in(self, outputs: Any) -> RowLossReading:
        """This reading, of outputs of which it is known whether they have a gradient."""
        name = {"own": "losses", "log_probs": "log_probs"}.get(self.kind)
        tensor = logits_of(outputs) if name is None else outputs[name]
        return replace(self, has_gradient=tensor is None or tensor.requires_grad)

    def sums_with_gradient(self, outputs: Any, labels: Any) -> torch.Tensor:
        """The sums alone, differentiable. Of logits all rows are float32 at once, as in the stock loss."""
        if self.kind not in ("shifted", "tokens", "classes"):
            return _rows(self.kind, outputs, labels)[0]
        logits, targets = logits_of(outputs).flatten(0, -2).float(), _targets(self.kind, labels)
        losses = functional.cross_entropy(logits, targets.flatten(), ignore_index=NOT_LEARNED, reduction="none")
        return losses.view(len(targets), -1).sum(dim=1)


CAUSAL = RowLossReading("shifted", True, divides_by="items")
"""Where the loss was opened: nothing is left to guess."""


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
    """None where the outputs hold nothing that a row's loss could be read from.

    ``calls``: of public loss functions while this loss was computed; what they say decides before any likeness.

    ``shifts``: the stock Trainer takes the loss for one over next tokens; near a random start all readings give about
    the same number, so what is known decides first. ``rough``: relative rounding of the model's matrices.
    ``processes``: ranks over which ``num_items`` is counted.
    ``is_changed``: the loss is label-smoothed or not the model's: a reading is then only likely.
    """
    found = list(_candidates(outputs, labels, shifts))
    stated = _stated(calls, labels)
    if stated in found:
        found = [stated]
    for kind in found if not is_changed else ():
        with torch.no_grad():
            sums, counts = _rows(kind, outputs, labels)
        total, bound = float(sums.sum()), max(CLOSE, rough) * max(abs(loss), 1e-6)
        for name, divisor in _divisors(sums, counts, num_items, processes):
            if abs(total / divisor - loss) <= bound:
                return RowLossReading(kind, True, _classes(kind, outputs), name)
    return RowLossReading(found[0], False, _classes(found[0], outputs)) if found else None


def _stated(calls: Sequence[Call], labels: Any) -> Optional[str]:
    """The kind of which the one public function that was called computes the loss."""
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


def with_labels_of_others(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Every label another class: what a reading that only happens to fit does not survive."""
    step = 1 + torch.arange(len(labels), device=labels.device).reshape(-1, *([1] * (labels.dim() - 1)))
    return torch.where(labels >= 0, (labels + step) % classes, labels)


def _divisors(sums: torch.Tensor, counts: torch.Tensor, num_items: Any, processes: int) -> Iterator[tuple[str, float]]:
    alone = [("counts", max(1.0, float(counts.sum()))), ("rows", float(len(sums))), ("nothing", 1.0)]
    if num_items is not None:
        items = float(torch.as_tensor(num_items).float().mean())
        if items:
            yield "items", items
            yield "items", items / processes  # the stock Trainer multiplies by the number of ranks
        if processes > 1:  # also a loss that does not divide by the items: before what it could be taken for by chance
            yield from ((name, divisor / processes) for name, divisor in alone)
    yield from alone


def _candidates(outputs: Any, labels: Any, shifts: bool) -> Iterator[str]:
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
    """Targets of a causal model, shape (rows, time): every position's next label, none at the last."""
    return functional.pad(labels, (0, 1), value=NOT_LEARNED)[..., 1:]


def _targets(kind: str, labels: torch.Tensor) -> torch.Tensor:
    if kind == "shifted":
        return shifted(labels)
    return labels.reshape(-1) if kind == "classes" else labels


def _rows(kind: str, outputs: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "own":
        losses = outputs["losses"].float()
        losses = losses if torch.is_grad_enabled() else losses.detach()
        return losses, torch.ones_like(losses)
    if kind == "log_probs":  # zero where nothing is learned
        return -outputs["log_probs"].float().sum(dim=1), outputs["label_mask"].sum(dim=1)
    logits = logits_of(outputs)
    if kind in ("numbers", "several"):
        return _of_numbers(kind, logits, labels)
    targets = _targets(kind, labels)
    losses = token_losses_of_logits(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
    return row_losses(losses, targets)


def _of_numbers(kind: str, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, wanted = logits.float().reshape(len(labels), -1), labels.float().reshape(len(labels), -1)
    if kind == "numbers":
        each = (found - wanted).square()
    else:
        each = functional.binary_cross_entropy_with_logits(found, wanted, reduction="none")
    return each.sum(dim=1), torch.full((len(labels),), float(each.size(1)), device=each.device)
