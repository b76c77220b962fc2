"""Take the loss of each row out of any loss function, and find out how the function combines rows.

    rows     mean over rows                      any loss with reduction "mean" or "none"
    labels   mean over all labels except -100    the same where rows have several labels, or some are not learned
    targets  class-weighted mean                 torch's cross-entropy with class weights, wherever it is called
    sum      sum over rows
    whole    none of these: rows affect each other, so a batch can only be used as a whole

The kind is found on a row of each class of the first step, in the same way as for the losses of models
(``loss/analysis``): the loss of all these rows, and its gradient with respect to the outputs, are compared with those
of each single row. A user's own function may hide class weights, so it is checked again when new classes appear.
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
from scu_trainer.train.loss.analysis.measuring import LossObservation, with_gradient
from scu_trainer.train.loss.rows.known import LossCalls, divisor_of
from scu_trainer.train.loss.wrapped_rows import (
    LABELS,
    are_classes,
    copied,
    has_one_entry_per_row,
    rows_for_wrapped_trial,
    take,
)
from scu_trainer.train.step.batches.reduction import Targets
from scu_trainer.train.step.batches.rows import NOT_LEARNED

logger = logging.getLogger("scu_trainer")

MOST_SINGLE_CLASS_STEPS = 5
"""From this step on a single class decides the kind; before, another class may still follow."""

MOST_CHECKS = 200
"""Maximum number of steps in which the loss is checked again because new classes appeared."""

NO_ROWS = "the losses of single rows are unknown: the outputs do not have one entry per row along dimension 0"
MIXED = (
    "batches run whole, and the losses of single rows are unknown: the loss of several rows is neither the mean nor "
    "the sum of their losses"
)

Rows = tuple[torch.Tensor, torch.Tensor]
"""(sums, counts), each of shape (rows,): a row's loss summed over its labels, and how much the row counts."""


class RowLoss(nn.Module):
    """``loss(outputs, targets)``, row by row. ``kind``: see the module docstring; None until it is known.

    ``asks_alone``: whether ``forward`` may find out the kind; with several ranks, all find it out together beforehand.
    ``is_plain``: whether a row's loss is its plain cross-entropy over the classes of (rows, classes) logits.

    Raises ModelError if the loss has weights of its own or does not return a loss.
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
        self._findings = _LossFindings()
        self.seen: set[int] = set()
        self.asks_alone = True
        self._row_method: Callable[[Any, torch.Tensor], torch.Tensor] = self._by_loop

    @property
    def kind(self) -> Optional[str]:
        return self._findings.kind

    @property
    def is_plain(self) -> bool:
        return self._findings.is_plain

    def forward(
        self, outputs: Any, targets: torch.Tensor, num_items: Any
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return (loss, differentiable losses of the rows, or None if the kind is "whole").

        ``num_items``: number of rows (with kind "labels": of learned labels) in the whole optimizer step; None to count
        only this batch.
        """
        with _explain_class_errors(outputs, targets):
            has_rows = self.kind == "whole" or has_one_entry_per_row(outputs, len(targets))
            if self.kind is None and self.asks_alone:
                self.find_kind(outputs if has_rows else None, targets)
            elif not has_rows and self.asks_alone:
                self._fall_back_to_whole(NO_ROWS)
            if self.kind == "whole" or not has_rows:
                share = 1.0 if num_items is None else len(targets) / num_items
                return self._call_loss(outputs, targets).reshape(()) * share, None
            sums, counts = self._row_sums_and_counts(outputs, targets)
            total = sums.sum()
            if self.kind == "sum":
                return total, sums
            if num_items is None:
                counted = counts.sum()
                num_items = torch.where(counted > 0, counted, 1.0)
            return total / num_items, sums

    def weights_of(self, targets: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the divisor of a class-weighted mean over ``targets``; None for other kinds."""
        return self._counts(targets).sum() if self.kind == "targets" else None

    def counted(self, targets: torch.Tensor) -> torch.Tensor:
        """Return a tensor with as many entries other than -100 as the mean over ``targets`` has terms."""
        return targets if self.kind == "labels" else torch.zeros(len(targets), dtype=torch.int64, device=targets.device)

    # -- finding out the kind ------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no further step can show anything new."""
        if self.kind not in (None, "labels", "rows") or self._row_method == self._directly:
            return True
        is_conclusive = self._findings.known or is_known(self.loss) or self._findings.checks >= MOST_CHECKS
        return self.kind is not None and is_conclusive

    def may_show_more(self, targets: Iterable[torch.Tensor]) -> bool:
        """Return whether a step with these ``targets`` may show something new about the loss."""
        if self.kind is None or self.is_settled:
            return self.kind is None
        return any(are_classes(target) and not self.seen.issuperset(target.unique().tolist()) for target in targets)

    @torch.no_grad()
    def find_kind(self, outputs: Any, targets: torch.Tensor) -> None:
        """Find ``kind`` from a few rows; it stays None if they do not show it (one row, one class, no finite loss).

        ``outputs``: None if they do not have one entry per row. Raises ModelError if new classes show that the loss
        weights classes, so that the rows trained so far were weighted wrongly.
        """
        self._findings.steps += 1
        if outputs is None:
            self._fall_back_to_whole(NO_ROWS)
            return
        rows = rows_for_wrapped_trial(targets, self.seen)
        few_outputs, few_targets = take(outputs, rows), targets[rows]
        with LossCalls() as seen, _explain_class_errors(few_outputs, few_targets):
            whole = self._call_loss(copied(few_outputs), few_targets)
        if whole.numel() > 1:
            self._findings, self._row_method = _LossFindings("rows"), self._directly
            return
        divisor = divisor_of(seen.calls, {TARGET: few_targets}, len(few_targets))
        declared = divisor and divisor.targets
        if self.kind is None and declared is not None and declared.kind == "targets":
            # A class may have weight 0, and then the mean over only its rows is undefined.
            self._findings.targets = declared
        row_losses = torch.stack(
            [self._loss_of_row(copied(few_outputs), few_targets, row) for row in range(len(rows))]
        ).float()
        is_finite = bool(torch.isfinite(row_losses).all() & torch.isfinite(whole).all())
        if is_finite and (bool(row_losses.any()) or bool(whole.any())):
            self._decide(few_outputs, few_targets, whole, row_losses, declared)

    def _decide(
        self,
        few_outputs: Any,
        few_targets: torch.Tensor,
        whole: torch.Tensor,
        row_losses: torch.Tensor,
        declared: Optional[Targets],
    ) -> None:
        """Set ``kind`` and the method for the rows' losses. ``whole``: the loss of all these rows. ``row_losses``:
        (rows,), of each. ``declared``: how a public loss function that was called counts and weights its targets."""
        bound = ROUGH if whole.dtype in (torch.float16, torch.bfloat16) else EXACT
        if self.kind is not None:
            self._check_new_classes(few_outputs, few_targets)
            return
        is_public = is_known(self.loss) or declared is not None
        kind = (
            self._match_kind(few_outputs, few_targets, declared, bound)
            if len(few_targets) > 1
            else self._kind_from_single_row(declared)
        )
        if len(few_targets) > 1 and kind is None:
            self._fall_back_to_whole(MIXED)
            return
        has_one_class = kind == "labels" and len(few_targets.unique()) == 1 and not is_public
        if kind is None or (has_one_class and self._findings.steps < MOST_SINGLE_CLASS_STEPS):
            return  # class weights only show between different classes
        self._findings = _LossFindings(kind, declared if kind == "targets" else None, declared is not None)
        self._remember_classes(few_targets)
        methods = [self._by_vmap, self._by_loop]
        if self._without_reduction() is not None:
            methods.insert(0, self._by_reduction_none)
        self._row_method = next(
            method for method in methods if self._agrees(method, few_outputs, few_targets, row_losses, bound)
        )
        self._findings.is_plain = kind != "targets" and _is_plain(few_outputs, few_targets, row_losses, bound)

    def _match_kind(
        self, few_outputs: Any, few_targets: torch.Tensor, declared: Optional[Targets], bound: float
    ) -> Optional[str]:
        """Return the first kind that explains the loss of all rows, in value and gradient; None if none does."""
        observed = self._observe(few_outputs, few_targets)
        kinds = ["labels", "rows", "sum"] if few_targets.dtype in LABELS else ["rows", "sum"]
        if declared is not None and declared.kind == "targets":
            kinds.insert(0, "targets")
        return next((kind for kind in kinds if observed.error(kind, declared) <= bound), None)

    def _observe(self, few_outputs: Any, few_targets: torch.Tensor) -> LossObservation:
        """Return the loss of all rows and of each row, with gradients with respect to the outputs."""
        leaves: list[torch.Tensor] = []

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1]

        with torch.enable_grad():
            outputs = recursively_apply(leaf, few_outputs)
            whole = with_gradient(self._call_loss(copied(outputs), few_targets), leaves)
            parts = [
                with_gradient(self._loss_of_row(copied(outputs), few_targets, row), leaves)
                for row in range(len(few_targets))
            ]
        return LossObservation({TARGET: few_targets}, len(few_targets), whole, parts)

    def _kind_from_single_row(self, declared: Optional[Targets]) -> Optional[str]:
        """Return the kind that the loss declares, or None: the value for a single row is both the mean and the sum."""
        if declared is not None:
            return declared.kind
        if _declared_option(self.loss, "reduction") == "sum":
            return "sum"
        if self._findings.steps == MOST_SINGLE_CLASS_STEPS and not is_known(self.loss):
            logger.warning("steps of a single row do not show how the loss combines rows: it is assumed to be a mean")
        return None

    def _check_new_classes(self, few_outputs: Any, few_targets: torch.Tensor) -> None:
        """Raise ModelError if the loss weights the new classes differently from those seen before."""
        self._findings.checks += 1
        new = ", ".join(str(label) for label in sorted(set(few_targets.tolist()) - self.seen)[:3])
        if len(few_targets) > 1 and self._observe(few_outputs, few_targets).error(self.kind) > ROUGH:
            raise ModelError(
                f"the loss weights classes, as class {new} shows, which no earlier step had; give the weights: "
                "torch.nn.CrossEntropyLoss(weight=...), or return one loss per row (reduction='none')"
            )
        self._remember_classes(few_targets)

    def _remember_classes(self, few_targets: torch.Tensor) -> None:
        """Remember classes that were compared with known ones; that needs a known class among the rows."""
        labels = set(few_targets.tolist()) if are_classes(few_targets) else set()
        if not self.seen or self.seen & labels:
            self.seen |= labels

    def _fall_back_to_whole(self, line: str) -> None:
        self._findings = _LossFindings("whole")
        logger.warning(line)

    def _call_loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the user's loss: a single number, or one entry per row. Raises ModelError for anything else."""
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

    def _loss_of_row(self, outputs: Any, targets: torch.Tensor, row: int) -> torch.Tensor:
        """Return the loss of a single row; 0 if nothing in it is learned."""
        only = slice(row, row + 1)
        return torch.where(
            self._counts(targets[only]) > 0,
            self.loss(take(outputs, only), self._with_counted_class(targets[only])).mean(),
            0.0,
        )[0]

    # -- methods that return the losses of all rows, each the mean over what counts in the row -------------------------

    def _agrees(
        self, method: Callable, outputs: Any, targets: torch.Tensor, row_losses: torch.Tensor, bound: float
    ) -> bool:
        """Return whether a method gives the same losses of rows as calling the loss row by row."""
        if method == self._by_loop:
            return True
        try:
            found = method(copied(outputs), targets)
        except (RuntimeError, ValueError, TypeError, IndexError):  # vmap cannot map functions that look at values
            return False
        return found.shape == row_losses.shape and torch.allclose(
            found.float(), row_losses, rtol=bound, atol=bound * 1e-2
        )

    def _without_reduction(self) -> Optional[Callable[[Any, Any], torch.Tensor]]:
        """Return the loss with ``reduction="none"``; None if it has no such option."""
        loss = self.loss
        if isinstance(loss, nn.Module):
            if getattr(loss, "reduction", None) not in ("mean", "sum"):
                return None
            loss = copy.copy(loss)  # shares its buffers with the original, which moves between devices
            loss.reduction = "none"
            return loss.forward  # without the original's hooks, such as those that DeepSpeed adds to all modules
        try:
            takes = "reduction" in inspect.signature(loss).parameters
        except (TypeError, ValueError):  # built-in functions have no signature
            takes = False
        return functools.partial(loss, reduction="none") if takes else None

    def _by_reduction_none(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        elements = self._without_reduction()(outputs, targets).reshape(len(targets), -1)
        if self.kind == "sum":
            return elements.sum(dim=1)
        if self.kind == "rows":
            return elements.mean(dim=1)
        counts = self._counts(targets)
        return elements.sum(dim=1) / torch.where(counts > 0, counts, 1.0)

    def _directly(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Call a loss that returns one entry per row anyway."""
        return self._call_loss(outputs, targets).reshape(len(targets), -1).mean(dim=1)

    def _by_vmap(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        def loss_of_row(output: Any, target: torch.Tensor) -> torch.Tensor:
            outputs = recursively_apply(lambda tensor: tensor.unsqueeze(0), output)
            return self.loss(outputs, target.unsqueeze(0)).reshape(())

        return torch.vmap(loss_of_row)(outputs, self._with_counted_class(targets))

    def _by_loop(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._loss_of_row(outputs, targets, row) for row in range(len(targets))])

    def _row_sums_and_counts(self, outputs: Any, targets: torch.Tensor) -> Rows:
        means = self._row_method(outputs, targets)
        if self.kind not in ("labels", "targets"):
            return means, torch.ones(len(targets), device=means.device)
        counts = self._counts(targets)
        return torch.where(counts > 0, means * counts, 0.0), counts

    def _counts(self, targets: torch.Tensor) -> torch.Tensor:
        """Return, of shape (rows,), how many labels are learned (those other than -100) or their total class weight. It
        is 1 per row if the targets are not labels."""
        if self._findings.targets is not None:
            return self._findings.targets.items({TARGET: targets})
        if targets.dtype not in LABELS:
            return torch.ones(len(targets), device=targets.device)
        return targets.ne(NOT_LEARNED).reshape(len(targets), -1).sum(dim=1).float()

    def _with_counted_class(self, targets: torch.Tensor) -> torch.Tensor:
        """Put a class that counts into rows without any, because their mean over no labels would not be finite."""
        counted = (self._counts(targets) > 0).reshape(-1, *([1] * (targets.dim() - 1)))
        weight = None if self._findings.targets is None else self._findings.targets.weight
        return torch.where(counted, targets, 0 if weight is None else weight.argmax().to(targets))


@contextlib.contextmanager
def _explain_class_errors(outputs: Any, targets: torch.Tensor) -> Iterator[None]:
    """Raise a ModelError that explains torch's IndexError for a class that has no output."""
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
class _LossFindings:
    """What is known about a loss; unlike numbers among the module's attributes, it is not restored after a trial.

    ``targets``: with kind "targets" only. ``known``: whether the called function shows it. ``steps``: number of
    trials. ``checks``: number of steps in which new classes were checked.
    """

    kind: Optional[str] = None
    targets: Optional[Targets] = None
    known: bool = False
    is_plain: bool = False
    steps: int = 0
    checks: int = 0


def is_known(loss: Any) -> bool:
    """Return whether the loss is one of torch's own without class weights, in which rows of all classes count alike."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(function, "__module__", None)
    return module in ("torch.nn.modules.loss", "torch.nn.functional") and _declared_option(loss, "weight") is None


def _declared_option(loss: Any, name: str) -> Any:
    """Return an option that a module or a partial function was created with; None if it has no such option."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _is_plain(outputs: Any, targets: torch.Tensor, row_losses: torch.Tensor, bound: float) -> bool:
    is_classes = torch.is_tensor(outputs) and outputs.dim() == 2 and targets.dim() == 1 and targets.dtype is torch.int64
    if not is_classes:
        return False
    is_class = (targets >= 0) & (targets < outputs.size(1))
    if not bool((is_class | (targets == NOT_LEARNED)).all()):
        return False
    plain = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return torch.allclose(plain, row_losses, rtol=bound, atol=bound * 1e-2)
