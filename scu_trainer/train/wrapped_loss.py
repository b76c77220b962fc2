"""The loss of each row, taken out of any loss function, and how the function puts rows together.

    rows     their mean                          any loss with reduction "mean" or "none"
    labels   the mean over all labels but -100   the same where rows have several labels, or some are not learned
    sum      their sum
    whole    none of these: rows act on each other, so that a batch can only be taken as it is

Found out on a row of each class of the first step: the loss of all of them is compared with the losses of each alone.
A function may hold weights of classes that nobody sees: it is asked again about classes that come later.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional

from scu_trainer.errors import ModelError
from scu_trainer.train.reduction import EXACT, ROUGH
from scu_trainer.train.rows import NOT_LEARNED
from scu_trainer.train.wrapped_rows import LABELS, are_classes, each, has_one_entry_per_row, rows_to_ask, take

logger = logging.getLogger("scu_trainer")

MOST_QUESTIONS = 5
"""Steps of one class that are passed over in the hope of another."""

MOST_CHECKS = 200
"""Steps in which classes that were not seen before are asked about."""

NO_ROWS = "the outputs have not one entry per row along dimension 0"

CROSS_ENTROPY = (functional.cross_entropy, functional.nll_loss)

Rows = tuple[torch.Tensor, torch.Tensor]
"""(sums, counts) of shape (rows,) each: a row's loss, summed over its labels, and what it counts for."""


class RowLoss(nn.Module):
    """``loss(outputs, targets)`` by rows. ``kind``: see above, None until it has been asked.

    ``is_plain``: the loss of a row is its plain cross-entropy over the classes of (rows, classes) logits.

    Raises ModelError for a loss with weights of its own, and for what is no loss.
    """

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        if not callable(loss):
            raise ModelError(f"loss is a {type(loss).__name__}; give a function or module of (outputs, targets)")
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ModelError(
                f"{type(loss).__name__} has weights of its own, which would not be saved with the module; make it a "
                "part of the module"
            )
        ignored = {**getattr(loss, "__dict__", {}), **getattr(loss, "keywords", {})}.get("ignore_index", NOT_LEARNED)
        if ignored != NOT_LEARNED:
            raise ModelError(
                f"the loss ignores targets of {ignored}, and what is not learned is marked by {NOT_LEARNED} here; give "
                f"such targets {NOT_LEARNED} and leave ignore_index out"
            )
        self.loss = loss
        self.kind: Optional[str] = None
        self.seen: set[int] = set()
        self._asked = 0
        self._checks = 0
        self.is_plain = False
        self._way: Callable[[Any, torch.Tensor], torch.Tensor] = self._looped

    def forward(
        self, outputs: Any, targets: torch.Tensor, num_items: Any
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """(loss, differentiable losses of the rows; None for "whole").

        ``num_items``: rows (with kind "labels": labels that are learned) of the whole optimizer step, None for those of
        this batch alone.
        """
        if self.kind is None:
            self.ask(outputs if has_one_entry_per_row(outputs, len(targets)) else None, targets)
        elif self.kind != "whole" and not has_one_entry_per_row(outputs, len(targets)):
            self._take_whole(NO_ROWS)
        if self.kind == "whole":
            share = 1.0 if num_items is None else len(targets) / num_items
            return self._checked(outputs, targets).reshape(()) * share, None
        sums, counts = self._rows(outputs, targets)
        total = sums.sum()
        if self.kind == "sum":
            return total, sums
        return total / (counts.sum().clamp(min=1) if num_items is None else num_items), sums

    def counted(self, targets: torch.Tensor) -> torch.Tensor:
        """Something with as many entries other than -100 as the mean over ``targets`` runs over."""
        return targets if self.kind == "labels" else torch.zeros(len(targets), dtype=torch.int64, device=targets.device)

    # -- asking --------------------------------------------------------------------------------------------------------

    def must_ask(self, targets: Iterable[torch.Tensor]) -> bool:
        """Whether a step with these ``targets`` may tell something new of the loss."""
        if self.kind is None:
            return True
        if self.kind not in ("labels", "rows") or self._way == self._as_it_is:
            return False
        if is_known(self.loss) or self._checks >= MOST_CHECKS:
            return False
        return any(are_classes(some) and not self.seen.issuperset(some.unique().tolist()) for some in targets)

    @torch.no_grad()
    def ask(self, outputs: Any, targets: torch.Tensor) -> None:
        """Find ``kind`` from a few rows; it stays None where they do not tell (one row, one class, no finite loss).

        ``outputs``: None where they have not one entry per row. Raises ModelError where classes that come later show
        that the rows trained so far were taken for others than they are.
        """
        self._asked += 1
        if outputs is None:
            self._take_whole(NO_ROWS)
            return
        if targets.dtype in LABELS and _weighs_classes(self.loss):
            self._take_whole("a mean with weights of classes is divided by the weights of the labels in the batch")
            return
        rows = rows_to_ask(targets, self.seen)
        few, wanted = take(outputs, rows), targets[rows]
        whole = self._checked(few, wanted)
        if whole.numel() > 1:
            self.kind, self._way = "rows", self._as_it_is
            return
        alone = torch.stack([self._of_one(few, wanted, row) for row in range(len(rows))]).float()
        if not bool(torch.isfinite(alone).all()) or not (bool(alone.any()) or bool(whole.any())):
            return
        self._decide(few, wanted, whole, alone)

    def _decide(self, few: Any, wanted: torch.Tensor, whole: torch.Tensor, alone: torch.Tensor) -> None:
        """``whole``: the loss of ``few`` rows together; ``alone``: (rows,), of each."""
        rough = ROUGH if whole.dtype in (torch.float16, torch.bfloat16) else EXACT
        if self.kind is not None:
            self._compare(float(whole), alone, wanted)
            return
        kind = _likeliest(float(whole), alone, wanted, rough) if len(wanted) > 1 else self._stated_for_one()
        if len(wanted) > 1 and kind is None:
            self._take_whole("the loss of several rows is neither mean nor sum of the losses of each")
            return
        has_one_class = kind == "labels" and len(wanted.unique()) == 1 and not is_known(self.loss)
        if kind is None or (has_one_class and self._asked < MOST_QUESTIONS):
            return  # weights of classes show only between classes
        self.kind = kind
        self._note(wanted)
        self._way = next(way for way in self._ways() if self._agrees(way, few, wanted, alone, rough))
        self.is_plain = _is_plain(few, wanted, alone, rough)

    def _stated_for_one(self) -> Optional[str]:
        """One row alone is its own mean and its own sum."""
        if _stated(self.loss, "reduction") == "sum":
            return "sum"
        if self._asked == MOST_QUESTIONS and not is_known(self.loss):
            logger.warning("steps of one row do not tell how the loss puts rows together: it is taken for a mean")
        return None

    def _compare(self, whole: float, alone: torch.Tensor, wanted: torch.Tensor) -> None:
        self._checks += 1
        new = ", ".join(str(label) for label in sorted(set(wanted.tolist()) - self.seen)[:3])
        guess, scale = _guesses(alone, wanted)[self.kind], max(abs(whole), float(alone.abs().max()))
        if len(wanted) > 1 and abs(guess - whole) > ROUGH * scale:
            raise ModelError(
                f"the loss weighs classes, as class {new} shows, which no earlier step had; state the weights: "
                "torch.nn.CrossEntropyLoss(weight=...), or return one loss per row (reduction='none')"
            )
        self._note(wanted)

    def _note(self, wanted: torch.Tensor) -> None:
        """Classes that were compared with those before, of which there must be one among the rows."""
        labels = set(wanted.tolist()) if are_classes(wanted) else set()
        if not self.seen or self.seen & labels:
            self.seen |= labels

    def _take_whole(self, reason: str) -> None:
        self.kind = "whole"
        logger.warning("batches are taken whole, and losses of single rows are not known: %s", reason)

    def _checked(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        value = self.loss(outputs, targets)
        if not torch.is_tensor(value):
            raise ModelError(
                f"loss returns a {type(value).__name__}; let it return the tensor, without .item() or float()"
            )
        if value.numel() != 1 and (value.dim() == 0 or value.size(0) != len(targets)):
            raise ModelError(
                f"loss returns shape {tuple(value.shape)} for {len(targets)} rows; allowed: one number, or one entry "
                "per row along dimension 0"
            )
        return value

    def _of_one(self, outputs: Any, targets: torch.Tensor, row: int) -> torch.Tensor:
        """The loss of one row alone; 0 where it has nothing to learn."""
        one = slice(row, row + 1)
        return torch.where(
            _labels_of(targets[one]) > 0, self.loss(take(outputs, one), _safe(targets[one])).mean(), 0.0
        )[0]

    # -- ways to the losses of all rows, each the mean over what the row counts ----------------------------------------

    def _ways(self) -> list[Callable[[Any, torch.Tensor], torch.Tensor]]:
        unreduced = [self._unreduced] if self._without_reduction() is not None else []
        return [*unreduced, self._mapped, self._looped]

    def _agrees(self, way: Callable, outputs: Any, targets: torch.Tensor, alone: torch.Tensor, rough: float) -> bool:
        if way == self._looped:
            return True
        try:
            found = way(outputs, targets)
        except (RuntimeError, ValueError, TypeError, IndexError):  # functions that look at numbers cannot be mapped
            return False
        return found.shape == alone.shape and torch.allclose(found.float(), alone, rtol=rough, atol=rough * 1e-2)

    def _without_reduction(self) -> Optional[Callable[[Any, Any], torch.Tensor]]:
        loss = self.loss
        if isinstance(loss, nn.Module):
            if getattr(loss, "reduction", None) not in ("mean", "sum"):
                return None
            loss = copy.copy(loss)  # shares its buffers with the one that moves between devices
            loss.reduction = "none"
            return loss
        try:
            takes = "reduction" in inspect.signature(loss).parameters
        except (TypeError, ValueError):  # built-in functions tell nothing
            takes = False
        return functools.partial(loss, reduction="none") if takes else None

    def _unreduced(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        elements = self._without_reduction()(outputs, targets).reshape(len(targets), -1)
        if self.kind == "sum":
            return elements.sum(dim=1)
        return elements.sum(dim=1) / _labels_of(targets).clamp(min=1) if self.kind == "labels" else elements.mean(dim=1)

    def _as_it_is(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._checked(outputs, targets).reshape(len(targets), -1).mean(dim=1)

    def _mapped(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        def of_one(output: Any, target: torch.Tensor) -> torch.Tensor:
            return self.loss(each(output, lambda tensor: tensor.unsqueeze(0)), target.unsqueeze(0)).reshape(())

        return torch.vmap(of_one)(outputs, _safe(targets))

    def _looped(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._of_one(outputs, targets, row) for row in range(len(targets))])

    def _rows(self, outputs: Any, targets: torch.Tensor) -> Rows:
        means = self._way(outputs, targets)
        if self.kind != "labels":
            return means, torch.ones(len(targets), device=means.device)
        counts = _labels_of(targets)
        return torch.where(counts > 0, means * counts, 0.0), counts


def is_known(loss: Any) -> bool:
    """A loss of torch's own without weights of classes: rows of any class count the same in it."""
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(_function(loss), "__module__", None)
    return module in ("torch.nn.modules.loss", "torch.nn.functional") and _stated(loss, "weight") is None


def _weighs_classes(loss: Any) -> bool:
    """torch's mean with weights that differ: divided by the weights of the labels that a batch happens to hold."""
    is_cross_entropy = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or _function(loss) in CROSS_ENTROPY
    weight = _stated(loss, "weight")
    return is_cross_entropy and weight is not None and _stated(loss, "reduction") in (None, "mean") and _differ(weight)


def _differ(weight: torch.Tensor) -> bool:
    return bool((weight != weight.flatten()[0]).any())


def _function(loss: Any) -> Any:
    return loss.func if isinstance(loss, functools.partial) else loss


def _stated(loss: Any, name: str) -> Any:
    """What a module or a partial function says of itself."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _likeliest(whole: float, alone: torch.Tensor, targets: torch.Tensor, rough: float) -> Optional[str]:
    """``alone``: (rows,). None: the whole follows from no reading."""
    scale = max(abs(whole), float(alone.abs().max()))
    guesses = _guesses(alone, targets)
    return next((kind for kind, guess in guesses.items() if abs(guess - whole) <= rough * scale), None)


def _guesses(alone: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The loss of all rows from those of each, by reading."""
    guesses = {"rows": float(alone.mean()), "sum": float(alone.sum())}
    if targets.dtype not in LABELS:
        return guesses
    labels = _labels_of(targets)
    return {"labels": float((alone * labels).sum() / labels.sum().clamp(min=1)), **guesses}


def _labels_of(targets: torch.Tensor) -> torch.Tensor:
    """Per row, the labels that are learned: those other than -100; 1 for targets that are no labels."""
    if targets.dtype not in LABELS:
        return torch.ones(len(targets), device=targets.device)
    return targets.ne(NOT_LEARNED).reshape(len(targets), -1).sum(dim=1).float()


def _safe(targets: torch.Tensor) -> torch.Tensor:
    """With a class in rows where nothing is learned, whose mean over no labels would be no number."""
    learned = (_labels_of(targets) > 0).reshape(-1, *([1] * (targets.dim() - 1)))
    return torch.where(learned, targets, torch.zeros_like(targets))


def _is_plain(outputs: Any, targets: torch.Tensor, alone: torch.Tensor, rough: float) -> bool:
    is_classes = torch.is_tensor(outputs) and outputs.dim() == 2 and targets.dim() == 1 and targets.dtype is torch.int64
    if not is_classes:
        return False
    is_class = (targets >= 0) & (targets < outputs.size(1))
    if not bool((is_class | (targets == NOT_LEARNED)).all()):
        return False
    plain = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return torch.allclose(plain, alone, rtol=rough, atol=rough * 1e-2)
