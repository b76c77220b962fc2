"""The loss of each row, taken out of any loss function, and how the function puts rows together.

    rows     their mean                          any loss with reduction "mean" or "none"
    labels   the mean over all labels but -100   the same where rows have several labels, or some are not learned
    sum      their sum
    whole    none of these: rows act on each other, so that a batch can only be taken as it is

Found out once, on the first rows: the loss of all of them is compared with the losses of each alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional

from scu_trainer.errors import ModelError
from scu_trainer.train.reduction import EXACT, ROUGH
from scu_trainer.train.rows import NOT_LEARNED

logger = logging.getLogger("scu_trainer")

ROWS_TO_ASK = 4

MOST_QUESTIONS = 5
"""Batches of one class that are passed over in the hope of another."""

LABELS = (torch.int64, torch.int32, torch.int16)
"""Types of targets in which -100 is none."""

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
        self._asked = 0
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
            self.ask(outputs, targets)
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

    @torch.no_grad()
    def ask(self, outputs: Any, targets: torch.Tensor) -> None:
        """Find ``kind`` from a few rows; it stays None where they do not tell (one row, one class, no finite loss)."""
        self._asked += 1
        if not _has_rows(outputs, len(targets)):
            self._take_whole(f"the outputs have not one entry for each of the {len(targets)} rows")
            return
        rows = rows_to_ask(targets)
        few, wanted, count = _take(outputs, rows), targets[rows], len(rows)
        whole = self._checked(few, wanted)
        if whole.numel() > 1:
            self.kind, self._way = "rows", self._as_it_is
            return
        alone = torch.stack([self._of_one(few, wanted, row) for row in range(count)]).float()
        if count < 2 or not bool(torch.isfinite(alone).all()) or not (bool(alone.any()) or bool(whole.any())):
            return
        rough = ROUGH if whole.dtype in (torch.float16, torch.bfloat16) else EXACT
        kind = _likeliest(float(whole), alone, wanted, rough)
        if kind == "labels" and len(wanted.unique()) == 1 and self._asked < MOST_QUESTIONS:
            return  # weights of classes show only between classes
        self.kind = kind
        if self.kind is None:
            self._take_whole("the loss of several rows is neither mean nor sum of the losses of each")
            return
        self._way = next(way for way in self._ways() if self._agrees(way, few, wanted, alone, rough))
        self.is_plain = _is_plain(few, wanted, alone, rough)

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
            _labels_of(targets[one]) > 0, self.loss(_take(outputs, one), _safe(targets[one])).mean(), 0.0
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
            return self.loss(_each(output, lambda tensor: tensor.unsqueeze(0)), target.unsqueeze(0)).reshape(())

        return torch.vmap(of_one)(outputs, _safe(targets))

    def _looped(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._of_one(outputs, targets, row) for row in range(len(targets))])

    def _rows(self, outputs: Any, targets: torch.Tensor) -> Rows:
        means = self._way(outputs, targets)
        if self.kind != "labels":
            return means, torch.ones(len(targets), device=means.device)
        counts = _labels_of(targets)
        return torch.where(counts > 0, means * counts, 0.0), counts


def rows_to_ask(targets: torch.Tensor) -> list[int]:
    """Numbers of a few rows, of as many classes as there are among them."""
    first: dict[Any, int] = {}
    if targets.dim() == 1 and targets.dtype in LABELS:
        for row, label in enumerate(targets.tolist()):
            first.setdefault(label, row)
    of_classes = list(first.values())
    others = [row for row in range(min(len(targets), 2 * ROWS_TO_ASK)) if row not in of_classes]
    return sorted([*of_classes, *others][:ROWS_TO_ASK])


def _likeliest(whole: float, alone: torch.Tensor, targets: torch.Tensor, rough: float) -> Optional[str]:
    """``alone``: (rows,). None: the whole follows from no reading."""
    guesses = {"rows": float(alone.mean()), "sum": float(alone.sum())}
    if targets.dtype in LABELS:
        labels = _labels_of(targets)
        guesses = {"labels": float((alone * labels).sum() / labels.sum().clamp(min=1)), **guesses}
    scale = max(abs(whole), float(alone.abs().max()))
    return next((kind for kind, guess in guesses.items() if abs(guess - whole) <= rough * scale), None)


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
    if not is_classes or bool((targets >= outputs.size(1)).any()):
        return False
    plain = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return torch.allclose(plain, alone, rtol=rough, atol=rough * 1e-2)


# -- rows of what a module returns -------------------------------------------------------------------------------------


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it changed; tuples, lists and mappings stay what they are."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({name: _each(part, change) for name, part in value.items()})
    if isinstance(value, (tuple, list)):
        parts = [_each(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _take(outputs: Any, rows: slice | list[int]) -> Any:
    return _each(outputs, lambda tensor: tensor[rows])


def _has_rows(outputs: Any, count: int) -> bool:
    sizes: list[bool] = []
    _each(outputs, lambda tensor: sizes.append(tensor.dim() > 0 and tensor.size(0) == count) or tensor)
    return bool(sizes) and all(sizes)
