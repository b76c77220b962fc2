"""What one trainer knows about its training loss: when to run trials, when to audit, and what to report."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import torch
from accelerate.utils import gather_object, recursively_apply, send_to_device
from transformers import Trainer

from scu_trainer.errors import ControlError, OutOfMemory
from scu_trainer.train.loss.analysis.asked_rows import are_classes, first_rows, rows_for_trial
from scu_trainer.train.loss.analysis.audit import Audited, Auditor
from scu_trainer.train.loss.analysis.exchange import seen_exchange
from scu_trainer.train.loss.analysis.measuring import EXACT, tolerance_of, training_loss
from scu_trainer.train.loss.analysis.no_trace import restored_on_exit
from scu_trainer.train.loss.analysis.own_step import OwnStep
from scu_trainer.train.loss.analysis.trials import analyze
from scu_trainer.train.loss.rows.model_loss import NOISE_BY_LENGTH, comes_from, has_sharded_weights, inner_model
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import CPU, Batch, placed
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch
from scu_trainer.train.step.distributed.launched import is_lost_rank
from scu_trainer.train.step.distributed.ranks import Ranks, from_most_urgent_rank
from scu_trainer.train.step.distributed.sharded import needs_all_ranks
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

MEAN_OF_KL = "the estimate of the KL divergence is a mean over the batch (calculate_KL of TRL's KTOTrainer)"
"""In the first step that estimate is 0, so no trial shows it."""

SHARDED = (
    "Under FSDP or ZeRO-3 the other ranks wait inside the same forward, so it cannot run again: shorten the rows "
    "(block_size), use more ranks, or offload weights to the CPU. The failed allocation said:"
)

MOST_TRIALS = 5
"""Maximum number of windows with trials about padding, or with trials that show nothing. If no trial showed anything at
all, trials are repeated in the windows 8, 16, 32, ..."""


class NotOneNumber(ControlError):
    """What compute_loss returns is no loss that can be trained."""


def _require_one_number(loss: Any) -> None:
    if torch.is_tensor(loss) and not loss.dim():
        return
    what = f"of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
    raise NotOneNumber(
        f"the training loss is {what}, but must be one number, a tensor without dimensions: return its mean "
        "(loss.mean()), or the sum of its parts, from compute_loss or from the model's forward"
    )


def _keys(batches: Sequence[Batch]) -> frozenset:
    return frozenset(frozenset(batch.inputs) for batch in batches if isinstance(batch.inputs, Mapping))


def _are_padded(batches: Sequence[Batch]) -> bool:
    return len({batch.width for batch in batches}) > 1 or any(batch.is_padded for batch in batches)


class LossAnalysis:
    """Find out how the training loss combines rows, and check while training that this still holds.

    ``reduction``: how the loss adds up over rows; None until it is known, and then no batch may be split.
    ``own_step``: what is known about a user's own ``training_step``. ``is_multiplied_by_ranks``: whether the loss is
    multiplied by the number of ranks, as in the stock compute_loss if items are counted over all ranks, because DDP
    averages. ``notices``: warnings that the loss is not what it seemed to be. ``audits``: number of passed audits.
    ``seconds``: host time spent on trials and audits.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.own_step = OwnStep(trainer)
        self._found: Optional[Reduction] = None
        self._mixes_in_some_batches: Optional[str] = None
        self.notices: list[str] = []
        self.is_multiplied_by_ranks = False
        self.audits = 0
        self.last_good_step: Optional[int] = None
        self.largest_difference = self.seconds = 0.0
        self._reads = self._windows = self._cut_windows = self._trials = 0
        self._has_looked_for_exchange = False
        self._auditor: Optional[Auditor] = None
        self._by_keys: dict[frozenset, Reduction] = {}
        self._seen: set[int] = set()

    @property
    def ranks_added(self) -> int:
        """How many ranks' losses are added up as parts of one mean."""
        return self.trainer.accelerator.num_processes if self.is_multiplied_by_ranks else 1

    @property
    def reduction(self) -> Optional[Reduction]:
        """What trials have found, corrected by what no trial can show."""
        found, trainer = self._found, self.trainer
        if found is None:
            return None
        if trainer.args.neftune_noise_alpha and found.trims is not False:
            found = replace(found, trims=False, reads_padding=NOISE_BY_LENGTH)
        if not found.is_exact:
            return found
        if self.own_step.mixes is not None:
            return replace(found, mixes=self.own_step.mixes, may_be_cut=False)
        return replace(found, mixes=MEAN_OF_KL) if getattr(trainer, "calculate_KL", False) else found

    @contextlib.contextmanager
    def watch_step(self, inputs: Any, num_items: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Watch the training step of one micro-batch, if the user has overridden it."""
        if self.own_step.owner is None:
            yield
            return
        was_stock = self.own_step.is_stock
        with self.own_step.watch_step_with(inputs, num_items, parameters):
            yield
        if was_stock and not self.own_step.is_stock:
            step, reason = self._step, self.own_step.mixes
            self._notice(
                f"from step {step + 1} on, batches run whole, because {reason}; step {step} may have been split"
            )

    # -- trials --------------------------------------------------------------------------------------------------------

    def read(self, batches: Sequence[Batch], num_items: Any, pad_token_id: int, ranks: Ranks) -> bool:
        """Run trials if these batches may show something new. Returns whether they did."""
        is_new, found = self._read(batches, num_items, pad_token_id, ranks), self._found
        if found is None or not found.is_exact:
            return is_new
        mixes = next(filter(None, map(found.obstacle_in, batches)), None)
        if mixes is None:
            return is_new
        # Only for these batches: what is known about such inputs does not change.
        self._found, self._mixes_in_some_batches = replace(found, mixes=mixes), mixes
        return True

    def _read(self, batches: Sequence[Batch], num_items: Any, pad_token_id: int, ranks: Ranks) -> bool:
        self._reads += 1
        if not self._has_looked_for_exchange:
            self._look_for_exchange(batches[0], num_items, pad_token_id)
        if self.own_step.exchange is not None:  # a trial would exchange something, too
            if self._found is None:
                self._found = Reduction("num_items", mixes=self.own_step.exchange, may_be_cut=False)
                self._notice(
                    f"batches run whole, and none runs again after running out of memory, because {self._found.mixes}"
                )
            return False
        if self.own_step.per_batch is not None and not any(batch.obstacle for batch in batches):
            is_new = self._found is None
            self._found = Reduction("num_items", mixes=self.own_step.per_batch, may_be_cut=False)
            return is_new
        asked = batches if self._needs_trial(batches) else None
        if ranks.even_micro_batches and ranks.world_size > 1:
            # The forward passes of a trial depend on its rows, and sharded weights need all ranks in each of them.
            can_tell = asked is not None and rows_for_trial(asked, self._seen) is not None
            few = [replace(entry, inputs=send_to_device(entry.inputs, CPU)) for entry in asked] if can_tell else None
            urgency = 1 + _are_padded(asked) if can_tell else 0
            asked = from_most_urgent_rank(few, urgency, self.trainer.accelerator.device) or asked
        is_new = asked is not None and self._run_trial(asked, num_items, pad_token_id)
        if self._found is not None:
            self._found = self._by_keys.get(_keys(batches)) or replace(self._found, trims=False)
        return is_new

    def _run_trial(self, batches: Sequence[Batch], num_items: Any, pad_token_id: int) -> bool:
        """Run a trial with rows of ``batches`` if there are suitable ones. Returns whether it showed anything."""
        keys, classes = _keys(batches), self._new_classes(batches)
        known, trial_rows = self._by_keys.get(keys), rows_for_trial(batches, self._seen)
        can_tell = trial_rows is not None  # otherwise, as with single rows, the model is not called
        found = self._try_rows(batches, num_items, pad_token_id) if can_tell else None
        rows = trial_rows if found is not None and classes else []
        seen = {int(batches[number].inputs["labels"][row]) for number, row in rows}
        # Nothing below runs out of memory. If a trial above did, it will be repeated.
        self._trials += can_tell or known is not None
        self._seen |= seen
        self._found = self._limit_padding_trials(found or known)
        if self._found is not None:
            was_exact = any(entry.is_exact for entry in self._by_keys.values())
            self._by_keys[keys] = self._found
            if was_exact and not self._found.is_exact:
                self._end_splitting(self._found.mixes, self._found.mixes)
        return found is not None or known is None

    def _look_for_exchange(self, batch: Batch, num_items: Any, pad_token_id: int) -> None:
        """Detect exchanges between ranks. All ranks call it at the same place, because later trials depend on rows."""
        self._has_looked_for_exchange = True
        trainer, own_step = self.trainer, self.own_step
        if own_step.exchange or trainer.accelerator.num_processes == 1 or has_sharded_weights(trainer.model):
            return

        def loss_of(inputs: Any) -> torch.Tensor:
            return training_loss(trainer, type(inputs)(inputs) if isinstance(inputs, Mapping) else inputs, num_items)

        # With gradients, as in training, because an exchange may depend on that.
        with self._trial_mode(), restored_on_exit(trainer.model, trainer, training=True), torch.enable_grad():
            seen = seen_exchange(loss_of, first_rows(batch, pad_token_id))
        own_step.exchange = next(filter(None, gather_object([seen])), None)

    def _end_splitting(self, mixes: str, reason: str) -> None:
        """Stop splitting batches with any inputs, because trials with other inputs are not reliable either."""
        self._by_keys = {keys: replace(entry, mixes=mixes) for keys, entry in self._by_keys.items()}
        self._found = replace(self._found, mixes=mixes)
        self._warn_about_change(reason)

    def _needs_trial(self, batches: Sequence[Batch]) -> bool:
        """Return whether inputs, padding or classes are new, or rows differ in a way that tells kinds apart."""
        known = self._by_keys.get(_keys(batches))
        if known is None and not self._by_keys:  # trials take about ten short forwards: not in every step
            return self._trials < MOST_TRIALS or self._reads.bit_count() == 1  # a power of two
        if known is None:  # if batches are never split any more, other inputs need no trial
            return any(entry.is_exact for entry in self._by_keys.values())
        if not known.is_exact:
            return False
        if known.trims is None and _are_padded(batches):
            return True
        if known.known is not None:
            return False
        return self._new_classes(batches) or any(
            known.tells_apart(batch.inputs, batch.rows) for batch in batches if known.tied and not batch.obstacle
        )

    def _new_classes(self, batches: Sequence[Batch]) -> bool:
        """Return whether a row has a class that was in no trial."""
        labels = [batch.inputs["labels"] for batch in batches if not batch.obstacle and "labels" in batch.inputs]
        if not labels or not all(map(are_classes, labels)):
            return False
        return not self._seen.issuperset(torch.cat(labels).unique().tolist())

    def _limit_padding_trials(self, found: Optional[Reduction]) -> Optional[Reduction]:
        """After too many trials without a padded row, conclude that padding must stay."""
        if self._trials < MOST_TRIALS or found is None or found.trims is not None:
            return found
        return replace(found, trims=False, reads_padding="no padded row could be compared")

    def _try_rows(self, batches: Sequence[Batch], num_items: Any, pad_token_id: int) -> Optional[Reduction]:
        """Run a trial on a few rows of ``batches``. Raises NotOneNumber if the loss cannot be trained however many rows
        there are; where a forward needs all ranks, OutOfMemory or the error of a lost rank."""
        trainer, lost = self.trainer, []
        waits = needs_all_ranks(trainer)

        def loss_of(*asked: Any) -> torch.Tensor:
            if lost:  # other ranks may wait inside the forward that failed, so no other forward may follow
                raise lost[0]
            try:
                loss = self._loss(*asked)
                if self.own_step.owner is None:  # a training_step of one's own may make one number of anything
                    _require_one_number(loss)
                return loss
            except Exception as error:
                if isinstance(error, NotOneNumber):
                    lost.append(error)
                elif waits and is_out_of_memory(error):
                    lost.append(OutOfMemory(f"step {self._step} ran out of memory with a few rows. {SHARDED} {error}"))
                elif waits and is_lost_rank(error):
                    lost.append(error)
                raise

        with self._trial_mode():
            found = analyze(
                loss_of,
                trainer.model,
                batches,
                num_items,
                pad_token_id,
                low_precision=trainer.accelerator.mixed_precision != "no",
                shifts=trainer._loss_shifts_labels,
                seen=self._seen,
                owner=trainer,
                is_public=self._is_public,
            )
        if lost:
            raise lost[0]
        return found

    def _loss(self, *asked: Any) -> torch.Tensor:
        trainer = self.trainer
        with replaced(trainer, "get_tp_size", self._note_multiplication(trainer.get_tp_size)):
            return training_loss(trainer, *asked)

    def _note_multiplication(self, size: Callable[[], int]) -> Callable[[], int]:
        """Wrap ``size`` to note that compute_loss calls it, as the stock one does where it multiplies the loss."""

        def asked() -> int:
            self.is_multiplied_by_ranks = True
            return size()

        return asked

    @contextlib.contextmanager
    def _trial_mode(self) -> Iterator[None]:
        """Put the model into training mode, do not report losses of rows, and count the time."""
        began, path = time.perf_counter(), self.trainer.loss_path
        self.trainer.model.train()
        try:
            with contextlib.nullcontext() if path is None else path.unrecorded():
                yield
        finally:
            self.seconds += time.perf_counter() - began

    def ignores_items(self, inputs: Any, num_items: Any) -> Optional[bool]:
        """Return whether the loss of ``inputs`` ignores ``num_items``, that is, is the same for twice as many. None if
        the loss is 0 or not finite. All ranks call it at the same place and agree, because the loss may communicate."""
        found: Optional[bool] = None
        try:
            once, twice = (self._loss_of_whole_batch(inputs, num_items, factor) for factor in (1, 2))
            if once and math.isfinite(once):
                found = abs(twice - once) <= EXACT * abs(once)
        except Exception as error:  # for instance, training_step computes the loss of another batch; keep training
            found = False
            logger.warning(
                "whether the loss reads num_items_in_batch could not be tested (%s: %s): S is measured as if it does",
                type(error).__name__, error,
            )  # fmt: skip
            forget_traceback(error)
        answers = [answer for answer in gather_object([found]) if answer is not None]
        return all(answers) if answers else None

    def _loss_of_whole_batch(self, inputs: Any, num_items: Any, factor: int) -> float:
        trainer, items = self.trainer, None if num_items is None else factor * num_items
        # With gradients, as in training, because the loss may compute some. Sharded weights would wait for a backward.
        gradients = not has_sharded_weights(trainer.model)
        with (
            torch.set_grad_enabled(gradients),
            restored_on_exit(trainer.model, trainer, training=True),
            self._trial_mode(),
        ):
            return self._loss(recursively_apply(torch.clone, inputs), items).item()

    # -- auditing ------------------------------------------------------------------------------------------------------

    def holds(self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any) -> bool:
        """Return whether the loss of a batch still is the sum over its ``micro_batches``; if not, stop splitting.

        Audited in steps 1, 2, 4, 8, ... of this process, in steps 1, 2, 4, 8, ... that split batches, and in the last.
        """
        self._windows += 1
        cuts = any(micro_batch.rows and window.is_part(micro_batch) for micro_batch in micro_batches)
        if not cuts or not window.can_pool:
            return True
        self._cut_windows += 1
        is_last = self._step == self.trainer.state.max_steps
        if not (is_last or 1 in (self._windows.bit_count(), self._cut_windows.bit_count())):  # powers of two
            return True
        found = self._audit(window, micro_batches, num_items)
        if found is None:  # this window shows nothing, a later one will
            return True
        if found.difference <= tolerance_of(self.trainer):
            self.audits += 1
            self.last_good_step = self._step
            self.largest_difference = max(self.largest_difference, found.difference)
            return True
        self._stop_splitting(found)
        return False

    def _audit(
        self, window: AccumulationWindow, micro_batches: Sequence[MicroBatch], num_items: Any
    ) -> Optional[Audited]:
        """Audit the window, with smaller samples if memory runs out; None if it shows nothing."""
        trainer = self.trainer
        if self._auditor is None:
            self._auditor = Auditor(trainer.model, partial(training_loss, trainer), trainer)
        own = not (self.reduction.known and self._is_public)  # for public code a sample of values is enough
        if trainer.loss_path is not None:  # without logits, if training computes none
            first = window.batches[0].inputs
            trainer.loss_path.choose(lambda: trainer._prepare_inputs(placed(first, trainer.args.device)))
        with self._trial_mode():
            audit = partial(self._auditor.audit, window, micro_batches, num_items, self.audits, own)
            return second_try(audit, "auditing how the loss adds up")

    @property
    def _is_public(self) -> bool:
        """Whether the model and everything between it and the loss are public code."""
        model = type(inner_model(self.trainer.model))
        return comes_from(model, "transformers.models", "scu_trainer.models") and not self.trainer.changes_loss

    @property
    def _step(self) -> int:
        return self.trainer.state.global_step + 1

    def _stop_splitting(self, found: Audited) -> None:
        if found.of_value > tolerance_of(self.trainer):
            parts = f"but the sum over their micro-batches is {found.parts:.6g}"
            reason, of = f"the loss of {found.rows} rows together is {found.whole:.6g}, {parts}", found.of_value
        else:
            reason = f"the gradient of {found.rows} rows together is not that of their micro-batches"
            of = found.of_gradient
        self._end_splitting(reason, f"{reason}, a relative difference of {of:.2g}")

    def _warn_about_change(self, reason: str) -> None:
        """Report since when gradients may have been wrong."""
        since = "no step was split before" if self._step == 1 else f"steps 1 to {self._step - 1} were not audited"
        if self.last_good_step is not None:
            first, last = self.last_good_step + 1, self._step - 1
            since = (
                f"gradients of steps {first} to {last} may be off by as much"
                if last > first
                else f"the gradient of step {first} may be off by as much"
                if last == first
                else "the step before was audited and is correct"
            )
        self._notice(f"from step {self._step} on, batches run whole, because {reason}: this loss mixes rows; {since}")

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        logger.warning(text)

    # -- reports -------------------------------------------------------------------------------------------------------

    def batches_added(self, num_items: Any) -> int:
        """Return how many losses of a window the stock loop adds up as parts of one mean; 1 if it averages them."""
        trainer = self.trainer
        is_told = trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and num_items is not None)
        scaled = trainer.loss_is_scaled_for_ga
        return trainer.current_gradient_accumulation_steps if (is_told if scaled is None else scaled) else 1

    def means_added(self, num_items: Any) -> int:
        """Return how many losses, over a window's batches and all ranks, the stock loop adds up as parts of one mean.
        Each of them is a mean if the loss ignores the ``num_items_in_batch`` it is given."""
        return self.batches_added(num_items) * self.ranks_added

    def added_means_warning(self, num_items: Any) -> str:
        batches, ranks = self.batches_added(num_items), self.ranks_added
        larger = "gradient_accumulation_steps: 1 with a larger batch (micro-batches keep its memory low)"
        instead = [larger] * (batches > 1) + ["average_tokens_across_devices: false"] * (ranks > 1)
        who = "this model" if self.trainer.compute_loss_func is None else "compute_loss_func"
        which = f"batches ({batches} on each rank)" if ranks > 1 else "accumulation batches"
        return (
            f"{who} ignores num_items_in_batch, so the stock loop adds up the mean losses of {batches * ranks} {which} "
            "instead of averaging them: gradient and logged loss are that many times as large, here too. "
            f"To avoid it, set {' and '.join(instead)}"
        )

    def figures(self) -> Optional[dict[str, Any]]:
        """Return the entry "loss_analysis" of scu_metrics.json."""
        if self.reduction is None:
            return None
        mixes = self.reduction.mixes or self._mixes_in_some_batches
        return {
            "divides_by": self.reduction.kind.partition(" ")[0],  # without the name of a column
            "known": self.reduction.known,
            "is_exact": mixes is None,
            "mixes": mixes,
            "questions": self._trials,
            "audits": self.audits,
            "last_good_step": self.last_good_step,
            "largest_difference": self.largest_difference,
            "seconds": self.seconds,
            "notices": list(self.notices),
        }
