"""Skip optimizer steps with a non-finite loss or gradient, or with a spike, before the optimizer acts on them.

    on_step_begin       copies what a bad step would change: the sum of logged losses, BatchNorm's statistics, and
                        attributes of user code
    on_loss             collects the loss of each accumulation batch, on the device
    on_grad_norm        checks once per step, over all ranks, whether losses and gradient norm are finite; if not,
                        restores everything to the state before the step and searches for the source
    optimizer.step      does nothing in a skipped step, because without gradients some optimizers still count, average
                        or fail
    on_optimizer_step   marks the step as skipped, as a GradScaler does: then the stock loop leaves its schedule
                        unchanged, the regularization loop its S and lambda, and weight averages do not move

A skipped step is counted: ``global_step`` increases, and the data move on. If too many steps in a row are skipped, the
run ends with a checkpoint, because the weights are still those of the last good step. Only if a weight itself is not
finite, nothing is saved. Spikes do not end a run: many in a row are a new level.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, Optional

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer

from scu_trainer.errors import NonFiniteLoss
from scu_trainer.settings import SafetySettings
from scu_trainer.train.checkpoints.format import checkpoints
from scu_trainer.train.loop import Loop, run_folder
from scu_trainer.train.loops.guard.divergence import DivergenceWatch
from scu_trainer.train.loops.guard.first_nonfinite import (
    NonFinitePlace,
    has_nonfinite,
    locate_nonfinite,
    nonfinite_weight,
    weights_are_finite,
)
from scu_trainer.train.loops.guard.spikes import SpikeWatch
from scu_trainer.train.loss.rows.model_loss import changing_objects_of
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers, plain_attributes, replaced, restore_attributes

logger = logging.getLogger("scu_trainer")

MOST_RECORDS = 50
"""Maximum number of skipped steps that the summary describes; all are counted."""

SMALLEST_SCALE = 1.0
"""Loss scale of fp16 below which an overflow of the gradient is no longer caused by the scale."""

LOSS, GRADIENT, ROWS, SPIKE = "loss", "gradient", "rows", "spike"
DESCRIPTIONS = {
    LOSS: "the loss is not a finite number",
    GRADIENT: "the loss is finite, the gradient is not",
    ROWS: "no row of the step gave a finite loss",
}


class NonFiniteGuard(Loop):
    """Checks every training step, before all loops that act on an optimizer step except ``OverflowWatch``.

    ``skipped_steps``: in the whole run. ``in_a_row``: non-finite steps in a row up to now. ``buffers``: the model's
    buffers that change in training. Raises NonFiniteLoss, on all ranks, if more than
    ``SafetySettings.max_nonfinite_steps`` steps in a row are not finite.
    """

    name = "bad_numbers"
    state_file = "safety_state.json"

    def __init__(self, trainer: Trainer, settings: SafetySettings, epochs_differ: bool = False) -> None:
        self.trainer, self.settings = trainer, settings
        self.divergence = None if settings.divergence == "off" else DivergenceWatch(trainer, settings, epochs_differ)
        self.spikes = None if settings.spike_guard == "off" else SpikeWatch(trainer, settings)
        found = {"divergence": self.divergence, "spikes": self.spikes}
        self._watches = {name: watch for name, watch in found.items() if watch is not None}
        self._batches: Sequence[Any] = ()
        self._losses: list[torch.Tensor] = []
        self._items: Any = None
        self._is_skipping = False
        self._disabled_step = contextlib.ExitStack()
        self.begin()

    def begin(self) -> None:
        self.skipped_steps = self.in_a_row = 0
        self._records: list[dict[str, Any]] = []
        for watch in self._watches.values():
            watch.begin()

    # -- events of the stock loop --------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.in_a_row = 0
        if self.divergence is not None:
            self.divergence.start()
        self.buffers = ChangingBuffers(self.trainer.model)
        self._counting_objects = changing_objects_of(self.trainer)
        if self.trainer.is_deepspeed_enabled:
            # DeepSpeed's engine steps inside backward, so it must check itself, which it only does by default for fp16.
            self.trainer.model_wrapped.optimizer.check_grad_overflow = True

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        if self.divergence is not None:
            self.divergence.begin_epoch(int(state.epoch or 0))

    def on_window(self, batches: Sequence[Any], num_items: Any) -> None:
        self._batches = batches

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._losses.clear()
        modules, owner = self._counting_objects()
        counting_objects = [item for item in modules if item is not self.trainer.state]
        self._sum_before, self._buffers_before, self._attributes_before = second_try(
            lambda: (self.trainer._tr_loss.clone(), self.buffers.copies(), plain_attributes(counting_objects, owner)),
            "a copy of the buffers that a non-finite step would change (BatchNorm's statistics)",
        )
        if self._tracks_rows:
            self.trainer.loss_path.has_trained_rows = False

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        self._losses.append(loss)
        self._items = num_items

    def on_grad_norm(self, norm: Any) -> Any:
        fault = self._find_fault(norm)
        if fault is not None:
            self._skip(fault)
            return None
        self.in_a_row = 0
        if self.divergence is not None:
            self.divergence.count()
        return norm

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.end()
        if self._is_skipping:
            self._mark_as_skipped(True)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._is_skipping:
            self._mark_as_skipped(False)
            self._is_skipping = False
        else:
            self.buffers.end_window()
        self._batches = ()

    def on_log(self, args, state, control, logs: Optional[dict[str, Any]] = None, **kwargs) -> None:
        if self.divergence is not None and logs and "loss" in logs:
            self.divergence.see(state.global_step, logs["loss"])

    def end(self) -> None:
        """Let the optimizer step again."""
        self._disabled_step.close()

    def _disable_optimizer_step(self, fault: str) -> None:
        """Let the optimizer's next step do nothing except update the loss scaler."""
        optimizer, scaler = self.trainer.optimizer, self.trainer.accelerator.scaler
        if self.trainer.is_deepspeed_enabled:  # DeepSpeed's engine has skipped it itself
            return

        def skip_step(closure: Any = None) -> None:
            # The scaler has unscaled the gradients; a step without rows had none, so its scale must stay the same.
            if scaler is not None and scaler.is_enabled():
                scaler.update(scaler.get_scale() if fault == ROWS else None)

        self._disabled_step.enter_context(replaced(optimizer, "step", skip_step))

    def _mark_as_skipped(self, value: bool) -> None:
        """Set what ``accelerator.optimizer_step_was_skipped`` returns to the stock loop and to every callback."""
        optimizer = self.trainer.optimizer
        if self.trainer.is_deepspeed_enabled:
            optimizer.optimizer.overflow = value
        else:
            optimizer._is_overflow = value

    # -- checking a step -----------------------------------------------------------------------------------------------

    @property
    def _tracks_rows(self) -> bool:
        return self.trainer.loss_path is not None and self.trainer.loss_path.rows is not None

    def _find_fault(self, norm: Any) -> Optional[str]:
        """Return LOSS, GRADIENT, ROWS or SPIKE; None for a good step, and for one that the loss scaler skips itself."""
        check = functools.partial(self._check_over_ranks, self._gradient_norm(norm))
        bad_loss, bad_gradient, has_trained_rows, *numbers = second_try(
            check, "checking whether loss and gradient are finite"
        )
        if not has_trained_rows and not self.trainer.is_deepspeed_enabled:  # DeepSpeed has already stepped, with zeros
            return ROWS
        if bad_loss:
            return LOSS
        if bad_gradient:
            return None if self._is_overflow_of_scale() else GRADIENT
        return SPIKE if self.spikes is not None and self.spikes.is_spike(*numbers) else None

    def _check_over_ranks(self, gradient: torch.Tensor) -> list[float]:
        """Return whether a loss is not finite, whether the gradient is not, whether any row was trained on, the loss
        and the gradient norm (0 if not finite), each the maximum over ranks, because all ranks must decide alike.

        Waits for the device once, for all numbers of the step.
        """
        device = self.trainer.args.device
        numbers = [number.to(device, torch.float32).reshape(()) for number in (*self._losses, gradient)]
        *losses, norm = torch.stack(numbers).tolist()
        loss = sum(losses)
        faults = [not math.isfinite(number) for number in (loss, norm)]
        finite = [0.0 if is_bad else number for number, is_bad in zip((loss, norm), faults, strict=True)]
        found = [*faults, self._has_trained_rows, *finite]
        if self.trainer.accelerator.num_processes == 1:
            return found
        shared = torch.tensor(found, dtype=torch.float32, device=device)  # each rank has its own loss
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.tolist()

    @property
    def _has_trained_rows(self) -> bool:
        """Whether any row of this rank was trained on; single rows without a finite loss are set aside."""
        path = self.trainer.loss_path
        return not self._tracks_rows or path.has_trained_rows or not path.was_asked

    def _gradient_norm(self, norm: Any) -> torch.Tensor:
        if self.trainer.is_deepspeed_enabled:
            is_finite = not self._engine_skipped and (norm is None or math.isfinite(norm))
            return torch.tensor(0.0 if is_finite else math.inf)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)

    @property
    def _engine_skipped(self) -> bool:
        return bool(getattr(self.trainer.model_wrapped.optimizer, "overflow", False))

    def _is_overflow_of_scale(self) -> bool:
        """Return whether fp16 loss scaling, which finds its scale by overflows, skips this step itself."""
        if self.trainer.is_deepspeed_enabled:
            engine = self.trainer.model_wrapped
            return engine.fp16_enabled() and engine.optimizer.loss_scale >= SMALLEST_SCALE
        scaler = self.trainer.accelerator.scaler
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() >= SMALLEST_SCALE

    # -- a bad step ----------------------------------------------------------------------------------------------------

    def _skip(self, fault: str) -> None:
        """Undo and skip the step, report why, and end the run if too many steps in a row were skipped."""
        self._is_skipping = True
        self._undo_step()
        finding = self._find_source(fault)
        step = self.trainer.state.global_step + 1
        if fault == SPIKE:
            self.in_a_row = 0
            report, limit = f"step {step}: {self.spikes.fault}; {finding.text}", self.spikes.in_a_row
        else:
            self.in_a_row += 1
            report = f"step {step}: {DESCRIPTIONS[fault]}; {finding.text}"
            limit = f"{self.in_a_row} of at most {self.settings.max_nonfinite_steps} in a row"
        if finding.is_weight:
            self._stop_at_bad_weight(report)
        if self.trainer.is_deepspeed_enabled and not self._engine_skipped:
            raise NonFiniteLoss(
                f"{report}. DeepSpeed's engine has already taken the step, so it cannot be skipped; "
                f"{self._newest_checkpoint}. {self._advice()}; resume with resume_from_checkpoint: true"
            )
        if self.in_a_row > self.settings.max_nonfinite_steps:
            self._stop(report)
        self.skipped_steps += 1
        self._records.append({"step": step, "fault": fault, "place": finding.place, "rows": list(finding.rows)})
        del self._records[:-MOST_RECORDS]
        self._disable_optimizer_step(fault)
        if self.trainer.is_world_process_zero():
            advice = self._advice(fault)
            logger.warning("%s. The step is skipped, no weight has changed (%s). %s", report, limit, advice)

    @torch.no_grad()
    def _undo_step(self) -> None:
        """Undo all changes of the step except its number and the random state."""
        trainer = self.trainer
        if not trainer.is_deepspeed_enabled:  # DeepSpeed's engine has cleared its gradients
            for group in trainer.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        second_try(lambda: self.buffers.restore(self._buffers_before), "restoring the model's buffers")
        restore_attributes(self._attributes_before, has_nonfinite)  # counters keep counting this step, as state does
        trainer._tr_loss.copy_(self._sum_before)
        # The stock loop averages losses over the steps since these two, and this step has no loss.
        trainer._globalstep_last_logged += 1
        trainer._initial_global_step += 1
        trainer.step_is_taken_back = True
        for loop in trainer.loops:
            loop.on_step_taken_back()

    def _find_source(self, fault: str) -> NonFinitePlace:
        """Search for the source of the fault. Returns the same on all ranks."""
        if fault == SPIKE:
            return self.spikes.find(self._batches, self._items)

        def look() -> NonFinitePlace:
            if fault != ROWS:
                return locate_nonfinite(self.trainer, self._batches, self._items)
            weight = nonfinite_weight(self.trainer.model)
            if weight is not None:
                return NonFinitePlace(f"{weight} is not finite itself", is_weight=True)
            return NonFinitePlace("each of them was set aside")

        return self._first_finding(second_try(look, "looking for the non-finite value"))

    def _first_finding(self, finding: NonFinitePlace) -> NonFinitePlace:
        """Return the finding of the first rank that found something, the same on all ranks."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return finding
        rows = tuple(f"{row} of rank {accelerator.process_index}" for row in finding.rows)
        found = gather_object([replace(finding, rows=rows)])
        return next((item for item in found if item.place is not None), found[0])

    def _advice(self, fault: str = LOSS) -> str:
        if fault == SPIKE:
            return "Check these rows; if they are fine, raise spike_threshold or lower learning_rate"
        rows = "Check these rows, and fix or remove them if their data are wrong"
        precision = "use bf16 instead of fp16" if self.trainer.args.fp16 else "lower learning_rate"
        return f"{rows}; if they are fine, {precision}, or set max_grad_norm: 1"

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self, report: str) -> NoReturn:
        raise NonFiniteLoss(
            f"{report}. {self.in_a_row} steps in a row were skipped, max_nonfinite_steps allows "
            f"{self.settings.max_nonfinite_steps}. {self._ensure_checkpoint()}. {self._advice()}"
        )

    def _stop_at_bad_weight(self, report: str) -> NoReturn:
        raise NonFiniteLoss(
            f"{report}: an optimizer step wrote it. These weights are not saved; {self._newest_checkpoint}. Lower "
            "learning_rate, raise adam_epsilon, or use bf16 instead of fp16, and resume with "
            "resume_from_checkpoint: true"
        )

    @property
    def _newest_checkpoint(self) -> str:
        found = checkpoints(run_folder(self.trainer))
        return f"the newest checkpoint is {found[0].name}" if found else "there is no checkpoint to go back to"

    def on_nonfinite(self, error: NonFiniteLoss) -> NoReturn:
        """Save a checkpoint, if this is the only rank, and raise. ``error``: many rows in a row had no finite loss."""
        self.require_finite_weights()
        if self.trainer.accelerator.num_processes > 1:  # the other ranks are inside the step and cannot join a save
            raise error
        self._is_skipping = True
        self._undo_step()
        self.in_a_row += 1
        raise NonFiniteLoss(f"{error}. {self._ensure_checkpoint()}") from error

    def _ensure_checkpoint(self) -> str:
        """Ensure that a checkpoint of the last good step exists, and return a sentence about it. All ranks call it."""
        trainer = self.trainer
        step = trainer.state.global_step
        if not step:
            return "No step was taken, so nothing is lost"
        folder = run_folder(trainer) / f"checkpoint-{step}"
        (exists,) = broadcast_object_list([(folder / "trainer_state.json").is_file()])
        if not exists:
            trainer._save_checkpoint(trainer.model_wrapped, trainer._trial)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        if not folder.is_dir():
            return f"No checkpoint of the last good step could be written; {self._newest_checkpoint}"
        good = step - self.in_a_row + 1
        return f"{folder.name} holds the weights after step {good}, the last good one: resume_from_checkpoint: {folder}"

    # -- weights -------------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Raise NonFiniteLoss, on all ranks, if a checkpoint would contain weights that are not finite."""
        trainer = self.trainer
        is_finite = second_try(lambda: weights_are_finite(trainer.model), "checking whether the weights are finite")
        is_bad = torch.tensor([not is_finite], dtype=torch.int32, device=trainer.args.device)
        if trainer.accelerator.num_processes > 1:
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if is_bad:
            weight = nonfinite_weight(self.trainer.model) or "a weight on another rank"
            self._stop_at_bad_weight(f"after step {self.trainer.state.global_step}: {weight} is not finite itself")

    def require_finite_weights(self) -> None:
        """Raise NonFiniteLoss if a weight of this rank is not finite. Does not need the other ranks."""
        weight = nonfinite_weight(self.trainer.model)
        if weight is not None:
            self._stop_at_bad_weight(f"step {self.trainer.state.global_step + 1}: {weight} is not finite itself")

    # -- reports and checkpoints ---------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        spikes = {} if self.spikes is None else {"spike_steps": self.spikes.skipped_steps}
        return {"skipped_steps": self.skipped_steps, **spikes}

    @property
    def notices(self) -> list[str]:
        """Notices for run.json and the end of a run."""
        report = [notice for watch in self._watches.values() for notice in watch.notices]
        count = self.skipped_steps - (0 if self.spikes is None else self.spikes.skipped_steps)
        if count:
            steps = [str(record["step"]) for record in self._records if record["fault"] != SPIKE]
            report.append(
                f"optimizer steps skipped because loss or gradient was not finite: {count} ({', '.join(steps[-8:])})"
            )
        return report

    def figures(self) -> dict[str, Any]:
        counted = {"skipped_steps": self.skipped_steps, "skipped": list(self._records), "divergence": None}
        return {self.name: counted | {name: watch.figures() for name, watch in self._watches.items()}}

    def state_dict(self) -> dict[str, Any]:
        counted = {"skipped_steps": self.skipped_steps, "records": self._records, "divergence": None, "spikes": None}
        return counted | {name: watch.state_dict() for name, watch in self._watches.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.skipped_steps, self._records = saved["skipped_steps"], saved["records"]
        for name, watch in self._watches.items():
            if saved.get(name) is not None:
                watch.load_state_dict(saved[name])
