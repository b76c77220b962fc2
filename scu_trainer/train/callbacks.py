"""Adapters between the stock training loop's events and the controllers, and the run's files."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from scu_trainer.run_files import History, write_json

if TYPE_CHECKING:
    from scu_trainer.train.chunked_step import ChunkedStep
    from scu_trainer.train.curriculum_loop import CurriculumLoop
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")

HISTORY_FILE = "scu_history.json"
CONFIG_FILE = "scu_config.json"
MEMORY_FILE = "memory_history.json"
CURRICULUM_FILE = "curriculum.json"

BOOKED = tuple("rows real_tokens padded_tokens cut_tokens seen repeated readmitted suspects quarantined unseen".split())
"""Numbers of a row of curriculum.json that reporters get."""


class RegularizationCallback(TrainerCallback):
    """Calls the regularizer at the right moments of the stock loop; writes ``scu_history.json`` and
    ``scu_config.json``.

    ``items_in_window``: supervised tokens of this optimizer step as the stock loop counts them, set by the trainer.
    ``seconds``: host time spent in the loop. On a GPU it includes waiting for the step that is measured.
    ``rate_factor``: what ``hold_steps`` multiplies the scheduled learning rate by, 1 until the target is reached.
    """

    def __init__(self, trainer: SCUTrainer) -> None:
        self.trainer = trainer
        self.items_in_window: Any = None
        self.rate_factor = 1.0
        self.seconds = 0.0
        self.last_row: Optional[dict[str, Any]] = None
        self.history: Optional[History] = None
        self._said = 0

    @property
    def _regularizer(self):
        return self.trainer.regularizer

    def on_train_begin(self, args, state, control, **kwargs):
        loader, accumulation = kwargs["train_dataloader"], args.gradient_accumulation_steps
        # A stream of unknown length counts as one pass.
        steps_per_epoch = math.ceil(len(loader) / accumulation) if has_length(loader) else state.max_steps
        self._regularizer.start(state.max_steps, steps_per_epoch, args.seed)
        self._said = len(self._regularizer.progress.notices)
        self.rate_factor, self.seconds, self.last_row = 1.0, 0.0, None  # of this training
        if args.should_save:
            self.history = opened(args.output_dir, HISTORY_FILE, state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self.rate_factor = self._hold_factor(state.global_step)
        _scale_rates(kwargs["optimizer"], kwargs["lr_scheduler"], self.trainer.rate_factor)

    def _hold_factor(self, step: int) -> float:
        """Linear decay from 1 at the step that reached the target to 0 ``hold_steps`` later."""
        reached, steps = self._regularizer.state.reached_step, self._regularizer.settings.hold_steps
        if reached is None or not steps:
            return 1.0
        return max(0.0, 1.0 - (step + 1 - reached) / (steps + 1))

    def on_optimizer_step(self, args, state, control, **kwargs):
        accelerator = self.trainer.accelerator
        if accelerator.optimizer_step_was_skipped:
            self._regularizer.discard_step()
            return
        with self.timed():
            row = self._regularizer.after_optimizer_step(
                step=state.global_step + 1,
                learning_rate=float(kwargs["optimizer"].param_groups[0]["lr"]),  # torchao keeps a tensor
                items=self._items_over_ranks(),
                reduce=lambda tensor: _sum_over_ranks(accelerator, tensor),
                processes=accelerator.num_processes,
            )
            if row is not None:
                self._publish(row, state.global_step + 1, control)

    def before_checkpoint(self) -> None:
        """Called by all ranks, whichever of them writes."""
        accelerator = self.trainer.accelerator
        self._regularizer.share_interval(lambda tensor: _sum_over_ranks(accelerator, tensor), accelerator.num_processes)

    def _items_over_ranks(self) -> Any:
        """Tokens of the window for the regularizer, whose mean over ranks must be the tokens of all ranks together."""
        counts_are_local = not self.trainer.args.average_tokens_across_devices
        if self.items_in_window is None or not counts_are_local:
            return self.items_in_window
        return self.items_in_window * self.trainer.accelerator.num_processes

    @contextlib.contextmanager
    def timed(self):
        started_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started_s

    def _publish(self, row: dict[str, Any], step: int, control) -> None:
        if self.history is not None:
            if self.last_row is None:
                self._write_config()
            self.history.append(row)
        self.last_row = row
        self._say_new_notices()
        self._stop_when_due(step, control)

    def _write_config(self) -> None:
        write_json(Path(self.trainer.args.output_dir) / CONFIG_FILE, self._regularizer.description())

    def on_train_end(self, args, state, control, **kwargs):
        if self.history is not None:
            self._write_config()
            self.history.close()
            self.history = None

    def _stop_when_due(self, step: int, control) -> None:
        settings, reached = self._regularizer.settings, self._regularizer.state.reached_step
        if settings.stop_at_target and reached is not None and step >= reached + settings.hold_steps:
            control.should_training_stop = True
            control.should_log = control.should_save = True

    def _say_new_notices(self) -> None:
        notices = self._regularizer.progress.notices
        for text in notices[self._said :]:
            if self.trainer.is_world_process_zero():
                logger.warning(text)
        self._said = len(notices)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and "eval_bpt" in metrics:
            self._regularizer.observe_held_out(metrics["eval_bpt"])

    def scalars(self) -> dict[str, float]:
        """The newest decision for logs and TensorBoard; empty before the first."""
        row = self.last_row or {}
        names = ("s", "s_ema", "s_target", "lambda", "data_bpt", "param_bpt")
        return {f"scu/{name}": row[name] for name in names if row.get(name) is not None}


class _HistoryCallback(TrainerCallback):
    """Hands what ``writer.on_row`` gets to a history file while training goes on."""

    def __init__(self, writer: Any, name: str) -> None:
        self._writer, self._name = writer, name
        self.history: Optional[History] = None
        self.newest: Optional[dict[str, Any]] = None

    def _begin(self, args, after_step: int) -> None:
        if args.should_save:
            self.history = opened(args.output_dir, self._name, after_step)
        self.newest, self._writer.on_row = None, self._take

    def _take(self, row: dict[str, Any]) -> None:
        self.newest = row
        if self.history is not None:
            self.history.append(row)

    def on_train_end(self, args, state, control, **kwargs):
        self._writer.on_row = lambda row: None
        if self.history is not None:
            self.history.close()
            self.history = None


class MemoryCallback(_HistoryCallback):
    """Begins and ends the memory loop with training; writes ``memory_history.json``."""

    def __init__(self, chunked: ChunkedStep) -> None:
        super().__init__(chunked.loop, MEMORY_FILE)
        self.chunked = chunked

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin(args, state.global_step)
        self.chunked.start()

    def on_step_begin(self, args, state, control, **kwargs):
        _scale_rates(kwargs["optimizer"], kwargs["lr_scheduler"], self.chunked.trainer.rate_factor)

    def on_step_end(self, args, state, control, **kwargs):
        self.chunked.loop.stepped()


class CurriculumCallback(_HistoryCallback):
    """Tells the curriculum of steps and epochs; writes ``curriculum.json``."""

    def __init__(self, curriculum: CurriculumLoop) -> None:
        super().__init__(curriculum, CURRICULUM_FILE)
        self.curriculum = curriculum

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin(args, self.curriculum.booked_until)
        if self.curriculum.owes_row:
            self.curriculum.end_epoch()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.curriculum.before_scheduler(state.global_step + 1, kwargs["lr_scheduler"])

    def on_epoch_end(self, args, state, control, **kwargs):
        self.curriculum.end_epoch()

    def scalars(self) -> dict[str, float]:
        """The books of the last epoch for one row of the logs; empty until the next one is booked."""
        row, self.newest = self.newest or {}, None
        names = ("epoch", *BOOKED)
        found = {f"curriculum/{name}": row[name] for name in names if row.get(name) is not None}
        found |= {f"curriculum/difficulty_{name}": value for name, value in (row.get("difficulty") or {}).items()}
        return found | ({"curriculum/skipped": sum(row["skipped"].values())} if row else {})


def _scale_rates(optimizer, scheduler, factor: float) -> None:
    """The scheduled learning rates times ``factor``; untouched at 1."""
    if factor != 1.0:
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate * factor


def opened(output_dir: str, name: str, step: int) -> History:
    """The history file of a run that goes on after ``step``."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    history = History(Path(output_dir) / name)
    dropped = history.truncate_after(step)
    if dropped:
        logger.info("%d rows of %s after step %d are written anew", dropped, name, step)
    return history


def _sum_over_ranks(accelerator, tensor):
    if accelerator.num_processes == 1:
        return tensor
    # float64 is not to be had on every device; three numbers lose nothing that matters in float32.
    return accelerator.reduce(tensor.float().to(accelerator.device), reduction="sum").cpu().double()
