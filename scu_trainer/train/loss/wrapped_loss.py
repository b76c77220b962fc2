"""The loss of each row, taken out of any loss function, and how the function puts rows together.

    rows     their mean                          any loss with reduction "mean" or "none"
    labels   the mean over all labels but -100   the same where rows have several labels, or some are not learned
    targets  the mean with weights of classes    torch's cross-entropy that was given such, wherever it is called
    sum      their sum
    whole    none of these: rows act on each other, so that a batch can only be taken as it is

Found out on a row of each class of the first step, as the losses of models are (``loss_analysis``): the loss of all of
them, and its gradient by the outputs, are compared with those of each alone. A function of somebody's own may hold
weights of classes that nobody sees: it is asked again about classes that come later.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.nn import functional

from scu_trainer.data.items import TARGET
from scu_trainer.errors import ModelError
from scu_trainer.train.loss.analysis import EXACT, ROUGH
from scu_trainer.train.loss.analysis.measuring import Observation, with_gradient
from scu_trainer.train.loss.rows.known import LossCalls, divisor_of
from scu_trainer.train.loss.wrapped_rows import (
    LABELS,
    are_classes,
    copied,
    has_one_entry_per_row,
    rows_to_ask,
    take,
)
from scu_trainer.train.step.batches.reduction import Targets
from scu_trainer.train.step.batches.rows import NOT_LEARNED

logger = logging.getLogger("scu_trainer")

MOST_QUESTIONS = 5
"""Steps of one class that are passed over in the hope of another."""

MOST_CHECKS = 200
"""Steps in which classes that were not seen before are asked about."""

NO_ROWS = "the outputs do not have one entry per row along dimension 0"

Rows = tuple[torch.Tensor, torch.Tensor]
"""(sums, counts) of shape (rows,) each: a row's loss, summed over its labels, and what it counts for."""


class RowLoss(nn.Module):
    """``loss(outputs, targets)`` by rows. ``kind``: see above, None until it has been asked.

    ``asks_alone``: whether a forward may ask, and note what it finds; several ranks ask together before it.
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
                f"the loss ignores targets of {ignored}, but here {NOT_LEARNED} marks what is not learned; mark such "
                f"targets with {NOT_LEARNED} and drop ignore_index"
            )
        self.loss = loss
        self._found = _Found()
        self.seen: set[int] = set()
        self._asked = 0
        self.asks_alone = True
        self._way: Callable[[Any, torch.Tensor], torch.Tensor] = self._looped

    @property
    def kind(self) -> Optional[str]:
        return self._found.kind

    @property
    def is_plain(self) -> bool:
        return self._found.is_plain

    def forward(
        self, outputs: Any, targets: torch.Tensor, num_items: Any
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """(loss, differentiable losses of the rows; None for "whole").

        ``num_items``: rows (with kind "labels": labels that are learned) of the whole optimizer step, None for those of
        this batch alone.
        """
        with _classes_told(outputs, targets):
            return self._loss(outputs, targets, num_items)

    def _loss(self, outputs: Any, targets: torch.Tensor, num_items: Any) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        has_rows = self.kind == "whole" or has_one_entry_per_row(outputs, len(targets))
        if self.kind is None and self.asks_alone:
            self.ask(outputs if has_rows else None, targets)
        elif not has_rows and self.asks_alone:
            self._take_whole(NO_ROWS)
        if self.kind == "whole" or not has_rows:
            share = 1.0 if num_items is None else len(targets) / num_items
            return self._checked(outputs, targets).reshape(()) * share, None
        sums, counts = self._rows(outputs, targets)
        total = sums.sum()
        if self.kind == "sum":
            return total, sums
        if num_items is None:
            counted = counts.sum()
            num_items = torch.where(counted > 0, counted, 1.0)
        return total / num_items, sums

    def weights_of(self, targets: torch.Tensor) -> Optional[torch.Tensor]:
        """What a mean with weights of classes over ``targets`` is divided by; None for other kinds."""
        return self._counts(targets).sum() if self.kind == "targets" else None

    def counted(self, targets: torch.Tensor) -> torch.Tensor:
        """Something with as many entries other than -100 as the mean over ``targets`` runs over."""
        return targets if self.kind == "labels" else torch.zeros(len(targets), dtype=torch.int64, device=targets.device)

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no step can tell anything new."""
        if self.kind not in (None, "labels", "rows") or self._way == self._as_it_is:
            return True
        has_been_told = self._found.known or is_known(self.loss) or self._found.checks >= MOST_CHECKS
        return self.kind is not None and has_been_told

    def must_ask(self, targets: Iterable[torch.Tensor]) -> bool:
        """Whether a step with these ``targets`` may tell something new of the loss."""
        if self.kind is None or self.is_settled:
            return self.kind is None
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
        rows = rows_to_ask(targets, self.seen)
        few, wanted = take(outputs, rows), targets[rows]
        with LossCalls() as seen, _classes_told(few, wanted):
            whole = self._checked(copied(few), wanted)
        if whole.numel() > 1:
            self._found, self._way = _Found("rows"), self._as_it_is
            return
        divisor = divisor_of(seen.calls, {TARGET: wanted}, len(wanted))
        stated = divisor and divisor.targets
        if self.kind is None and stated is not None and stated.kind == "targets":
            self._found.targets = stated  # a class may weigh nothing: its rows alone have no mean
        alone = torch.stack([self._of_one(copied(few), wanted, row) for row in range(len(rows))]).float()
        is_finite = bool(torch.isfinite(alone).all() & torch.isfinite(whole).all())
        if is_finite and (bool(alone.any()) or bool(whole.any())):
            self._decide(few, wanted, whole, alone, stated)

    def _decide(
        self, few: Any, wanted: torch.Tensor, whole: torch.Tensor, alone: torch.Tensor, stated: Optional[Targets]
    ) -> None:
        """``whole``: the loss of ``few`` rows; ``alone``: (rows,), of each. ``stated``: by a public loss function."""
        rough = ROUGH if whole.dtype in (torch.float16, torch.bfloat16) else EXACT
        if self.kind is not None:
            self._compare(few, wanted)
            return
        is_known_way = is_known(self.loss) or stated is not None
        kind = self._likeliest(few, wanted, stated, rough) if len(wanted) > 1 else self._stated_for_one(stated)
        if len(wanted) > 1 and kind is None:
            self._take_whole("the loss of several rows is neither the mean nor the sum of their losses")
            return
        has_one_class = kind == "labels" and len(wanted.unique()) == 1 and not is_known_way
        if kind is None or (has_one_class and self._asked < MOST_QUESTIONS):
            return  # weights of classes show only between classes
        self._found = _Found(kind, stated if kind == "targets" else None, stated is not None)
        self._note(wanted)
        ways = [self._mapped, self._looped]
        if self._without_reduction() is not None:
            ways.insert(0, self._unreduced)
        self._way = next(way for way in ways if self._agrees(way, few, wanted, alone, rough))
        self._found.is_plain = kind != "targets" and _is_plain(few, wanted, alone, rough)

    def _likeliest(self, few: Any, wanted: torch.Tensor, stated: Optional[Targets], rough: float) -> Optional[str]:
        """The first kind of which the whole follows, value and gradient; None where it follows from none."""
        observed = self._observed(few, wanted)
        kinds = ["labels", "rows", "sum"] if wanted.dtype in LABELS else ["rows", "sum"]
        if stated is not None and stated.kind == "targets":
            kinds.insert(0, "targets")
        return next((kind for kind in kinds if observed.error(kind, stated) <= rough), None)

    def _observed(self, few: Any, wanted: torch.Tensor) -> Observation:
        """The loss of the rows together and of each, with its gradient by the outputs."""
        leaves: list[torch.Tensor] = []

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1]

        with torch.enable_grad():
            outputs = recursively_apply(leaf, few)
            whole = with_gradient(self._checked(copied(outputs), wanted), leaves)
            parts = [with_gradient(self._of_one(copied(outputs), wanted, row), leaves) for row in range(len(wanted))]
        return Observation({TARGET: wanted}, len(wanted), whole, parts)

    def _stated_for_one(self, stated: Optional[Targets]) -> Optional[str]:
        """One row alone is its own mean and its own sum."""
        if stated is not None:
            return stated.kind
        if _stated(self.loss, "reduction") == "sum":
            return "sum"
        if self._asked == MOST_QUESTIONS and not is_known(self.loss):
            logger.warning("steps of a single row do not show how the loss combines rows: it is assumed to be a mean")
        return None

    def _compare(self, few: Any, wanted: torch.Tensor) -> None:
        self._found.checks += 1
        new = ", ".join(str(label) for label in sorted(set(wanted.tolist()) - self.seen)[:3])
        if len(wanted) > 1 and self._observed(few, wanted).error(self.kind) > ROUGH:
            raise ModelError(
                f"the loss weights classes, as class {new} shows, which no earlier step had; give the weights: "
                "torch.nn.CrossEntropyLoss(weight=...), or return one loss per row (reduction='none')"
            )
        self._note(wanted)

    def _note(self, wanted: torch.Tensor) -> None:
        """Classes that were compared with those before, of which there must be one among the rows."""
        labels = set(wanted.tolist()) if are_classes(wanted) else set()
        if not self.seen or self.seen & labels:
            self.seen |= labels

    def _take_whole(self, reason: str) -> None:
        self._found = _Found("whole")
        logger.warning("batches run whole, and the losses of single rows are unknown: %s", reason)

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
            self._counts(targets[one]) > 0, self.loss(take(outputs, one), self._safe(targets[one])).mean(), 0.0
        )[0]

    # -- ways to the losses of all rows, each the mean over what the row counts ----------------------------------------

    def _agrees(self, way: Callable, outputs: Any, targets: torch.Tensor, alone: torch.Tensor, rough: float) -> bool:
        if way == self._looped:
            return True
        try:
            found = way(copied(outputs), targets)
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
            return loss.forward  # without the hooks of the one that was copied, as DeepSpeed puts into all modules
        try:
            takes = "reduction" in inspect.signature(loss).parameters
        except (TypeError, ValueError):  # built-in functions tell nothing
            takes = False
        return functools.partial(loss, reduction="none") if takes else None

    def _unreduced(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        elements = self._without_reduction()(outputs, targets).reshape(len(targets), -1)
        if self.kind == "sum":
            return elements.sum(dim=1)
        if self.kind == "rows":
            return elements.mean(dim=1)
        counts = self._counts(targets)
        return elements.sum(dim=1) / torch.where(counts > 0, counts, 1.0)

    def _as_it_is(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._checked(outputs, targets).reshape(len(targets), -1).mean(dim=1)

    def _mapped(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        def of_one(output: Any, target: torch.Tensor) -> torch.Tensor:
            outputs = recursively_apply(lambda tensor: tensor.unsqueeze(0), output)
            return self.loss(outputs, target.unsqueeze(0)).reshape(())

        return torch.vmap(of_one)(outputs, self._safe(targets))

    def _looped(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._of_one(outputs, targets, row) for row in range(len(targets))])

    def _rows(self, outputs: Any, targets: torch.Tensor) -> Rows:
        means = self._way(outputs, targets)
        if self.kind not in ("labels", "targets"):
            return means, torch.ones(len(targets), device=means.device)
        counts = self._counts(targets)
        return torch.where(counts > 0, means * counts, 0.0), counts

    def _counts(self, targets: torch.Tensor) -> torch.Tensor:
        """(rows,): the labels that are learned, which are those other than -100, or what they weigh; 1 for targets that
        are no labels."""
        if self._found.targets is not None:
            return self._found.targets.items({TARGET: targets})
        if targets.dtype not in LABELS:
            return torch.ones(len(targets), device=targets.device)
        return targets.ne(NOT_LEARNED).reshape(len(targets), -1).sum(dim=1).float()

    def _safe(self, targets: torch.Tensor) -> torch.Tensor:
        """With a class that counts in rows where nothing does, whose mean over no labels would not be finite."""
        counted = (self._counts(targets) > 0).reshape(-1, *([1] * (targets.dim() - 1)))
        weight = None if self._found.targets is None else self._found.targets.weight
        return torch.where(counted, targets, 0 if weight is None else weight.argmax().to(targets))


@contextlib.contextmanager
def _classes_told(outputs: Any, targets: torch.Tensor) -> Iterator[None]:
    """Raise ModelError where torch refuses a class that has no output: it names the one it stumbled over."""
    try:
        yield
    except IndexError as error:
        if not torch.is_tensor(outputs) or targets.is_floating_point():
            raise
        classes = targets[targets != NOT_LEARNED]
        raise ModelError(
            f"targets are {classes.min()} to {classes.max()}, and the module's outputs have the shape "
            f"{tuple(outputs.shape)}: {error} Classes count from 0, and each needs an output: give the module more of "
            "them, or count the targets from 0"
        ) from error


@dataclass
class _Found:
    """What is known of one loss, which asking does not take back as it does numbers of the module. ``targets``: of kind
    "targets". ``known``: by the function that is called. ``checks``: steps in which new classes were asked about."""

    kind: Optional[str] = None
    targets: Optional[Targets] = None
    known: bool = False
    is_plain: bool = False
    checks: int = 0


def is_known(loss: Any) -> bool:
    """A loss of torch's own without weights of classes: rows of any class count the same in it."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(function, "__module__", None)
    return module in ("torch.nn.modules.loss", "torch.nn.functional") and _stated(loss, "weight") is None


def _stated(loss: Any, name: str) -> Any:
    """What a module or a partial function says of itself."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _is_plain(outputs: Any, targets: torch.Tensor, alone: torch.Tensor, rough: float) -> bool:
    is_classes = torch.is_tensor(outputs) and outputs.dim() == 2 and targets.dim() == 1 and targets.dtype is torch.int64
    if not is_classes:
        return False
    is_class = (targets >= 0) & (targets < outputs.size(1))
    if not bool((is_class | (targets == NOT_LEARNED)).all()):
        return False
    plain = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return torch.allclose(plain, alone, rtol=rough, atol=rough * 1e-2)
