"""The loss of a training forward, and in the same forward the loss of each of its rows.

    causal language models   their loss is opened, or taken without their output head (``model_loss.py``)
    all others               compute their loss themselves; the rows' losses are read from what they return
                             (``row_readings.py``)

Rows whose loss is not finite are taken out of the batch, which then runs again without them; where weights are sharded
over ranks the step is skipped instead.
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
from scu_trainer.train.loss.agreement import agrees_headless, agrees_padding_free, follows_row_weights
from scu_trainer.train.loss.analysis import mixing_modules, untouched
from scu_trainer.train.loss.analysis.measuring import tolerance_of
from scu_trainer.train.loss.rows.known import LossCalls
from scu_trainer.train.loss.rows.model_loss import (
    has_causal_loss,
    head_of,
    headless,
    obstacle_to_headless,
    obstacle_to_padding_free,
    opened,
    own_forward_of,
    own_loss_above,
    own_loss_between,
    sliding_window_of,
)
from scu_trainer.train.loss.rows.padding_free import EndToEnd, end_to_end
from scu_trainer.train.loss.rows.row_readings import (
    CAUSAL,
    RowLosses,
    RowLossReading,
    find_reading,
    logits_of,
    with_labels_of_others,
)
from scu_trainer.train.step.batches.rows import pick
from scu_trainer.train.step.distributed.sharded import needs_all_ranks
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

LARGE_VOCABULARY = 16_384
"""Words from which on the logits, not the model, decide how much memory a step takes."""


Forward = tuple[torch.Tensor, Optional[RowLosses]]
"""(loss, losses of the rows if they are known)"""


class LossPath:
    """The training loss of one trainer. ``rows``: a ``CurriculumLoop``; None where nobody asks for the losses of rows.

    ``chunked``: "always", "never" or "auto", ``padding_free``: True, False or None for where it can be done (both of
    ``MemorySettings``). ``kind``: see ``_choose``, None before that. ``has_learned``: whether any row was not set aside
    since somebody has set it to False. ``was_asked``: whether the training loss has come this way at all.
    ``is_padding_free``: whether the model sees rows end to end, None while that is not decided. ``is_planned``: whether
    the micro-batch at hand was planned so, ``wants_few_sizes`` whether it then gets one of few sizes, and ``token_cap``
    the most tokens of it where somebody has set that. ``end_to_end``: the last rows that were laid out.
    """

    def __init__(self, trainer: Trainer, chunked: str, padding_free: Optional[bool] = False) -> None:
        self.trainer, self.rows = trainer, trainer.curriculum
        self.reading: Optional[RowLossReading] = None
        self.has_learned = self.was_asked = self._is_past = False
        self._has_reading = False
        self.kind: Optional[str] = None
        self._wanted, self._wanted_padding_free = chunked, padding_free
        self.is_padding_free: Optional[bool] = None
        self._asked_again: set[str] = set()  # settings, each for a question of its own
        self.is_planned = self.wants_few_sizes = False
        self.token_cap: Optional[int] = None
        self.end_to_end: Optional[EndToEnd] = None
        # On a card the sum of what comes back to a shared prefix has no fixed order.
        self._shares_prefixes: Optional[bool] = None if trainer.args.device.type == "cpu" else False
        self._records = True
        self._held: Optional[list[tuple[torch.Tensor, Optional[RowLosses]]]] = None

    def unrecorded(self) -> contextlib.AbstractContextManager[None]:
        """Inside, losses of rows are neither kept nor weighed."""
        return replaced(self, "_records", False)

    def for_model(self, inputs: Any) -> Any:
        """What the model is to see of a batch."""
        return inputs if self.rows is None else without_index(inputs)

    def choose(self, inputs: Callable[[], Any]) -> None:
        """Decide which way the loss takes, where that is not known. ``inputs``: give a batch on the model's device."""
        if self.kind is None:
            self._choose(inputs())

    def goes_padding_free(self, inputs: Callable[[], Any], longest_row: int) -> bool:
        """Whether the model sees rows of up to ``longest_row`` tokens end to end. ``inputs``: as of ``choose``."""
        if self.is_padding_free is None:
            self.is_padding_free = self._may_be_padding_free(self.for_model(inputs()))
        return bool(self.is_padding_free) and (self._most_tokens is None or longest_row <= self._most_tokens)

    @functools.cached_property
    def _most_tokens(self) -> Optional[int]:
        return sliding_window_of(self.trainer.model)

    def stay_padded(self, reason: Optional[str] = None) -> None:
        """From here on, and in runs that go on from here."""
        self.is_padding_free = False
        if reason is not None:
            logger.warning("padding_free is not used from now on: %s", reason)

    def _unrecorded_loss(self, model, inputs, num_items) -> torch.Tensor:
        inputs = self.for_model(inputs)
        with self._way(self.kind, inputs, None, lambda losses: None):
            return self.trainer._stock_loss(model, inputs, False, num_items)

    def _way(self, kind: Optional[str], inputs: Any, weights, seen) -> contextlib.AbstractContextManager[None]:
        """In which the model's own forward takes the loss the chosen way. ``weights``: of the rows."""
        model = self.trainer.model
        rows = self._end_to_end(inputs) if self.is_padding_free else None
        self.end_to_end = rows or self.end_to_end
        if kind == "headless":
            return headless(model, weights, seen, rows)
        if rows is not None or (kind == "opened" and self._records):
            return opened(model, weights, seen, rows)
        return contextlib.nullcontext()

    def _end_to_end(self, inputs: Any) -> Optional[EndToEnd]:
        known = self._shares_prefixes
        # Audits take the noise out, so in one it would not show that rows need random numbers of their own.
        may_share = self.is_planned and known is not False if self._records else known is True
        few_sizes = self.is_planned and self.wants_few_sizes
        rows = end_to_end(inputs, self._most_tokens, may_share, few_sizes, self.token_cap)
        if rows is None or rows.prefixes is None or known:
            return rows
        self._shares_prefixes = self._may_share_prefixes(inputs)
        return end_to_end(inputs, self._most_tokens, self._shares_prefixes is True, few_sizes, self.token_cap)

    def _may_share_prefixes(self, inputs: Any) -> Optional[bool]:
        """None where this model does not tell: its loss is not finite now."""
        owner = own_loss_above(self.trainer) if self._wanted_padding_free is None else None
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
        self.was_asked = True
        if not self._records:
            return self._unrecorded_loss(model, inputs, num_items)
        if self.rows is None:
            return self._forward(model, inputs, num_items, None)[0]
        ids, inputs = inputs.get(SAMPLE_INDEX), without_index(inputs)
        if ids is None:
            raise ControlError("a batch came without sample_index: it is not from this trainer's own data loader")
        if self._held is not None:
            loss, losses = self._forward(model, inputs, num_items, ids)
            self._held.append((ids, losses))
            return loss
        put_back_statistics = self._statistics()
        loss, losses = self._forward(model, inputs, num_items, ids)
        if losses is not None and not _are_finite([losses]):
            bad = ~torch.isfinite(losses.sums)
            if needs_all_ranks(self.trainer):
                return self._left_to_guard(ids, bad, loss)
            put_back_statistics()
            return self._without(inputs, num_items, ids, bad)
        self._see(ids, losses)
        return loss

    def _see(self, ids: torch.Tensor, losses: Optional[RowLosses]) -> None:
        self.rows.see(ids, losses)
        self.has_learned = True

    # -- many micro-batches at one wait for the device

    def hold(self) -> None:
        """Until ``settle``, losses of rows are neither checked nor reported, if it is known how they are read."""
        self._held = [] if self.rows is not None and self._has_reading else None

    def settle(self) -> bool:
        """Whether all losses that were held are finite; only then they are reported. Else their micro-batches must run
        again, without ``hold``: the rows that are not finite are set aside then."""
        held, self._held = self._held or [], None
        losses = [losses for _, losses in held if losses is not None]
        if not second_try(lambda: _are_finite(losses), "checking whether the losses of rows are finite"):
            return False
        for ids, found in held:
            self._see(ids, found)
        return True

    def _forward(self, model, inputs, num_items, ids: Optional[torch.Tensor]) -> Forward:
        kind = self.kind or self._choose(inputs)
        if kind == "returned":
            if self.rows is None:
                return self._unrecorded_loss(model, inputs, num_items), None
            return self._returned(model, inputs, num_items, ids)
        seen: list[RowLosses] = []
        weights = None if ids is None else self.rows.weights_of(ids, CAUSAL)
        with self._way(kind, inputs, weights, seen.append):
            loss = self.trainer._stock_loss(model, inputs, False, num_items)
        if self.rows is not None and not seen and not self._is_past:
            self._is_past = True
            self.rows.found(None)  # somebody takes another loss than the model's own
        return loss, seen[-1] if seen else None

    # -- losses that the model returns ---------------------------------------------------------------------------------

    def _returned(self, model, inputs, num_items, ids) -> Forward:
        labels = inputs.get("labels")
        seen = LossCalls()
        with contextlib.nullcontext() if self._has_reading or self.trainer.args.torch_compile else seen:
            given = type(inputs)(inputs)  # labels may be taken out of it
            loss, outputs = _pair(self.trainer, self.trainer._stock_loss(model, given, True, num_items))
        if not self._has_reading:
            self.reading = self._read(outputs, labels, loss, num_items, seen.calls)
            may_fit_by_chance = not seen.calls and self._may_fit_by_chance(labels, outputs)
            tells, asks = self._agreed(bool(torch.isfinite(loss)), may_fit_by_chance)
            if tells:  # else this batch tells nothing, but which of its rows are to be set aside
                # Where one rank asks all do, also those to whose own batch it says nothing.
                fits = not asks or self._fits_other_labels(inputs, outputs, num_items)
                if may_fit_by_chance and not fits:
                    self.reading = replace(self.reading, exact=False)
                if self.reading is not None and loss.requires_grad:
                    self.reading = self.reading.seen_in(outputs)
                self._has_reading = True
                self.rows.found(self.reading)
        if self.reading is None:
            return loss, None
        losses, weights = self.reading.rows(outputs, labels), self.rows.weights_of(ids, self.reading)
        if weights is not None:
            # The model's loss is its rows' sum times one factor, whatever it is divided by.
            total = losses.sums.sum()
            factor = torch.where(total == 0, 0.0, loss.detach() / total)  # nothing left to learn: 0 / 0
            loss = factor * (weights * self.reading.sums_with_gradient(outputs, labels)).sum()
        return loss, losses

    def _read(self, outputs, labels, loss, num_items, calls) -> Optional[RowLossReading]:
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
        """A weight of a class, or another loss that is about as large, fits one batch by chance."""
        if self.reading is None or not self.reading.exact or self.reading.kind == "own":
            return False
        return torch.is_tensor(labels) and not labels.is_floating_point() and logits_of(outputs) is not None

    def _agreed(self, tells: bool, asks: bool) -> tuple[bool, bool]:
        """Whether a first batch tells, and is asked about; of all ranks where a forward pass needs them all."""
        if not needs_all_ranks(self.trainer):
            return tells, asks
        found = gather_object([(tells, asks)])
        return all(told for told, _ in found), any(asked for _, asked in found)

    def _fits_other_labels(self, inputs, outputs, num_items) -> bool:
        labels, logits, changed = inputs.get("labels"), logits_of(outputs), {}
        if self._may_fit_by_chance(labels, outputs):
            changed = {"labels": with_labels_of_others(labels, logits.size(-1))}
        other = type(inputs)({**inputs, **changed})
        model = self.trainer.model  # not DDP's: a forward that other ranks do not run must not speak to them
        with untouched(model, self.trainer, training=True), torch.no_grad():
            loss, again = self.trainer._stock_loss(model, type(inputs)(other), True, num_items)
            return self._read(again, other.get("labels"), loss, num_items, ()) == self.reading

    # -- rows without a finite loss

    @functools.cached_property
    def _rows_mix(self) -> bool:
        return mixing_modules(self.trainer.model) is not None

    def _statistics(self) -> Callable[[], None]:
        """What puts running statistics back that a batch with a bad row has spoilt; only BatchNorm has such."""
        model = self.trainer.model
        kept = {name: b.clone() for name, b in model.named_buffers()} if self._rows_mix else {}

        @torch.no_grad()
        def put_back() -> None:
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

        return put_back

    def _left_to_guard(self, ids: torch.Tensor, bad: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is: for a forward pass without the bad rows the other ranks would have to take part. The
        non-finite guard skips the step on all of them. Raises ControlError where there is none."""
        if self.trainer.nonfinite_guard is None:
            samples = ", ".join(map(str, ids[bad].tolist()))
            raise ControlError(
                f"the loss of sample {samples} is not a finite number, and under FSDP or ZeRO-3 one rank cannot run "
                "again without it; remove it from the data, or pass safety=SafetySettings(), which skips the step"
            )
        if not (self._rows_mix and bool(bad.all())):  # else one may have spoilt all: which it is needs a pass, too
            self.rows.quarantine(ids[bad])
        return loss

    def _without(self, inputs, num_items, ids, bad: torch.Tensor) -> torch.Tensor:
        """The loss of the rows whose loss is a number; the others are set aside, and said."""
        model = self.trainer.model  # not DDP's: a forward that other ranks do not run must not speak to them
        if self._rows_mix:
            bad = self._bad_alone(model, inputs, num_items, bad)
        if bool(bad.all()) and self.trainer.nonfinite_guard is not None:
            self.trainer.nonfinite_guard.require_finite_weights()  # else it is not the rows that are bad
        self.rows.quarantine(ids[bad])
        good = (~bad).nonzero().flatten()
        if len(good):
            kept = pick(type(inputs)({**inputs, SAMPLE_INDEX: ids}), good, len(ids))
            return self.loss(model, kept, num_items)
        return zero_loss(model, ids.device)

    def _bad_alone(self, model, inputs, num_items, bad: torch.Tensor) -> torch.Tensor:
        """Where rows act on each other one of them spoils all: which it is shows without batch statistics."""
        labels = inputs.get("labels")
        with untouched(model, self.trainer), torch.no_grad():
            _, outputs = self.trainer._stock_loss(model, type(inputs)(inputs), True, num_items)
            alone = ~torch.isfinite(self.reading.rows(outputs, labels).sums)
        return alone if bool(alone.any()) else bad

    # -- which way -----------------------------------------------------------------------------------------------------

    def _choose(self, inputs: Any) -> str:
        """ "headless", "opened" or "returned"; asked again while the first rows do not tell."""
        may_go_headless = self._may_go_headless(inputs)
        if may_go_headless:
            kind = "headless"
        else:
            kind = "opened" if self.rows is not None and self._may_be_opened(inputs) else "returned"
        if may_go_headless is not None:
            self.kind = kind
            if kind != "returned" and self.rows is not None:
                self.reading, self._has_reading = CAUSAL, True
                self.rows.found(CAUSAL)
        return kind

    def _may_be_opened(self, inputs: Any) -> bool:
        """Whether the loss is the model's own, of which somebody's own code may make another."""
        if not has_causal_loss(self.trainer):
            return False
        return self._own_code is None or follows_row_weights(self.trainer, self.for_model(inputs))

    @property
    def _own_code(self) -> Optional[str]:
        """Whose code, neither transformers' nor ours, gets what the model gives, and may look at more than its loss."""
        return own_loss_between(self.trainer) or own_forward_of(self.trainer.model)

    def _may_go_headless(self, inputs: Any) -> Optional[bool]:
        """None: this batch does not tell."""
        if self._wanted == "never":
            return False
        obstacle = obstacle_to_headless(self.trainer)
        if self._wanted == "auto" and (obstacle or head_of(self.trainer.model).out_features < LARGE_VOCABULARY):
            return False
        owner = self._own_code
        if self._wanted == "auto" and owner:
            obstacle = (
                f"{owner} computes the loss in its own code, which may use more than the loss of the model; set "
                "chunked_loss: always if it does not"
            )
        instead = "use chunked_loss: auto or never" if self._wanted == "always" else None
        return self._checked("chunked_loss: always", instead, obstacle, inputs, agrees_headless)

    def _may_be_padding_free(self, inputs: Any) -> Optional[bool]:
        """None: this batch does not tell."""
        wanted = self._wanted_padding_free
        if wanted is False:
            return False
        obstacle = obstacle_to_padding_free(self.trainer)
        if wanted is None and (obstacle or self._own_code):
            return False
        instead = "leave padding_free out, or false" if wanted else None
        found = self._checked("padding_free: true", instead, obstacle, inputs, agrees_padding_free)
        if found:
            logger.info("rows go through the layers end to end, without padding")
        return found

    def _checked(
        self, setting: str, instead: Optional[str], obstacle: Optional[str], inputs: Any, agrees: Callable
    ) -> Optional[bool]:
        """Whether a way without ``obstacle`` gives the stock loss; None where that is asked once more, with the next
        batch. ``instead``: of a ``setting`` that insists on it."""
        found = None
        if not obstacle:
            found, obstacle = agrees(self.trainer, inputs)
        if obstacle and found is None and not instead and setting not in self._asked_again:
            self._asked_again.add(setting)
            return None
        if obstacle and instead:
            raise SettingsError(f"{setting}, but {obstacle}; {instead}")
        if obstacle:
            logger.warning("%s is not used: %s", setting.partition(":")[0], obstacle)
            return False
        return found


def zero_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """On ``device``, wherever weights lie. Each that is trained gets a gradient of zero: ranks wait for all of them."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(((p.sum() * 0.0).to(device) for p in trained), torch.zeros((), device=device))


def _are_finite(losses: Sequence[RowLosses]) -> bool:
    """Whether every row's loss is. Waits for the device once."""
    sums = [one.sums for one in losses]
    found = (sums[0] if len(sums) == 1 else torch.cat(sums)).tolist() if sums else []
    return all(map(math.isfinite, found))


def _pair(trainer: Trainer, found: Any) -> tuple[torch.Tensor, Any]:
    """(loss, outputs), as ``compute_loss`` returns them where it is asked for both. Raises ControlError."""
    if isinstance(found, tuple) and len(found) == 2:
        return found
    raise ControlError(
        f"compute_loss of {own_loss_between(trainer)} returns a {type(found).__name__} when return_outputs is True, "
        "but a curriculum reads the losses of rows from the outputs; return (loss, outputs) then, or drop the "
        "curriculum"
    )


def without_index(inputs: Any) -> Any:
    """What the model is to see of a batch."""
    return type(inputs)({name: value for name, value in inputs.items() if name != SAMPLE_INDEX})
