"""What a feedback loop is: a ``TrainerCallback`` with hooks where the stock Trainer has no event.

A training runs like this; names in brackets are methods of every loop, in the order of ``trainer.loops``:

    [begin]                                       what an earlier training has left is forgotten
    [loader]                                      the first loop that has a data loader gives it
    [load_state]                                  of a run that goes on from a checkpoint
    on_train_begin                                ``history_file`` is open from here on
    for each epoch:
        [begin_epoch]
        for each optimizer step:
            [batches]                             where its accumulation batches come from
            [on_window]                           they are known
            on_step_begin
            ``rate_factor``                       the learning rate is the scheduled one times those of all loops
            for each accumulation batch:
                [on_batch]
                forward and backward              by the engine, in micro-batches: [on_forward], [task_loss];
                                                  [on_nonfinite] where it ends without a finite loss
                [on_loss]
            [on_gradients]                        they are complete, and not clipped yet
            [on_grad_norm]                        they are clipped; a loop may veto the step, [on_step_taken_back]
            optimizer.step
            on_optimizer_step
            on_step_end
            [scalars], on_log                     every ``logging_steps``
            [evaluation], on_evaluate             every ``eval_steps``
            [before_save], [save_state], on_save  every ``save_steps``
    [final_scalars]
    on_train_end
    [end]                                         also after an error

Names without brackets are events of ``transformers.TrainerCallback``. All methods do nothing unless a loop has its own.
Every rank calls them at the same places.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Optional, Union

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from scu_trainer.errors import ControlError, NonFiniteLoss
from scu_trainer.figures import counted
from scu_trainer.run_files import History, state_text, write_state
from scu_trainer.settings.base import short
from scu_trainer.train.checkpoints.saved_state import read_state, reading

logger = logging.getLogger("scu_trainer")


class Loop(TrainerCallback):
    """Base of all loops. Give yours to the trainer as any callback: ``callbacks=[MyLoop()]`` or ``add_callback``.

    name: its section of scu_metrics.json.
    state_file: name in a checkpoint of what ``state_dict`` gives; None: nothing is saved.
    history_file: name in the run directory of the rows that ``record`` gets, one JSON array; None: there is none.
    rate_factor: what the scheduled learning rate of the next step is multiplied by.
    is_first: its events come before those of every other callback but ``LoopEvents``.
    notices: what a person should know at the end of the run; also in run.json.
    """

    name = ""
    state_file: Optional[str] = None
    history_file: Optional[str] = None
    rate_factor: float = 1.0
    notices: Sequence[str] = ()
    is_first = False
    trainer: Any = None  # an SCUTrainer; its file imports this one
    history: Optional[History] = None

    def attach(self, trainer: Trainer) -> None:
        """Called once, when the loop is given to a trainer."""
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.trainer is None:
            raise ControlError(
                f"{called(self)} was passed to a trainer without loops, which would never call its hooks; pass it to "
                "SCUTrainer, or wrap your Trainer class: with_loops(Trainer)"
            )

    on_epoch_begin = on_train_begin  # for a loop whose own on_train_begin does not call this one

    # -- a training ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a training is set up, and before it reads a checkpoint; the model may be another one by now."""

    def end(self) -> None:
        """After a training, also one that raised."""

    def on_model(self, model: torch.nn.Module) -> None:
        """``model_init`` has made a new model."""

    def loader(self) -> Optional[DataLoader]:
        """The training data, where this loop chooses them; None leaves that to the others."""

    def training_values(self, values: tuple) -> tuple:
        """``values``: what ``Trainer.set_initial_training_values`` returns."""
        return values

    def scheduler(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: Optional[int]) -> Any:
        """A schedule in the place of the stock one; None leaves that."""

    @property
    def rows_trained(self) -> Optional[int]:
        """In this training, where epochs are not as long as the stock Trainer takes them for."""

    @property
    def is_over(self) -> bool:
        """Whether this loop has ended the training. Resumed from that checkpoint, it takes no step."""
        return False

    # -- an epoch, a step ----------------------------------------------------------------------------------------------

    def resume_position(self, checkpoint: str, position: tuple[int, int]) -> tuple[int, int]:
        """(epoch to resume in, batches of it that are done). ``position``: as the loops before this one have it."""
        return position

    def begin_epoch(self, epoch: int, skipped_batches: int) -> Mapping[str, int]:
        """Arguments of ``Trainer._run_epoch`` that are other than the stock ones."""
        return {}

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Where the ``count`` accumulation batches of the next step come from: an iterator, of which
        no more are taken. The last loop is next to the loader."""
        return batches

    def on_window(self, batches: Sequence[Any], num_items: Any) -> None:
        """``batches``: all accumulation batches of the next step; with the memory loop on the host."""

    def on_batch(self, inputs: Any, num_items: Any) -> None:
        """An accumulation batch is about to be trained on. With the memory loop all of a step are, before its first."""

    def on_forward(self, inputs: Any) -> Any:
        """``inputs``: of a micro-batch, on the device, with their labels, also where rows are only asked or evaluated,
        and again where a micro-batch ran out of memory. Returns what the loss is taken of."""
        return inputs

    def task_loss(self, loss: torch.Tensor) -> Optional[torch.Tensor]:
        """Of the micro-batch that was just trained on, whose ``loss`` has other parts as well: what of it is the task's
        own, scaled alike. None: all of it."""

    def on_nonfinite(self, error: NonFiniteLoss) -> Optional[NoReturn]:
        """A step has no finite loss. May raise a better error, after a checkpoint."""

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        """``loss``: of an accumulation batch, detached, on the device, as the stock ``training_step`` returns it.
        ``trainer.task_loss``: what of it is the task's own. With the memory loop only the sum of a step is that of its
        batches: a micro-batch with rows of several counts for the first of them."""

    def on_gradients(self, loss_scale: float) -> None:
        """The gradients of the step are complete. ``loss_scale``: what a GradScaler has multiplied them by."""

    def on_grad_norm(self, norm: Any) -> Any:
        """``norm``: over all ranks, before clipping; None where a loop before has vetoed the step. Returns what is
        logged for it; None: as it is."""
        return norm

    def on_step_taken_back(self) -> None:
        """A loop has vetoed the step that is going on, and everything is as it was before."""

    def evaluation(self) -> AbstractContextManager:
        """Around every evaluation."""
        return contextlib.nullcontext()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Before weights are saved. May raise, on all ranks, where that would be wrong."""

    def state_dict(self) -> Optional[dict[str, Any]]:
        """What ``state_file`` holds, as JSON has it: a tuple comes back as a list. None: no file. Also asked for once
        after the first step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """``state``: as ``state_dict`` gave it."""

    def save_state(self, folder: str) -> None:
        """Into the folder of a checkpoint. Every rank calls it; the one with ``args.should_save`` writes."""
        if self.state_file is not None and self.trainer.args.should_save:
            self._write_state(functools.partial(write_state, Path(folder) / self.state_file))

    def require_savable(self) -> None:
        """Raises ControlError where ``state_dict`` gives what ``save_state`` could not write."""
        if self.state_file is not None and type(self).save_state is Loop.save_state:
            self._write_state(state_text)

    def _write_state(self, write: Callable[[dict[str, Any]], Any]) -> None:
        state = self.state_dict()
        if state is None:
            return
        try:
            write(state)
        except TypeError as error:
            raise ControlError(
                f"{called(self)} has a state_dict that cannot be saved as JSON ({error}); return a dict of "
                "numbers, strings, lists and dicts with string keys, and call tolist() on tensors"
            ) from error

    def load_state(self, checkpoint: str) -> None:
        """A checkpoint without the file is of a run without this loop: it starts fresh."""
        if self.state_file is None:
            return
        path = Path(checkpoint) / self.state_file
        if not path.is_file():
            if self.trainer.is_world_process_zero():
                logger.warning("%s has no %s: %s starts fresh", path.parent, path.name, called(self))
            return
        state = read_state(path)
        with reading(path, f"load_state_dict of {called(self)}"):
            self.load_state_dict(state)

    # -- reports -------------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """For a row of the logs about training steps: TensorBoard, log_history.json and every other reporter get it.
        By convention under "name/"."""
        return {}

    def final_scalars(self) -> dict[str, float]:
        """For the last row of the logs, which is about the whole training."""
        return {}

    def opening_lines(self) -> list[str]:
        """What a person should know before training."""
        return []

    def figures(self) -> dict[str, Any]:
        """Sections of scu_metrics.json, by name."""
        return {}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(name, value) of the table at the end. ``figures``: all of scu_metrics.json."""
        return []

    def record(self, row: dict[str, Any]) -> None:
        """A row for ``history_file``, with the ``step`` that it is about; outside of a training, and on all ranks but
        the one that writes, nothing. Raises ControlError where there is no such file, or no such row can be kept."""
        if self.history_file is None:
            raise ControlError(
                f"{called(self)} records rows but has no history_file to keep them in; set "
                f'history_file = "{self.name or "own"}.json" in its class'
            )
        if not isinstance(row, Mapping) or not isinstance(row.get("step"), int):
            raise ControlError(
                f"{called(self)} records {short(row)}, a row without its step: a resumed run could not tell whether to "
                'write it again; record a dict with "step": state.global_step'
            )
        if self.history is not None:
            try:
                self.history.append(row)
            except TypeError as error:
                raise ControlError(
                    f"{called(self)} records a row that cannot be saved as JSON ({error}); record numbers, strings, "
                    "lists and dicts, and call tolist() on tensors"
                ) from error

    def rows_stand_until(self, step: int) -> int:
        """Step up to which rows of an earlier start are kept by a run that resumes from ``step``."""
        return step


def returned(loop: Loop, hook: str, value: Any) -> Any:
    """``value``, which ``hook`` of ``loop`` gave. Raises ControlError for None, and for ``batches`` without an
    iterator."""
    if value is None:
        raise ControlError(
            f"{called(loop)} returns None from {hook}(), as where a return was forgotten; the docstring of Loop.{hook} "
            "says what to return"
        )
    if hook == "batches" and not hasattr(value, "__next__"):
        raise ControlError(
            f"{called(loop)} returns a {type(value).__name__} from batches(), not an iterator; yield the batches one "
            "by one: what was taken beyond the count of the step would be lost"
        )
    return value


def called(loop: Loop) -> str:
    """As messages name a loop."""
    return f"the loop {type(loop).__name__}"


class LoopEvents(TrainerCallback):
    """The first of all callbacks where there are loops: opens and closes their histories, once for all of them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._is_due = self._is_scaled = False
        self._steps_begun = 0
        self._recording: list[Loop] = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.close()
        self._steps_begun = 0
        folder = run_folder(self.trainer)
        for loop in self.trainer.loops if args.should_save else ():
            if loop.history_file is not None:
                stand_until = loop.rows_stand_until(state.global_step)
                loop.history = opened(folder, loop.history_file, stand_until, begins=state.global_step == 0)
                self._recording.append(loop)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._is_due, self.trainer.step_is_taken_back, self.trainer.rate_of_step = True, False, None
        self._steps_begun += 1
        if self._steps_begun == 2 and args.should_save and args.save_strategy != "no":
            for loop in self.trainer.loops:
                if loop not in self.trainer._own_loops:  # of the user: at the first save all steps before it were lost
                    loop.require_savable()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """What builds on the last rate (``ReduceLROnPlateau``) must not find our factors in it."""
        if self._is_scaled:
            self._set_rates(1.0)

    def close(self) -> None:
        for loop in self._recording:  # also one that was removed since
            if loop.history is not None:
                loop.history.close()
                loop.history = None
        self._recording.clear()

    def scale_rates(self) -> None:
        """Once per step, when every loop has decided on its factor."""
        if self._is_due:
            self._is_due, factor = False, self.trainer.rate_factor
            if factor != 1.0:
                self._set_rates(factor)
            # DeepSpeed's engine moves a schedule that it has been given within its step: later it is at the next rate.
            if factor != 1.0 or isinstance(self.trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
                self.trainer.rate_of_step = float(self.trainer.optimizer.param_groups[0]["lr"])

    def _set_rates(self, factor: float) -> None:
        self._is_scaled = factor != 1.0
        scheduled = self.trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(self.trainer.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * factor


def run_folder(trainer: Any) -> Path:
    """Where a training writes: ``output_dir``, or the folder in it that a hyperparameter search has for each trial."""
    return Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))  # which no trainer has before train()


def opened(output_dir: Union[str, Path], name: str, step: int, begins: bool) -> History:
    """The history file of a run that goes on after ``step``, an epoch where rows are of epochs, or ``begins``."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    history = History(Path(output_dir) / name)
    dropped = history.truncate_after(-1 if begins else step)  # what is measured before step 1 is measured again
    if dropped and begins:
        logger.warning(
            "removed %s of %s in %s, from an earlier training: this one writes its own. To keep both, give each an "
            "output_dir of its own", counted(dropped, "row"), name, output_dir,
        )  # fmt: skip
    elif dropped:
        logger.info("removed %s of %s after step %d: this run writes its own", counted(dropped, "row"), name, step)
    return history
