"""Find out how a loss combines the rows of a batch: known for public functions, by trials for all others.

Splitting a batch is exact if the loss of the whole is a known sum over its rows. Signatures do not show that, because
many forwards accept ``num_items_in_batch`` among their ``**kwargs`` and ignore it. So a few short rows are run together
and one by one in training mode, and every ``Reduction.kind`` is compared with the whole: by value, and by the gradient
of some weights, because near a random start all values are similar. The kind that fits, also with other labels, is the
reduction; a public loss function that was called adds what its arguments say (``known.py``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.figures import first_few
from scu_trainer.train.loss.analysis.asked_rows import (
    batch_in_order,
    cut_to_beginnings,
    rows_for_trial,
    with_other_labels,
)
from scu_trainer.train.loss.analysis.frozen_weights import LOSS_WRITES, ONCE, written_buffer
from scu_trainer.train.loss.analysis.measuring import (
    FEW_ITEMS,
    LossObservation,
    LossOf,
    Meter,
    measured_weights,
    tolerance,
)
from scu_trainer.train.loss.analysis.no_trace import restored_on_exit
from scu_trainer.train.loss.analysis.own_draws import ONCE_PER_BATCH, draws_once
from scu_trainer.train.loss.rows.known import Call, Divisor, LossCalls, divisor_of, left_out_by
from scu_trainer.train.loss.rows.model_loss import embedding_of
from scu_trainer.train.step.batches.reduction import COLUMN, Reduction, Targets, kinds_of_counts
from scu_trainer.train.step.batches.rows import Batch, Row, pick, take
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory, retry_unchanged

HALVED = 0.75
"""Given twice the item count, a loss divided by it halves, or nearly so if one of its terms is not divided by it."""

SAME_SHAPES = 2e-6
"""Maximum relative difference of losses that are computed alike, in any precision; most often they are the same."""


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
    """Return how the loss combines rows; None if these rows do not show it and others should be tried.

    ``num_items``: what the stock loop counted for this window; None if the loss does not take it. ``training``: whether
    to use training mode; in evaluation mode some modules do not mix rows. ``low_precision``: whether autocast will be
    on. ``shifts``: whether the stock loop treats the loss as one over shifted labels; decides between kinds that do not
    differ here. ``seen``: classes of earlier trials. ``owner``: see ``restored_on_exit``. ``most_rows``: 2 if no more
    are known to fit in memory, None for the usual few. ``is_public``: whether no user code takes part, so that
    values suffice.

    Rows are cut and padded as in training, and long ones are cut to their beginnings if the model allows it, because
    all their logits could need more memory than training does.
    """
    rows = rows_for_trial(batches, seen, more=most_rows is None)
    if rows is None:
        return None
    mixing = mixing_modules(model) if training else None
    precision = tolerance(model, low_precision)
    with restored_on_exit(model, owner, training) as written, measured_weights(model) as weights:
        if mixing:  # show what else the loss does, without the modules that are known to mix rows
            for module in filter(is_batch_norm, model.modules()):
                module.eval()
        meter = Meter(loss_of, num_items, model, weights)
        trial = _Trial(meter, precision, batches, rows, pad_token_id, shifts, is_public, owner)
        reduction = _try_beginnings(trial) or _try_rows(trial)
        if reduction and written is not None and written.are_written:
            return replace(reduction, mixes=LOSS_WRITES, may_be_cut=False)
    return replace(reduction, mixes=f"rows affect each other through {mixing}") if mixing and reduction else reduction


def _try_beginnings(trial: _Trial) -> Optional[Reduction]:
    """Try the beginnings of the rows. None if rows are short already, or if their beginnings show nothing."""
    short = cut_to_beginnings(trial.batches, trial.rows, trial.pad_token_id)
    if short is None:
        return None
    try:
        trial = replace(trial, batches=[short], rows=[(0, row) for row in range(short.rows)])
        return retry_unchanged(partial(trial.reduction, trim=True))
    except Exception as error:  # the model may take whole rows only; those are tried next
        forget_traceback(error)
        return None


def _try_rows(trial: _Trial) -> Optional[Reduction]:
    """Try the whole rows, first without their padding; a single row if several cannot be run together."""
    reasons, takes_few = [], True
    for trim in (True, False):
        try:
            reduction = _try_as_many_as_fit(trial, trim)
        except Exception as error:  # a model may fail in any way on such rows, but training must continue
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
    return trial.reduction_of_one_row(reasons[-1], may_be_cut=takes_few)


def _try_as_many_as_fit(trial: _Trial, trim: bool) -> Optional[Reduction]:
    """Try all rows of the trial, twice because an allocation that fails shows nothing about the loss, or only two if
    more do not fit in memory."""
    with CatchOutOfMemory() if len(trial.rows) > 2 else contextlib.nullcontext():
        return retry_unchanged(partial(trial.reduction, trim))
    free_memory()
    return replace(trial, rows=trial.rows[:2]).reduction(trim)


@dataclass
class _Trial:
    """The rows of one trial and how to measure them. Fields as in ``analyze``."""

    meter: Meter
    tolerance: float
    batches: Sequence[Batch]
    rows: Sequence[Row]
    pad_token_id: int
    shifts: bool
    is_public: bool
    owner: Any = None

    def reduction(self, trim: bool) -> Optional[Reduction]:
        """Measure the rows together and one by one, and return how the loss combines them. ``trim``: cut padding."""
        meter, rows = self.meter, len(self.rows)
        together = batch_in_order(self.batches, self.rows, self.pad_token_id, trim)
        other = with_other_labels(together, rows)
        strongest = together if other is None else other
        whole, calls = meter.first(strongest, gradient=not self.is_public)
        known, relative_loss = (
            self._known_divisor(strongest, float(whole[0]), calls),
            self._effect_of_items(strongest, float(whole[0])),
        )
        gradient = not (known and self.is_public)
        if gradient and self.is_public:
            whole = meter.measure(strongest)
        observations = [self._observe(strongest, whole, gradient)]
        reduction = self._reduction_from(observations, known, relative_loss)
        if other is not None and reduction is not None and reduction.known is None:
            observations.insert(0, self._observe(together, meter.measure(together, gradient=False), gradient=False))
            reduction = self._reduction_from(observations, known, relative_loss)
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
        first = observations[0]
        known_loss = float(first.parts[0][0]) if first.inputs is together else None
        trims = self._may_trim(self._row(together, 0), known_loss) if trim else False
        reads_padding = "cutting it changes the loss" if trims is False else None
        left_out = left_out_by(calls, strongest, rows) if reduction.kind == "rows" else ()
        return replace(reduction, trims=trims, reads_padding=reads_padding, left_out_by=left_out)

    def _reduction_from(
        self, observations: list[Optional[LossObservation]], known: Optional[Divisor], relative_loss: Optional[float]
    ) -> Optional[Reduction]:
        """Return the reduction that explains all observations; None if they do not show it."""
        if any(item is None for item in observations):
            return None
        errors = self._errors(observations, known, relative_loss)
        kind, tied = self._decide(errors, observations, known)
        if kind is None:
            return None
        is_exact = errors[kind] <= self.tolerance
        is_known = is_exact and known is not None and kind in known.kinds
        return Reduction(
            kind,
            trims=None,
            mixes=None if is_exact else "the loss of several rows does not follow from the losses of each",
            known=known.name if is_known else None,
            targets=known.targets if known and kind == "targets" else None,
            tied=() if is_known else tied,
        )

    def _observe(self, inputs: Any, whole: torch.Tensor, gradient: bool) -> Optional[LossObservation]:
        """Return the measurements of ``inputs`` together (``whole``) and row by row; None if not finite or all 0."""
        parts = [self.meter.measure(self._row(inputs, row), gradient) for row in range(len(self.rows))]
        values = [float(part[0]) for part in parts]
        if not math.isfinite(whole[0]) or not any((*values, float(whole[0]))) or not any(map(math.isfinite, values)):
            return None
        return LossObservation(inputs, len(self.rows), whole, parts)

    def _row(self, inputs: Any, row: int) -> Any:
        return pick(inputs, torch.tensor([row]), len(self.rows))

    def _errors(
        self, observations: Sequence[LossObservation], known: Optional[Divisor], relative_loss: Optional[float]
    ) -> dict[str, float]:
        """Return, for each kind, how far the whole is from what the kind predicts."""
        if relative_loss is not None and relative_loss < HALVED:
            honoured = 0.0 if abs(2 * relative_loss - 1) <= self.tolerance else math.inf
            return {"num_items": max(honoured, *(item.error("num_items") for item in observations))}
        targets = known and known.targets
        kinds = _kinds(observations[0].inputs, self.shifts, targets)
        return {kind: max(item.error(kind, targets) for item in observations) for kind in kinds}

    def _decide(
        self, errors: dict[str, float], observations: Sequence[LossObservation], known: Optional[Divisor]
    ) -> tuple[Optional[str], tuple[str, ...]]:
        """Return (kind, other kinds that count these rows alike); the closest kind if none fits. The kind is None if
        several fit that count these rows differently."""
        fitting = [kind for kind, error in errors.items() if error <= self.tolerance]
        if not fitting:
            return min(errors, key=errors.get), ()
        stated = next((kind for kind in fitting if known and kind in known.kinds), None)
        if stated is not None:
            return stated, ()
        first, *rest = fitting
        targets = known and known.targets
        if any(item.shares(kind, targets) != item.shares(first, targets) for item in observations for kind in rest):
            return None, ()
        same_shares = [
            kind
            for kind in kinds_of_counts(observations[0].inputs)
            if all(item.shares(kind) == item.shares(first) for item in observations)
        ]
        return first, (*rest, *same_shares)

    def _known_divisor(self, inputs: Any, once: float, calls: Sequence[Call]) -> Optional[Divisor]:
        """Return the divisor of ``calls`` if the loss of ``inputs``, which is ``once``, consists of nothing else."""
        divisor = divisor_of(calls, inputs, len(self.rows))
        if divisor is None:
            return None
        with LossCalls(factor=2.0):
            twice = self.meter.loss(inputs)
        return None if abs(twice - 2 * once) > 1e-6 * abs(once) else divisor

    def _effect_of_items(self, inputs: Any, once: float) -> Optional[float]:
        """Return the loss for twice the item count relative to ``once``; None if the loss takes no count."""
        if self.meter.num_items is None:
            return None
        return abs(self.meter.loss(inputs, 2 * FEW_ITEMS) / once) if once else 1.0

    # -- padding, and single rows --------------------------------------------------------------------------------------

    def _may_trim(self, padded: Any, known_loss: Optional[float] = None) -> Optional[bool]:
        """Return whether the loss of ``padded``, the first row, stays the same without padding; None if it has none.
        ``known_loss``: its loss, if that was measured before: how far it is from that shows how exact losses are."""
        is_trimmable = self.batches[self.rows[0][0]].trimmable
        if not is_trimmable or _shapes(padded) == _shapes(trimmed := self._first_row()):
            return None
        # Every one in any case: with sharded weights, all ranks must run the same forwards.
        loss, without = self.meter.loss(padded), self.meter.loss(trimmed)
        noise = _apart(loss, known_loss) if known_loss is not None else self.tolerance / 25
        other, slope = self._with_other_padding(padded)
        reads = _apart(loss, other) > min(self.tolerance, SAME_SHAPES + 2 * noise) or not slope <= SAME_SHAPES
        return _apart(loss, without) <= self.tolerance and not reads

    def _with_other_padding(self, padded: Any) -> tuple[float, float]:
        """Return the loss of ``padded`` with other embeddings in place of padding, and the largest entry of its
        gradient with respect to them, relative to the largest of all (0 if weights are sharded, because gradients of
        those need all ranks).

        In an untrained model or in half precision, the effect of padding can be as small as the rounding of other
        shapes. These shapes are the same, and the gradient is exactly 0 if nothing reads padding.
        """
        is_padding, embedding = padded["attention_mask"].eq(0), embedding_of(self.meter.model)
        changed: list[torch.Tensor] = []

        def change(module: nn.Module, given: Any, output: Any) -> Any:
            if changed or not torch.is_tensor(output) or output.shape[:2] != is_padding.shape:
                return output  # a decoder's
            other = torch.where(is_padding.unsqueeze(-1).to(output.device), -output[:, :1], output)
            changed.append(other.detach().requires_grad_())
            return changed[0].clone()  # the model may change it in place

        with contextlib.nullcontext() if embedding is None else embedding.register_forward_hook(change):
            measured = self.meter.measure(padded, weights=changed)
        if len(measured) == 1:
            return float(measured), 0.0
        by_place = measured[1:].reshape(changed[0].shape).abs().amax(dim=-1)
        return float(measured[0]), float(by_place[is_padding.cpu()].max() / by_place.max().clamp(min=1e-30))

    def _first_row(self, trim: bool = True) -> Any:
        return take(self.batches, self.rows[:1], self.pad_token_id, trim=trim)

    def reduction_of_one_row(self, reason: str, may_be_cut: bool) -> Reduction:
        """Return what a single row shows if several cannot be run: a public function that only divides by the count."""
        kind, name = "rows", None
        try:
            item = self._first_row()
            loss, calls = self.meter.first(item, gradient=False)
            relative_loss = self._effect_of_items(item, float(loss))
            if relative_loss is not None and relative_loss < HALVED:
                kind, known = "num_items", replace(self, rows=self.rows[:1])._known_divisor(item, float(loss), calls)
                name = known.name if known and known.kind == "sum" else None
        except Exception as error:  # if training fails in the same way, it will report why
            forget_traceback(error)
        mixes = None if name else f"it could not be tested: {reason}"
        return Reduction(kind, self._may_trim_first_row(), mixes, known=name, may_be_cut=may_be_cut or mixes is None)

    def _may_trim_first_row(self) -> Optional[bool]:
        """Return whether the first row's loss stays the same without padding; True if it only fits without padding."""
        padded = self._first_row(trim=False)
        try:
            return self._may_trim(padded)
        except Exception as error:
            forget_traceback(error)
            return True if is_out_of_memory(error) else False


def _apart(one: float, other: float) -> float:
    """Return the relative difference of two losses."""
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def _kinds(inputs: Any, shifts: bool, stated: Optional[Targets]) -> list[str]:
    """Return all possible kinds, the likelier ones first."""
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
    """Name, as a phrase, the modules through which rows affect each other in training; None if there are none."""
    names = [name for name, module in model.named_modules() if is_batch_norm(module) and module.training]
    if names:
        return f"{first_few(names)} (BatchNorm)"
    config = getattr(model, "config", None)
    for where, item in (("config", config), ("config.text_config", getattr(config, "text_config", None))):
        if getattr(item, "output_router_logits", False) and getattr(item, "router_aux_loss_coef", 0):
            return f"the router's auxiliary losses ({where}.router_aux_loss_coef)"
    return None


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def batch_norm_statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of BatchNorm's running means and variances."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False) if is_batch_norm(module) else ():
            if buffer.is_floating_point():
                yield name, buffer
