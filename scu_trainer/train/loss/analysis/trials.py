"""How does a loss put the rows of a batch together? Known where a public function computes it, asked where not.

Splitting a batch is exact when the loss of the whole is a known sum over its rows. Signatures do not tell: many
forwards take ``num_items_in_batch`` among their ``**kwargs`` and ignore it. So a few short rows are run together and
each alone, in training mode, and every ``Reduction.kind`` is held against the whole: by value, and by the gradient of
some weights, since near a random start values are alike. What survives, also with other labels, is the reduction; a
public loss function that was called adds what it says of itself (``known.py``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.figures import first_few
from scu_trainer.train.loss.analysis.asked_rows import beginnings, in_order, rows_to_ask, with_other_labels
from scu_trainer.train.loss.analysis.frozen_weights import LOSS_WRITES, ONCE, written_buffer
from scu_trainer.train.loss.analysis.measuring import (
    FEW_ITEMS,
    LossOf,
    Meter,
    Observation,
    measured_weights,
    tolerance,
)
from scu_trainer.train.loss.analysis.no_trace import untouched
from scu_trainer.train.loss.analysis.own_draws import ONCE_PER_BATCH, draws_once
from scu_trainer.train.loss.rows.known import Call, Divisor, LossCalls, divisor_of, left_out_by
from scu_trainer.train.step.batches.reduction import COLUMN, Reduction, Targets, kinds_of_counts
from scu_trainer.train.step.batches.rows import Batch, Row, pick, take
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory, retry_unchanged

FOLLOWS = 0.75
"""Given twice the count, a loss that is divided by it halves, or nearly so where one of its terms is not divided."""


def analyze(
    loss_of: LossOf,
    model: nn.Module,
    batches: Sequence[Batch],
    num_items: Any,
    pad_token_id: int,
    training: bool = True,
    low_precision: bool = False,
    shifts: bool = False,
    seen: Collection[int] = (),
    owner: Any = None,
    most_rows: Optional[int] = None,
    is_public: bool = False,
) -> Optional[Reduction]:
    """``num_items``: what the stock loop counted for this window, None where the loss does not take it. ``training``
    False: in evaluation mode, where some modules do not mix rows. ``low_precision``: autocast will be on. ``shifts``:
    the stock loop takes the loss for one over shifted labels, which decides between kinds that do not differ here.
    ``seen``: classes that were asked about before. ``owner``: as of ``untouched``. ``most_rows``: None for the usual
    few, 2 where no more are known to fit. ``is_public``: nobody's own code takes part, so that values tell enough.

    Rows are cut and padded as in training, long ones to their beginnings if the model takes these: with all logits they
    could need more memory than training does. None: these rows do not tell; ask with others.
    """
    rows = rows_to_ask(batches, seen, more=most_rows is None)
    if rows is None:
        return None
    mixing = mixing_modules(model) if training else None
    precision = tolerance(model, low_precision)
    with untouched(model, owner, training) as written, measured_weights(model) as weights:
        if mixing:  # what else the loss does shows where the modules that are known to mix rows do not
            for module in filter(is_batch_norm, model.modules()):
                module.eval()
        meter = Meter(loss_of, num_items, model, weights)
        trial = _Trial(meter, precision, batches, rows, pad_token_id, shifts, is_public, owner)
        reduction = _try_beginnings(trial) or _try_rows(trial)
        if reduction and written is not None and written.are_written:
            return replace(reduction, mixes=LOSS_WRITES, may_be_cut=False)
    return replace(reduction, mixes=f"rows affect each other through {mixing}") if mixing and reduction else reduction


def _try_beginnings(trial: _Trial) -> Optional[Reduction]:
    """None where rows are short already, or where their beginnings do not tell."""
    short = beginnings(trial.batches, trial.rows, trial.pad_token_id)
    if short is None:
        return None
    try:
        return _again(replace(trial, batches=[short], rows=[(0, row) for row in range(short.rows)]), trim=True)
    except Exception as error:  # a model that takes whole rows only; they are asked next
        forget_traceback(error)
        return None


def _try_rows(trial: _Trial) -> Optional[Reduction]:
    reasons, takes_few = [], True
    for trim in (True, False):
        try:
            reduction = _of_two_or_more(trial, trim)
        except Exception as error:  # whatever a model says to rows that it does not take: training shall go on
            if is_out_of_memory(error):
                reasons.append("two rows do not fit in memory together")
                forget_traceback(error)
                break
            takes_few = False
            reasons.append(f"it fails on few or shorter rows ({type(error).__name__}: {error})")
            forget_traceback(error)
        else:
            return replace(reduction, trims=False, reads_padding=reasons[0]) if reduction and reasons else reduction
    free_memory()
    return trial.of_one(reasons[-1], may_be_cut=takes_few)


def _of_two_or_more(trial: _Trial, trim: bool) -> Optional[Reduction]:
    if len(trial.rows) < 3:
        return _again(trial, trim)
    with CatchOutOfMemory():
        return _again(trial, trim)
    free_memory()
    return replace(trial, rows=trial.rows[:2]).reduction(trim)


def _again(trial: _Trial, trim: bool) -> Optional[Reduction]:
    """The reduction; once more after one failed allocation, which is no reason to believe something else of a loss."""
    return retry_unchanged(partial(trial.reduction, trim))


@dataclass
class _Trial:
    meter: Meter
    tolerance: float
    batches: Sequence[Batch]
    rows: Sequence[Row]
    pad_token_id: int
    shifts: bool
    is_public: bool
    owner: Any = None

    def reduction(self, trim: bool) -> Optional[Reduction]:
        meter, rows = self.meter, len(self.rows)
        together = in_order(self.batches, self.rows, self.pad_token_id, trim)
        other = with_other_labels(together, rows)
        strongest = together if other is None else other
        whole, calls = meter.first(strongest, gradient=not self.is_public)
        known, follows = self._known(strongest, float(whole[0]), calls), self._follows(strongest, float(whole[0]))
        gradient = not (known and self.is_public)
        if gradient and self.is_public:
            whole = meter.measure(strongest)
        asked = [self._observed(strongest, whole, gradient)]
        reduction = self._reduction_from(asked, known, follows)
        if other is not None and reduction is not None and reduction.known is None:
            asked.insert(0, self._observed(together, meter.measure(together, gradient=False), gradient=False))
            reduction = self._reduction_from(asked, known, follows)
        if reduction is None:
            return None
        if reduction.is_exact and not self.is_public:
            alone = [self._row(strongest, row) for row in range(len(self.rows))]
            if draws_once(meter.as_it_is, strongest, alone, self.tolerance):
                reduction = replace(reduction, mixes=ONCE_PER_BATCH)
            elif name := written_buffer(
                meter.model, self.owner, partial(meter.loss, strongest), partial(meter.loss, alone[0])
            ):
                reduction = replace(reduction, mixes=f"each forward writes to {name}, {ONCE}")
        trims = self._trims(together, asked[0]) if trim else False
        reads_padding = "cutting it changes the loss" if trims is False else None
        left_out = left_out_by(calls, strongest, rows) if reduction.kind == "rows" else ()
        return replace(reduction, trims=trims, reads_padding=reads_padding, left_out_by=left_out)

    def _reduction_from(
        self, asked: list[Optional[Observation]], known: Optional[Divisor], follows: Optional[float]
    ) -> Optional[Reduction]:
        if any(one is None for one in asked):
            return None
        errors = self._errors(asked, known, follows)
        kind, tied = self._decide(errors, asked, known)
        if kind is None:
            return None
        is_exact = errors[kind] <= self.tolerance
        is_known = is_exact and known is not None and kind in known.kinds
        column = kind.removeprefix(COLUMN) if kind.startswith(COLUMN) else None
        return Reduction(
            "column" if column else kind,
            trims=None,
            mixes=None if is_exact else "the loss of several rows does not follow from the losses of each",
            known=known.name if is_known else None,
            targets=known.targets if known and kind == "targets" else None,
            column=column,
            tied=() if is_known else tied,
        )

    def _observed(self, inputs: Any, whole: torch.Tensor, gradient: bool) -> Optional[Observation]:
        """``whole``: what was measured of ``inputs`` together. None where the loss is not finite, or nothing."""
        parts = [self.meter.measure(self._row(inputs, row), gradient) for row in range(len(self.rows))]
        values = [float(part[0]) for part in parts]
        if not math.isfinite(whole[0]) or not any((*values, float(whole[0]))) or not any(map(math.isfinite, values)):
            return None
        return Observation(inputs, len(self.rows), whole, parts)

    def _row(self, inputs: Any, row: int) -> Any:
        return pick(inputs, torch.tensor([row]), len(self.rows))

    def _errors(
        self, asked: Sequence[Observation], known: Optional[Divisor], follows: Optional[float]
    ) -> dict[str, float]:
        """Of each kind, how far the whole is from what it says."""
        if follows is not None and follows < FOLLOWS:
            honoured = 0.0 if abs(2 * follows - 1) <= self.tolerance else math.inf
            return {"num_items": max(honoured, *(one.error("num_items") for one in asked))}
        targets = known and known.targets
        kinds = _kinds(asked[0].inputs, self.shifts, targets)
        return {kind: max(one.error(kind, targets) for one in asked) for kind in kinds}

    def _decide(
        self, errors: dict[str, float], asked: Sequence[Observation], known: Optional[Divisor]
    ) -> tuple[Optional[str], tuple[str, ...]]:
        """(kind, kinds that came out the same); None where rows do not tell kinds apart that count them differently."""
        fitting = [kind for kind, error in errors.items() if error <= self.tolerance]
        if not fitting:
            return min(errors, key=errors.get), ()
        stated = next((kind for kind in fitting if known and kind in known.kinds), None)
        if stated is not None:
            return stated, ()
        first, *rest = fitting
        targets = known and known.targets
        if any(one.shares(kind, targets) != one.shares(first, targets) for one in asked for kind in rest):
            return None, ()
        alike = [
            kind
            for kind in kinds_of_counts(asked[0].inputs)
            if all(one.shares(kind) == one.shares(first) for one in asked)
        ]
        return first, (*rest, *alike)

    def _known(self, inputs: Any, once: float, calls: Sequence[Call]) -> Optional[Divisor]:
        """What ``calls`` divide by, where the loss of ``inputs``, which is ``once``, consists of nothing else."""
        divisor = divisor_of(calls, inputs, len(self.rows))
        if divisor is None:
            return None
        with LossCalls(factor=2.0):
            twice = self.meter.loss(inputs)
        return None if abs(twice - 2 * once) > 1e-6 * abs(once) else divisor

    def _follows(self, inputs: Any, once: float) -> Optional[float]:
        """The loss given twice the count, by ``once``; None where it is given none."""
        if self.meter.num_items is None:
            return None
        return abs(self.meter.loss(inputs, 2 * FEW_ITEMS) / once) if once else 1.0

    # -- padding, and single rows --------------------------------------------------------------------------------------

    def _equal(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.tolerance * max(abs(a), abs(b), 1e-12)

    def _trims(self, together: Any, observed: Observation) -> Optional[bool]:
        """Whether the first row loses nothing by losing its padding, which it has in ``together``; None if there is
        none. ``observed``: of these or other inputs."""
        padded = self._row(together, 0)
        if not self._is_padded(padded):
            return None
        loss = float(observed.parts[0][0]) if observed.inputs is together else self.meter.loss(padded)
        return self._equal(loss, self.meter.loss(self._first_row()))

    def _is_padded(self, row: Any) -> bool:
        return self.batches[self.rows[0][0]].trimmable and _shapes(row) != _shapes(self._first_row())

    def _first_row(self, trim: bool = True) -> Any:
        return take(self.batches, self.rows[:1], self.pad_token_id, trim=trim)

    def of_one(self, reason: str, may_be_cut: bool) -> Reduction:
        """What a single row tells where several cannot be asked: a public function that only divides by the count."""
        kind, name = "rows", None
        try:
            one = self._first_row()
            loss, calls = self.meter.first(one, gradient=False)
            follows = self._follows(one, float(loss))
            if follows is not None and follows < FOLLOWS:
                kind, known = "num_items", replace(self, rows=self.rows[:1])._known(one, float(loss), calls)
                name = known.name if known and known.kind == "sum" else None
        except Exception as error:  # training itself will say why, if it fails there too
            forget_traceback(error)
        mixes = None if name else f"it could not be tested: {reason}"
        return Reduction(kind, self._trims_alone(), mixes, known=name, may_be_cut=may_be_cut or mixes is None)

    def _trims_alone(self) -> Optional[bool]:
        """Whether the first row loses nothing by losing its padding; believed where it does not fit with it."""
        padded = self._first_row(trim=False)
        try:
            if not self._is_padded(padded):
                return None
            return self._equal(self.meter.loss(padded), self.meter.loss(self._first_row()))
        except Exception as error:
            forget_traceback(error)
            return True if is_out_of_memory(error) else False


def _kinds(inputs: Any, shifts: bool, stated: Optional[Targets]) -> list[str]:
    """All that may be, the likelier first."""
    kinds = ["targets"] if stated is not None and stated.kind == "targets" else []
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    if torch.is_tensor(labels) and not labels.is_floating_point() and labels.dim():
        by_labels = ["labels", "shifted_labels"] if labels.dim() >= 2 else ["labels"]
        kinds += reversed(by_labels) if shifts else by_labels
    kinds += ["rows", "sum"]
    if torch.is_tensor(mask) and mask.dim() == 2:
        kinds += ["mask", "shifted_mask"]
    for name, value in inputs.items():
        if name != "labels" and torch.is_tensor(value) and value.dim() == 1 and value.is_floating_point():
            kinds.append(f"{COLUMN}{name}")
    return kinds


def _shapes(inputs: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in inputs.values() if torch.is_tensor(value)]


def mixing_modules(model: nn.Module) -> Optional[str]:
    """Names of the modules through which rows of a batch act on each other in training, as a phrase; None without."""
    names = [name for name, module in model.named_modules() if is_batch_norm(module) and module.training]
    if names:
        return f"{first_few(names)} (BatchNorm)"
    config = getattr(model, "config", None)
    for where, one in (("config", config), ("config.text_config", getattr(config, "text_config", None))):
        if getattr(one, "output_router_logits", False) and getattr(one, "router_aux_loss_coef", 0):
            return f"the router's auxiliary losses ({where}.router_aux_loss_coef)"
    return None


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def batch_norm_statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Running means and variances of BatchNorm, with their names."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False) if is_batch_norm(module) else ():
            if buffer.is_floating_point():
                yield name, buffer
