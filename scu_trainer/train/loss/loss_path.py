"""Compute the loss of a training forward pass and, in the same pass, the loss of each row.

    causal language models   the loss is replaced by an equal one that also gives the rows' losses ("opened"), or is
                             computed without materializing the logits ("headless"), see ``model_loss.py``
    all other models         compute their loss themselves; the rows' losses are read from their outputs
                             (``row_readings.py``)

Rows with a non-finite loss are removed from the batch, which then runs again without them. Where weights are sharded
over ranks, the step is skipped instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.errors import ControlError, SettingsError
from scu_trainer.train.loss.agreement import agrees_headless, agrees_padding_free, scales_with_row_weights
from scu_trainer.train.loss.analysis import mixing_modules, restored_on_exit
from scu_trainer.train.loss.analysis.measuring import tolerance_of
from scu_trainer.train.loss.rows.known import LossCalls
from scu_trainer.train.loss.rows.model_loss import (
    has_causal_loss,
    head_of,
    headless,
    obstacle_to_headless,
    obstacle_to_padding_free,
    opened,
    sliding_window_of,
    user_forward_of,
    user_loss_above,
    user_loss_below,
)
from scu_trainer.train.loss.rows.padding_free import EndToEnd, end_to_end
from scu_trainer.train.loss.rows.row_readings import (
    CAUSAL,
    RowLosses,
    RowLossReading,
    find_reading,
    logits_of,
    with_wrong_labels,
)
from scu_trainer.train.step.batches.rows import pick
from scu_trainer.train.step.distributed.sharded import needs_all_ranks
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

LARGE_VOCABULARY = 16_384
"""Vocabulary size from which the logits, and not the model, decide how much memory a step needs."""


Forward = tuple[torch.Tensor, Optional[RowLosses]]
"""(loss, losses of the rows, or None if they are unknown)"""


class LossPath:
    """Compute the training loss of one trainer.

    ``rows``: the ``CurriculumLoop`` that receives the losses of rows, or None. ``chunked`` ("always", "never" or
    "auto") and ``padding_free`` (True, False, or None for "wherever possible") are fields of ``MemorySettings``.
    ``kind``: see ``_choose_kind``; None until it is chosen. ``has_trained_rows``: whether any row was trained on since
    a caller set it to False. ``was_asked``: whether ``loss`` was called at all. ``is_padding_free``: whether the model
    sees rows end to end; None until that is decided. ``is_planned``: whether the current micro-batch was planned to run
    end to end; ``wants_few_sizes``: whether it is then filled up to one of a few sizes; ``token_cap``: its maximum
    number of tokens, if a caller set one. ``end_to_end``: the rows that were last laid out end to end.
    """

    def __init__(self, trainer: Trainer, chunked: str, padding_free: Optional[bool] = False) -> None:
        self.trainer, self.rows = trainer, trainer.curriculum
        self.reading: Optional[RowLossReading] = None
        self.has_trained_rows = self.was_asked = self._bypasses_model_loss = False
        self._has_reading = False
        self.kind: Optional[str] = None
        self._wanted_chunked, self._wanted_padding_free = chunked, padding_free
        self.is_padding_free: Optional[bool] = None
        self._retried_settings: set[str] = set()  # settings, each with its own check
        self.is_planned = self.wants_few_sizes = False
        self.token_cap: Optional[int] = None
        self.end_to_end: Optional[EndToEnd] = None
        # On a GPU the gradients that flow back into a shared prefix are summed in no fixed order.
        self._shares_prefixes: Optional[bool] = None if trainer.args.device.type == "cpu" else False
        self._is_recording = True
        self._held: Optional[list[tuple[torch.Tensor, Optional[RowLosses]]]] = None

    def unrecorded(self) -> contextlib.AbstractContextManager[None]:
        """Neither report nor weight the losses of rows inside this context."""
        return replaced(self, "_is_recording", False)

    def inputs_for_model(self, inputs: Any) -> Any:
        """Return the batch without our own columns, as the model should see it."""
        return inputs if self.rows is None else without_sample_index(inputs)

    def choose(self, inputs: Callable[[], Any]) -> None:
        """Choose ``kind`` unless that is done. ``inputs``: a function that returns a batch on the model's device."""
        if self.kind is None:
            self._choose_kind(inputs())

    def can_run_padding_free(self, inputs: Callable[[], Any], longest_row: int) -> bool:
        """Return whether rows of up to ``longest_row`` tokens run end to end. ``inputs``: as in ``choose``."""
        if self.is_padding_free is None:
            self.is_padding_free = self._may_be_padding_free(self.inputs_for_model(inputs()))
        return bool(self.is_padding_free) and (self._max_row_tokens is None or longest_row <= self._max_row_tokens)

    @functools.cached_property
    def _max_row_tokens(self) -> Optional[int]:
        """Rows that are longer than a sliding window cannot run end to end."""
        return sliding_window_of(self.trainer.model)

    def stay_padded(self, reason: Optional[str] = None) -> None:
        """Pad rows from here on, also in runs that resume from here."""
        self.is_padding_free = False
        if reason is not None:
            logger.warning("padding_free is not used from now on: %s", reason)

    def _unrecorded_loss(self, model, inputs, num_items) -> torch.Tensor:
        inputs = self.inputs_for_model(inputs)
        with self._loss_context(self.kind, inputs, None, lambda losses: None):
            return self.trainer._stock_loss(model, inputs, False, num_items)

    def _loss_context(self, kind: Optional[str], inputs: Any, weights, seen) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model's own forward computes the loss as ``kind`` says. ``weights``: of the
        rows. ``seen``: called with the losses of the rows."""
        model = self.trainer.model
        rows = self._end_to_end(inputs) if self.is_padding_free else None
        self.end_to_end = rows or self.end_to_end
        if kind == "headless":
            return headless(model, weights, seen, rows)
        if rows is not None or (kind == "opened" and self._is_recording):
            return opened(model, weights, seen, rows)
        return contextlib.nullcontext()

    def _end_to_end(self, inputs: Any) -> Optional[EndToEnd]:
        known = self._shares_prefixes
        # Audits switch randomness off, so they would not show that rows need random numbers of their own.
        may_share = self.is_planned and known is not False if self._is_recording else known is True
        few_sizes = self.is_planned and self.wants_few_sizes
        rows = end_to_end(inputs, self._max_row_tokens, may_share, few_sizes, self.token_cap)
        if rows is None or rows.prefixes is None or known:
            return rows
        self._shares_prefixes = self._may_share_prefixes(inputs)
        return end_to_end(inputs, self._max_row_tokens, self._shares_prefixes is True, few_sizes, self.token_cap)

    def _may_share_prefixes(self, inputs: Any) -> Optional[bool]:
        """Return whether rows may share prefixes; None if this batch cannot show it because its loss is not finite."""
        owner = user_loss_above(self.trainer) if self._wanted_padding_free is None else None
        if owner:
            reason = "may use what the layers compute; set padding_free: true if not"
            found, obstacle = False, f"compute_loss of {owner} {reason}"
        else:
            found, obstacle = agrees_padding_free(self.trainer, inputs, shares_prefixes=True)
        if found:
            logger.info("a prefix that rows share goes through the layers once")
        elif obstacle:
            logger.info("prefixes that rows share go through the layers once per row: %s", obstacle)
        return found

    def loss(self, model: torch.nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        """Return the training loss of a batch, without rows of non-finite loss, and report the losses of its rows."""
        self.was_asked = True
        if not self._is_recording:
            return self._unrecorded_loss(model, inputs, num_items)
        if self.rows is None:
            return self._forward(model, inputs, num_items, None)[0]
        ids, inputs = inputs.get(SAMPLE_INDEX), without_sample_index(inputs)
        if ids is None:
            raise ControlError("a batch has no sample_index, so it does not come from this trainer's own data loader")
        if self._held is not None:
            loss, losses = self._forward(model, inputs, num_items, ids)
            self._held.append((ids, losses))
            return loss
        restore_buffers = self._snapshot_buffers()
        loss, losses = self._forward(model, inputs, num_items, ids)
        if losses is not None and not _are_finite([losses]):
            bad = ~torch.isfinite(losses.sums)
            if needs_all_ranks(self.trainer):
                return self._leave_to_guard(ids, bad, loss)
            restore_buffers()
            return self._rerun_without(inputs, num_items, ids, bad)
        self._report_rows(ids, losses)
        return loss

    def _report_rows(self, ids: torch.Tensor, losses: Optional[RowLosses]) -> None:
        self.rows.see(ids, losses)
        self.has_trained_rows = True

    # -- many micro-batches with a single wait for the device

    def hold(self) -> None:
        """Until ``settle``, neither check nor report losses of rows, provided that it is known how to read them."""
        self._held = [] if self.rows is not None and self._has_reading else None

    def settle(self) -> bool:
        """Report all held losses if they are finite, and return whether they are. If not, their micro-batches must run
        again without ``hold``; that sets the non-finite rows aside."""
        held, self._held = self._held or [], None
        losses = [losses for _, losses in held if losses is not None]
        if not second_try(lambda: _are_finite(losses), "checking whether the losses of rows are finite"):
            return False
        for ids, found in held:
            self._report_rows(ids, found)
        return True

    def _forward(self, model, inputs, num_items, ids: Optional[torch.Tensor]) -> Forward:
        kind = self.kind or self._choose_kind(inputs)
        if kind == "returned":
            if self.rows is None:
                return self._unrecorded_loss(model, inputs, num_items), None
            return self._loss_from_outputs(model, inputs, num_items, ids)
        seen: list[RowLosses] = []
        weights = None if ids is None else self.rows.weights_of(ids, CAUSAL)
        with self._loss_context(kind, inputs, weights, seen.append):
            loss = self.trainer._stock_loss(model, inputs, False, num_items)
        if self.rows is not None and not seen and not self._bypasses_model_loss:
            self._bypasses_model_loss = True
            self.rows.set_row_loss_reading(None)  # the user's code uses another loss than the model's own
        return loss, seen[-1] if seen else None

    # -- losses that the model returns ---------------------------------------------------------------------------------

    def _loss_from_outputs(self, model, inputs, num_items, ids) -> Forward:
        """Return the model's own loss, with the weights of rows if any, and its rows' losses, read from its outputs."""
        labels = inputs.get("labels")
        seen = LossCalls()
        with contextlib.nullcontext() if self._has_reading or self.trainer.args.torch_compile else seen:
            given = type(inputs)(inputs)  # a copy, because labels may be popped from it
            loss, outputs = _require_pair(self.trainer, self.trainer._stock_loss(model, given, True, num_items))
        if not self._has_reading:
            self.reading = self._find_reading(outputs, labels, loss, num_items, seen.calls)
            may_fit_by_chance = not seen.calls and self._may_fit_by_chance(labels, outputs)
            shows_reading, needs_check = self._combine_over_ranks(bool(torch.isfinite(loss)), may_fit_by_chance)
            if shows_reading:  # otherwise this batch only shows which of its rows must be set aside
                # If one rank asks, all ranks do, including those that learn nothing from their own batch.
                fits = not needs_check or self._fits_other_labels(inputs, outputs, num_items)
                if may_fit_by_chance and not fits:
                    self.reading = replace(self.reading, exact=False)
                if self.reading is not None and loss.requires_grad:
                    self.reading = self.reading.with_gradient_of(outputs)
                self._has_reading = True
                self.rows.set_row_loss_reading(self.reading)
        if self.reading is None:
            return loss, None
        losses, weights = self.reading.rows(outputs, labels), self.rows.weights_of(ids, self.reading)
        if weights is not None:
            # The model's loss is the sum over its rows times one factor, whatever it is divided by.
            total = losses.sums.sum()
            factor = torch.where(total == 0, 0.0, loss.detach() / total)  # 0 / 0 if there is nothing to learn
            loss = factor * (weights * self.reading.sums_with_gradient(outputs, labels)).sum()
        return loss, losses

    def _find_reading(self, outputs, labels, loss, num_items, calls) -> Optional[RowLossReading]:
        trainer = self.trainer
        return find_reading(
            outputs,
            labels,
            float(loss.detach()),
            num_items,
            trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1,
            shifts=trainer._loss_shifts_labels,
            rough=tolerance_of(trainer),
            is_changed=trainer.compute_loss_func is not None or trainer.label_smoother is not None,
            calls=calls,
        )

    def _may_fit_by_chance(self, labels: Any, outputs: Any) -> bool:
        """Return whether the reading may fit one batch by chance, as with class weights or a loss of similar size."""
        if self.reading is None or not self.reading.exact or self.reading.kind == "own":
            return False
        return torch.is_tensor(labels) and not labels.is_floating_point() and logits_of(outputs) is not None

    def _combine_over_ranks(self, shows_reading: bool, needs_check: bool) -> tuple[bool, bool]:
        """Combine over ranks whether the first batch shows the reading and whether to check it with other labels. Only
        if a forward pass needs all ranks; otherwise the arguments are returned unchanged."""
        if not needs_all_ranks(self.trainer):
            return shows_reading, needs_check
        found = gather_object([(shows_reading, needs_check)])
        return all(shown for shown, _ in found), any(needed for _, needed in found)

    def _fits_other_labels(self, inputs, outputs, num_items) -> bool:
        labels, logits, changed = inputs.get("labels"), logits_of(outputs), {}
        if self._may_fit_by_chance(labels, outputs):
            changed = {"labels": with_wrong_labels(labels, logits.size(-1))}
        other = type(inputs)({**inputs, **changed})
        model = self.trainer.model  # not the DDP wrapper: the other ranks do not run this forward
        with restored_on_exit(model, self.trainer, training=True), torch.no_grad():
            loss, again = self.trainer._stock_loss(model, type(inputs)(other), True, num_items)
            return self._find_reading(again, other.get("labels"), loss, num_items, ()) == self.reading

    # -- rows with a non-finite loss

    @functools.cached_property
    def _rows_mix(self) -> bool:
        return mixing_modules(self.trainer.model) is not None

    def _snapshot_buffers(self) -> Callable[[], None]:
        """Return a function that restores the BatchNorm statistics that a batch with a bad row has corrupted."""
        model = self.trainer.model
        kept = {name: b.clone() for name, b in model.named_buffers()} if self._rows_mix else {}

        @torch.no_grad()
        def restore() -> None:
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

        return restore

    def _leave_to_guard(self, ids: torch.Tensor, bad: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss unchanged, so that the non-finite guard skips the step on all ranks. A forward pass without
        the bad rows would need the other ranks. Raises ControlError if there is no guard."""
        if self.trainer.nonfinite_guard is None:
            samples = ", ".join(map(str, ids[bad].tolist()))
            raise ControlError(
                f"the loss of sample {samples} is not a finite number, and under FSDP or ZeRO-3 a single rank cannot "
                "run again without it; remove it from the data, or pass safety=SafetySettings(), which skips the step"
            )
        if not (self._rows_mix and bool(bad.all())):  # else one row may have spoilt all: finding it needs a pass
            self.rows.quarantine(ids[bad])
        return loss

    def _rerun_without(self, inputs, num_items, ids, bad: torch.Tensor) -> torch.Tensor:
        """Quarantine the rows with a non-finite loss and return the loss of the others."""
        model = self.trainer.model  # not the DDP wrapper: the other ranks do not run this forward
        if self._rows_mix:
            bad = self._find_bad_rows(model, inputs, num_items, bad)
        if bool(bad.all()) and self.trainer.nonfinite_guard is not None:
            self.trainer.nonfinite_guard.require_finite_weights()  # otherwise the weights are bad, not the rows
        self.rows.quarantine(ids[bad])
        good = (~bad).nonzero().flatten()
        if len(good):
            kept = pick(type(inputs)({**inputs, SAMPLE_INDEX: ids}), good, len(ids))
            return self.loss(model, kept, num_items)
        return zero_loss(model, ids.device)

    def _find_bad_rows(self, model, inputs, num_items, bad: torch.Tensor) -> torch.Tensor:
        """Find the bad rows where rows affect each other, by a forward pass without batch statistics."""
        labels = inputs.get("labels")
        with restored_on_exit(model, self.trainer), torch.no_grad():
            _, outputs = self.trainer._stock_loss(model, type(inputs)(inputs), True, num_items)
            alone = ~torch.isfinite(self.reading.rows(outputs, labels).sums)
        return alone if bool(alone.any()) else bad

    # -- how the loss is computed --------------------------------------------------------------------------------------

    def _choose_kind(self, inputs: Any) -> str:
        """Return "headless", "opened" or "returned"; not final while the first batches do not show which."""
        may_go_headless = self._may_go_headless(inputs)
        if may_go_headless:
            kind = "headless"
        else:
            kind = "opened" if self.rows is not None and self._may_be_opened(inputs) else "returned"
        if may_go_headless is not None:
            self.kind = kind
            if kind != "returned" and self.rows is not None:
                self.reading, self._has_reading = CAUSAL, True
                self.rows.set_row_loss_reading(CAUSAL)
        return kind

    def _may_be_opened(self, inputs: Any) -> bool:
        """Return whether the loss is the model's own, and scales with row weights if user code computes with it."""
        if not has_causal_loss(self.trainer):
            return False
        return self._user_code is None or scales_with_row_weights(self.trainer, self.inputs_for_model(inputs))

    @property
    def _user_code(self) -> Optional[str]:
        """Name the user code, if any, that gets the model's outputs and may use more of them than the loss."""
        return user_loss_below(self.trainer) or user_forward_of(self.trainer.model)

    def _may_go_headless(self, inputs: Any) -> Optional[bool]:
        """Return whether the loss can be computed without materialized logits; None if this batch cannot show it."""
        if self._wanted_chunked == "never":
            return False
        obstacle = obstacle_to_headless(self.trainer)
        if self._wanted_chunked == "auto" and (obstacle or head_of(self.trainer.model).out_features < LARGE_VOCABULARY):
            return False
        owner = self._user_code
        if self._wanted_chunked == "auto" and owner:
            obstacle = (
                f"{owner} computes the loss in its own code, which may use more than the loss of the model; set "
                "chunked_loss: always if it does not"
            )
        instead = "use chunked_loss: auto or never" if self._wanted_chunked == "always" else None
        return self._check_agreement("chunked_loss: always", instead, obstacle, inputs, agrees_headless)

    def _may_be_padding_free(self, inputs: Any) -> Optional[bool]:
        """Return whether rows can go through the layers end to end; None if this batch cannot show it."""
        wanted = self._wanted_padding_free
        if wanted is False:
            return False
        obstacle = obstacle_to_padding_free(self.trainer)
        if wanted is None and (obstacle or self._user_code):
            return False
        instead = "leave padding_free out, or false" if wanted else None
        found = self._check_agreement("padding_free: true", instead, obstacle, inputs, agrees_padding_free)
        if found:
            logger.info("rows go through the layers end to end, without padding")
        return found

    def _check_agreement(
        self, setting: str, instead: Optional[str], obstacle: Optional[str], inputs: Any, agrees: Callable
    ) -> Optional[bool]:
        """Return whether the loss computed this way equals the stock loss; None to check again with the next batch.

        ``obstacle``: why it cannot be used at all, if known. ``instead``: what to set instead, if the user's
        ``setting`` insists on it; then an obstacle raises SettingsError.
        """
        found = None
        if not obstacle:
            found, obstacle = agrees(self.trainer, inputs)
        if obstacle and found is None and not instead and setting not in self._retried_settings:
            self._retried_settings.add(setting)
            return None
        if obstacle and instead:
            raise SettingsError(f"{setting}, but {obstacle}; {instead}")
        if obstacle:
            logger.warning("%s is not used: %s", setting.partition(":")[0], obstacle)
            return False
        return found


def zero_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """Return a zero loss on ``device``. Every trained weight gets a zero gradient, because all ranks wait for it."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(((p.sum() * 0.0).to(device) for p in trained), torch.zeros((), device=device))


def _are_finite(losses: Sequence[RowLosses]) -> bool:
    """Return whether every row's loss is finite. Waits for the device once."""
    sums = [losses_of_batch.sums for losses_of_batch in losses]
    found = (sums[0] if len(sums) == 1 else torch.cat(sums)).tolist() if sums else []
    return all(map(math.isfinite, found))


def _require_pair(trainer: Trainer, found: Any) -> tuple[torch.Tensor, Any]:
    """Return (loss, outputs) as ``compute_loss`` gave them. Raises ControlError if it did not return both."""
    if isinstance(found, tuple) and len(found) == 2:
        return found
    raise ControlError(
        f"compute_loss of {user_loss_below(trainer)} returns a {type(found).__name__} when return_outputs is True, "
        "but a curriculum reads the losses of rows from the outputs; return (loss, outputs) then, or drop the "
        "curriculum"
    )


def without_sample_index(inputs: Any) -> Any:
    return type(inputs)({name: value for name, value in inputs.items() if name != SAMPLE_INDEX})
