"""Regularization as a loop: when the regularizer measures, decides and acts in a training, and what is recorded."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors.torch import save_file
from transformers import Trainer
from transformers.trainer_utils import has_length

from scu_trainer.control.tracking import assess
from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_rows, write_json
from scu_trainer.settings.regularization import LAWS_WITHOUT_TARGET
from scu_trainer.train.checkpoints.saved_state import read_state, read_tensors
from scu_trainer.train.loop import Loop, run_folder
from scu_trainer.train.loss.analysis.analysis import LossAnalysis
from scu_trainer.train.regularization.regularizer import Regularizer
from scu_trainer.train.step.recovery.second_try import second_try

logger = logging.getLogger("scu_trainer")

CONFIG_FILE = "scu_config.json"
PRIOR_FILE = "scu_prior.safetensors"
MEASURED = "measured, not steered (no scu_target_s)"
NO_STEP = "no control step was taken"
LOGGED = ("s", "s_ema", "s_target", "lambda", "data_bpt", "param_bpt")


class RegularizationLoop(Loop):
    """Calls the regularizer at the right moments; writes ``scu_history.json`` and ``scu_config.json``.

    ``seconds``: host time spent in the loop; on a GPU it includes waiting for the measured step. ``rate_factor``: 1
    until the target is reached, then as set by ``hold_steps``.
    """

    name = "regularization"
    state_file = "scu_state.json"
    history_file = "scu_history.json"

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self.seconds = self._train_s = 0.0
        self.last_row: Optional[dict[str, Any]] = None
        self._items: Any = None
        self._ignores_items: Optional[bool] = None
        self._reported_notices = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.regularizer.reset()
        self.last_row = None
        self._analysis, self._ignores_items = LossAnalysis(self.trainer), None

    def on_model(self, model: torch.nn.Module) -> None:
        # Otherwise it would decay the weights of the previous model.
        if self.trainer.place_model_on_device:
            self.trainer._move_model_to_device(model, self.trainer.args.device)
        self.regularizer.set_starting_weights(model)

    def on_train_begin(self, args, state, control, **kwargs):
        loader, accumulation = kwargs["train_dataloader"], args.gradient_accumulation_steps
        # A stream of unknown length counts as one pass.
        steps_per_epoch = math.ceil(len(loader) / accumulation) if has_length(loader) else state.max_steps
        self.regularizer.start(state.max_steps, steps_per_epoch, args.seed, state.logging_steps)
        self._reported_notices = len(self.notices)
        self.rate_factor, self.seconds, self._is_described = 1.0, 0.0, False  # for this call of train
        self._begun_s = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        """Lower the rate linearly, from the step that reached the target to 0 ``hold_steps`` later."""
        reached, steps = self.regularizer.state.reached_step, self.regularizer.settings.hold_steps
        decays = reached is not None and steps
        self.rate_factor = max(0.0, 1.0 - (state.global_step + 1 - reached) / (steps + 1)) if decays else 1.0

    def on_batch(self, inputs: Any, num_items: Any) -> None:
        """Without micro-batches, find out whether the loss ignores the item count that it is given."""
        trainer = self.trainer
        if trainer.micro_batches is not None or self._ignores_items is not None or trainer.loss_is_scaled_for_ga:
            return  # a loss with this flag may divide by the accumulation steps itself, as GRPO's does
        if self._analysis.own_step.per_batch:  # a trial would generate
            return
        over_ranks = num_items is not None and trainer.accelerator.num_processes > 1
        if over_ranks or self._analysis.batches_added(num_items) > 1:
            self._ignores_items = self._analysis.ignores_items(inputs, num_items)
            if self._added_means(num_items) > 1 and trainer.is_world_process_zero():
                logger.warning(self._analysis.added_means_warning(num_items))

    def _added_means(self, num_items: Any) -> int:
        micro_batches = self.trainer.micro_batches
        if micro_batches is not None:
            return micro_batches.means_added(num_items)
        return self._analysis.means_added(num_items) if self._ignores_items else 1

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        loss = self.trainer.task_loss
        if (count := self._added_means(num_items)) > 1:
            loss = second_try(functools.partial(torch.div, loss, count), "taking the mean of the losses")
        self.regularizer.observe_loss(loss)
        self._items = num_items

    def on_gradients(self, loss_scale: float) -> None:
        with self._timed():
            self.regularizer.add_penalty(loss_scale)

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.regularizer.discard_step()
            return
        rate = self.trainer.rate_of_step
        with self._timed():
            row = self.regularizer.after_optimizer_step(
                step=state.global_step + 1,
                # with torchao the rate is a tensor
                learning_rate=float(kwargs["optimizer"].param_groups[0]["lr"]) if rate is None else rate,
                items=self._items_over_ranks(),
                mean_over_ranks=self._mean_over_ranks,
            )
            if row is not None:
                self._record_decision(row, state.global_step + 1, control)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and "eval_bpt" in metrics:
            self.regularizer.observe_held_out(metrics["eval_bpt"])

    def on_train_end(self, args, state, control, **kwargs):
        self._train_s = time.perf_counter() - self._begun_s
        if args.should_save:
            self._write_config()

    def _items_over_ranks(self) -> Any:
        """Return the tokens of the window, scaled so that their mean over ranks is the tokens of all ranks."""
        if self._items is None or self.trainer.args.average_tokens_across_devices:
            return self._items
        return self._items * self.trainer.accelerator.num_processes

    def _mean_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return tensor
        # Not every device has float64; for three numbers float32 is precise enough.
        total = accelerator.reduce(tensor.float().to(accelerator.device), reduction="sum").cpu().double()
        return total / accelerator.num_processes

    @contextlib.contextmanager
    def _timed(self):
        started_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started_s

    # -- a decision ----------------------------------------------------------------------------------------------------

    def _record_decision(self, row: dict[str, Any], step: int, control) -> None:
        """Write the row of a decision and its notices, and stop the run if it should stop at the target."""
        if self.history is not None and not self._is_described:
            self._write_config()
            self._is_described = True
        self.record(row)
        self.last_row = row
        for text in self.notices[self._reported_notices :]:
            if self.trainer.is_world_process_zero():
                logger.warning(text)
        self._reported_notices = len(self.notices)
        settings, reached = self.regularizer.settings, self.regularizer.state.reached_step
        if settings.stop_at_target and reached is not None and step >= reached + settings.hold_steps:
            control.should_training_stop = True
            control.should_log = control.should_save = True

    def _write_config(self) -> None:
        write_json(run_folder(self.trainer) / CONFIG_FILE, self.regularizer.description())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**self.regularizer.state_dict(), "last_row": self.last_row}

    def save_state(self, folder: str) -> None:
        if self.trainer.accelerator.num_processes > 1:
            self.regularizer.share_interval(self._mean_over_ranks)
        # Base weights are loaded again on resume, but adapters start at random values, which would be lost.
        has_adapters = hasattr(self.trainer.model, "peft_config")
        prior = self.regularizer.prior.state_dict() if has_adapters and self.trainer.args.should_save else {}
        if prior:
            save_file({name: w.contiguous() for name, w in prior.items()}, Path(folder) / PRIOR_FILE)
        super().save_state(folder)

    def load_state(self, checkpoint: str) -> None:
        state_file, prior_file = Path(checkpoint) / self.state_file, Path(checkpoint) / PRIOR_FILE
        if not state_file.is_file() and not self.regularizer.steers:
            return self._replace_by_not_measured(
                f"{checkpoint} holds no {self.state_file}, and S can only be measured from the start of a run"
            )
        if not state_file.is_file():
            raise CheckpointError(
                f"{checkpoint} holds no {self.state_file}: it was written without the regularization loop or with "
                "save_only_model; resume with scu: false, or start over from its weights with model_name_or_path"
            )
        prior = read_tensors(prior_file) if prior_file.is_file() else None
        state = read_state(state_file)
        self.last_row = state.pop("last_row", None)  # logged until the next decision
        self.regularizer.load_state_dict(state, prior)

    def _replace_by_not_measured(self, reason: str) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        stand_in = NotMeasured(reason)
        callbacks[callbacks.index(self)] = stand_in
        stand_in.attach(self.trainer)

    # -- reports -------------------------------------------------------------------------------------------------------

    @property
    def notices(self) -> Sequence[str]:
        return self.regularizer.progress.notices

    def scalars(self) -> dict[str, float]:
        """Return the newest decision; empty before the first. Without lambda if nothing is steered."""
        row, steers = self.last_row or {}, self.regularizer.steers
        names = [name for name in LOGGED if steers or name != "lambda"]
        return {f"scu/{name}": row[name] for name in names if row.get(name) is not None}

    def figures(self) -> dict[str, Any]:
        """Return how well S tracked the final target, and what the loop cost."""
        rows = read_rows(run_folder(self.trainer) / self.history_file)
        state, progress = self.regularizer.state, self.regularizer.progress
        figures: dict[str, Any] = {
            "law": self.regularizer.settings.law,
            "steers": self.regularizer.steers,
            "plant_gain": progress.gain,
            "skipped_measurements": state.skipped,
            "overhead_fraction": self.seconds / self._train_s if self.seconds and self._train_s else None,
            "notices": list(progress.notices),
        }
        if not rows:
            return {self.name: {**figures, "verdict": NO_STEP}}
        figures.update(final_s=rows[-1]["s_ema"], final_lambda=rows[-1]["lambda"], target_s=state.target_s)
        figures["reached_step"] = state.reached_step
        return {self.name: {**figures, **_tracking(self.regularizer, rows, state.target_s)}}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        control = figures[self.name]
        if not self.regularizer.steers:
            return _measured_lines(control)
        target, final = control.get("target_s"), f"{control.get('final_s') or 0:.4f}"
        against = f"{final} against {target:.4g}" if target else final
        lines = [("S against target" if target else "S", f"{against}: {control['verdict']}")]
        if control.get("settling_step") is not None:
            detail = f"settled at step {control['settling_step']}, bias {control['bias']:+.1%}"
            if control["overshoot"] is not None:
                detail += f", overshoot {max(0.0, control['overshoot']):.1%}"
            lines.append(("tracking", detail))
        lines.append(("lambda at the end", f"{control.get('final_lambda') or 0:.4g}"))
        if control["overhead_fraction"] is not None:
            lines.append(("cost of the loop", f"{control['overhead_fraction']:.2%} of the training time"))
        return lines + [("note", text) for text in control["notices"]]


class NotMeasured(Loop):
    """Replaces ``RegularizationLoop`` if S cannot be measured and the user did not ask to steer it."""

    name = "regularization"

    def __init__(self, reason: str) -> None:
        self.notices = [f"S is not measured: {reason}"]

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        if trainer.is_world_process_zero():
            logger.warning(self.notices[0])

    def figures(self) -> dict[str, Any]:
        return {self.name: {"steers": False, "notices": self.notices, "verdict": "not measured"}}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("S", self.notices[0].removeprefix("S is "))]


def _measured_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the summary lines of a run without a target."""
    s = found.get("final_s")
    lines = [("S", found["verdict"] if s is None else f"{s:.4f}, {found['verdict']}")]
    if found["overhead_fraction"] is not None:
        lines.append(("cost of measuring S", f"{found['overhead_fraction']:.2%} of the training time"))
    return lines + [("note", text) for text in found["notices"]]


def _tracking(regularizer: Regularizer, rows: list[dict[str, Any]], target: Optional[float]) -> dict[str, Any]:
    if not regularizer.steers:
        return {"verdict": MEASURED}
    if regularizer.settings.law in LAWS_WITHOUT_TARGET:
        return {"verdict": f"lambda was {regularizer.settings.law}, S was not controlled"}
    if target is None:
        return {"verdict": "held-out loss was still falling at the end: S was left free"}
    held = [row for row in rows if row["s_target"] == target and row["s_ema"] is not None]
    if regularizer.settings.stop_at_target and not regularizer.settings.hold_steps:
        reached = regularizer.state.reached_step
        return {"verdict": f"stopped at target, step {reached}" if reached else "target not reached"}
    tracking = assess(
        [row["step"] for row in held], [row["s_ema"] for row in held], target, [row["saturated"] for row in held]
    )
    return asdict(tracking)
