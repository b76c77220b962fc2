"""The base class of feedback loops: a ``TrainerCallback`` with extra hooks where the stock Trainer has no event.

A training calls them in this order. Names in brackets are methods of every loop, called in the order of
``trainer.loops``; the other names are events of ``transformers.TrainerCallback``:

    [begin]                                       forget what an earlier training left behind
    [loader]                                      the first loop with a data loader provides it
    [load_state]                                  if the run resumes from a checkpoint
    on_train_begin                                ``history_file`` is open from here on
    for each epoch:
        [begin_epoch]
        for each optimizer step:
            [batches]                             may replace the iterator of accumulation batches
            [on_window]                           the accumulation batches of the step are known
            on_step_begin
            ``rate_factor``                       those of all loops multiply the scheduled learning rate
            for each accumulation batch:
                [on_batch]
                forward and backward              by the engine, in micro-batches: [on_forward], [task_loss];
                                                  [on_nonfinite] if the loss is not finite
                [on_loss]
            [on_gradients]                        gradients are complete, but not clipped yet
            [on_grad_norm]                        gradients are clipped; a loop may veto the step: [on_step_taken_back]
            optimizer.step
            on_optimizer_step
            on_step_end
            [scalars], on_log                     every ``logging_steps``
            [evaluation], on_evaluate             every ``eval_steps``
            [before_save], [save_state], on_save  every ``save_steps``
    [final_scalars]
    on_train_end
    [end]                                         also after an error

No method does anything unless a loop overrides it. Every rank calls each of them at the same place.
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
from scu_trainer.figures import count_text
from scu_trainer.run_files import History, state_text, write_state
from scu_trainer.settings.base import short
from scu_trainer.train.checkpoints.saved_state import read_state, reading

logger = logging.getLogger("scu_trainer")


class Loop(TrainerCallback):
    """Base class of all loops. Pass one like any callback: ``callbacks=[MyLoop()]`` or ``add_callback``.

    name: key of its section in scu_metrics.json.
    state_file: file name in a checkpoint for what ``state_dict`` returns; None: nothing is saved.
    history_file: file name in the run directory for the rows of ``record``, one JSON array; None: no such file.
    rate_factor: multiplies the scheduled learning rate of the next step.
    is_first: call its events before those of every other callback except ``LoopEvents``.
    notices: what the user should know at the end of the run; also written to run.json.
    """

    name = ""
    state_file: Optional[str] = None
    history_file: Optional[str] = None
    rate_factor: float = 1.0
    notices: Sequence[str] = ()
    is_first = False
    trainer: Any = None  # an SCUTrainer, which cannot be imported here: its module imports this one
    history: Optional[History] = None

    def attach(self, trainer: Trainer) -> None:
        """Called once, when the loop is added to a trainer."""
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.trainer is None:
            raise ControlError(
                f"{name_of_loop(self)} was passed to a trainer without loops, which would never call its hooks; pass "
                "it to SCUTrainer, or wrap your Trainer class: with_loops(Trainer)"
            )

    on_epoch_begin = on_train_begin  # also checked for a loop that overrides on_train_begin without calling super()

    # -- a training ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called before a training is set up and reads its checkpoint. The model may differ from the previous one."""

    def end(self) -> None:
        """Called after a training, also after one that raised."""

    def on_model(self, model: torch.nn.Module) -> None:
        """Called when ``model_init`` has made a new model."""

    def loader(self) -> Optional[DataLoader]:
        """Return the training data loader if this loop chooses the data; None leaves that to the other loops."""

    def training_values(self, values: tuple) -> tuple:
        """Return ``values``, changed if needed: what ``Trainer.set_initial_training_values`` returns."""
        return values

    def scheduler(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: Optional[int]) -> Any:
        """Return a learning rate schedule that replaces the stock one; None keeps the stock one."""

    @property
    def rows_trained(self) -> Optional[int]:
        """Rows trained in this training, if epochs are not as long as the stock Trainer assumes; else None."""

    @property
    def is_over(self) -> bool:
        """Whether this loop has ended the training. A run that resumes from such a checkpoint takes no step."""
        return False

    # -- an epoch, a step ----------------------------------------------------------------------------------------------

    def resume_position(self, checkpoint: str, position: tuple[int, int]) -> tuple[int, int]:
        """Return (epoch to resume in, batches of it already done). ``position``: the same, from the previous loops."""
        return position

    def begin_epoch(self, epoch: int, skipped_batches: int) -> Mapping[str, int]:
        """Return the arguments of ``Trainer._run_epoch`` that should differ from the stock ones."""
        return {}

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Return an iterator over the accumulation batches of the next step, of which ``count`` are taken. Take no more
        of ``batches``: they would be lost. The last loop is closest to the loader."""
        return batches

    def on_window(self, batches: Sequence[Any], num_items: Any) -> None:
        """Called with all accumulation batches of the next step; with the memory loop they are still on the host."""

    def on_batch(self, inputs: Any, num_items: Any) -> None:
        """Called before an accumulation batch is trained on; with the memory loop, for all of a step at its start."""

    def on_forward(self, inputs: Any) -> Any:
        """Return the inputs on which the loss is computed.

        inputs: of a micro-batch, on the device, with labels. Also called when rows are only analyzed or evaluated, and
        again after a micro-batch ran out of memory.
        """
        return inputs

    def task_loss(self, loss: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the task's own part of ``loss``, the loss of the micro-batch that was just trained on, on the same
        scale; None if the loop added nothing to it."""

    def on_nonfinite(self, error: NonFiniteLoss) -> Optional[NoReturn]:
        """Called when a step has no finite loss. May raise a better error, after a checkpoint."""

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        """Called with the detached loss of an accumulation batch, on the device, as the stock ``training_step`` has it.

        ``trainer.task_loss`` is the task's own part of it. With the memory loop only the sum over a step is exact: the
        loss of a micro-batch with rows of several batches is counted for the first of them.
        """

    def on_gradients(self, loss_scale: float) -> None:
        """Called when the gradients of the step are complete. ``loss_scale``: the scale of a GradScaler in them."""

    def on_grad_norm(self, norm: Any) -> Any:
        """Return the gradient norm to log; None: ``norm`` unchanged. ``norm``: over all ranks, before clipping; None if
        an earlier loop has vetoed the step."""
        return norm

    def on_step_taken_back(self) -> None:
        """Called when a loop has vetoed the current step and everything is as it was before the step."""

    def evaluation(self) -> AbstractContextManager:
        """Return a context manager that is entered around every evaluation."""
        return contextlib.nullcontext()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Called before weights are saved. May raise, on all ranks, if they should not be saved now."""

    def state_dict(self) -> Optional[dict[str, Any]]:
        """Return the content of ``state_file`` as JSON values (tuples come back as lists); None: no file. Also called
        once after the first step, to check that it can be saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, as ``state_dict`` returned it."""

    def save_state(self, folder: str) -> None:
        """Write the state into the folder of a checkpoint. Called on every rank; that with ``should_save`` writes."""
        if self.state_file is not None and self.trainer.args.should_save:
            self._write_state(functools.partial(write_state, Path(folder) / self.state_file))

    def require_savable(self) -> None:
        """Raise ControlError if ``state_dict`` returns something that ``save_state`` could not write."""
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
                f"{name_of_loop(self)} has a state_dict that cannot be saved as JSON ({error}); return a dict of "
                "numbers, strings, lists and dicts with string keys, and call tolist() on tensors"
            ) from error

    def load_state(self, checkpoint: str) -> None:
        """Read the state from a checkpoint. Without the file, the run had no such loop, and this one starts fresh."""
        if self.state_file is None:
            return
        path = Path(checkpoint) / self.state_file
        if not path.is_file():
            if self.trainer.is_world_process_zero():
                logger.warning("%s has no %s: %s starts fresh", path.parent, path.name, name_of_loop(self))
            return
        state = read_state(path)
        with reading(path, f"load_state_dict of {name_of_loop(self)}"):
            self.load_state_dict(state)

    # -- reports -------------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return values for a log row about training steps, which every reporter gets, such as TensorBoard and
        log_history.json. By convention their names begin with "name/"."""
        return {}

    def final_scalars(self) -> dict[str, float]:
        """Return values for the last log row, which is about the whole training."""
        return {}

    def opening_lines(self) -> list[str]:
        """Return lines that the user should see before training."""
        return []

    def figures(self) -> dict[str, Any]:
        """Return sections of scu_metrics.json by their names."""
        return {}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return (name, value) pairs for the table at the end. ``figures``: all of scu_metrics.json."""
        return []

    def record(self, row: dict[str, Any]) -> None:
        """Append ``row``, a dict with its ``step``, to ``history_file``; outside of a training, and on ranks that do
        not write, do nothing. Raises ControlError if there is no such file or the row cannot be saved."""
        if self.history_file is None:
            raise ControlError(
                f"{name_of_loop(self)} records rows but has no history_file to keep them in; set "
                f'history_file = "{self.name or "own"}.json" in its class'
            )
        if not isinstance(row, Mapping) or not isinstance(row.get("step"), int):
            raise ControlError(
                f"{name_of_loop(self)} records {short(row)}, a row without its step: a resumed run could not tell "
                'whether to write it again; record a dict with "step": state.global_step'
            )
        if self.history is not None:
            try:
                self.history.append(row)
            except TypeError as error:
                raise ControlError(
                    f"{name_of_loop(self)} records a row that cannot be saved as JSON ({error}); record numbers, "
                    "strings, lists and dicts, and call tolist() on tensors"
                ) from error

    def rows_stand_until(self, step: int) -> int:
        """Return the last step for which rows of an earlier start are kept when a run resumes from ``step``."""
        return step


def checked_result(loop: Loop, hook: str, value: Any) -> Any:
    """Return ``value``, which ``hook`` of ``loop`` returned. Raises ControlError if it is None, or if ``batches``
    returned something that is not an iterator."""
    if value is None:
        raise ControlError(
            f"{name_of_loop(loop)} returns None from {hook}(), perhaps because a return is missing; the docstring of "
            f"Loop.{hook} says what to return"
        )
    if hook == "batches" and not hasattr(value, "__next__"):
        raise ControlError(
            f"{name_of_loop(loop)} returns a {type(value).__name__} from batches(), not an iterator; yield the batches "
            "one by one: batches taken beyond the count of the step would be lost"
        )
    return value


def name_of_loop(loop: Loop) -> str:
    """Return the name of a loop for messages."""
    return f"the loop {type(loop).__name__}"


class LoopEvents(TrainerCallback):
    """The first of all callbacks if there are loops: opens and closes their histories and scales the learning rate."""

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
                loop.history = open_history(folder, loop.history_file, stand_until, begins=state.global_step == 0)
                self._recording.append(loop)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._is_due, self.trainer.step_is_taken_back, self.trainer.rate_of_step = True, False, None
        self._steps_begun += 1
        if self._steps_begun == 2 and args.should_save and args.save_strategy != "no":
            for loop in self.trainer.loops:
                # a user's loop; an error at the first save would lose all steps before it
                if loop not in self.trainer._own_loops:
                    loop.require_savable()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Restore the scheduled rates, because ``ReduceLROnPlateau`` must not build on a rate with our factors."""
        if self._is_scaled:
            self._set_rates(1.0)

    def close(self) -> None:
        for loop in self._recording:  # including loops that were removed since
            if loop.history is not None:
                loop.history.close()
                loop.history = None
        self._recording.clear()

    def scale_rates(self) -> None:
        """Apply ``rate_factor`` once per step, after every loop has decided on its factor."""
        if self._is_due:
            self._is_due, factor = False, self.trainer.rate_factor
            if factor != 1.0:
                self._set_rates(factor)
            # DeepSpeed's engine advances its schedule inside the step, so afterwards it holds the next rate.
            if factor != 1.0 or isinstance(self.trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
                self.trainer.rate_of_step = float(self.trainer.optimizer.param_groups[0]["lr"])

    def _set_rates(self, factor: float) -> None:
        self._is_scaled = factor != 1.0
        scheduled = self.trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(self.trainer.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * factor


def run_folder(trainer: Any) -> Path:
    """Return the folder that a training writes to: ``output_dir``, or that of a hyperparameter search trial in it."""
    return Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))  # _trial does not exist before train()


def open_history(output_dir: Union[str, Path], name: str, step: int, begins: bool) -> History:
    """Open the history file of a run that ``begins``, or continues after ``step`` (an epoch, if rows are per epoch)."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    history = History(Path(output_dir) / name)
    dropped = history.truncate_after(-1 if begins else step)  # rows from before step 1 are measured again
    if dropped and begins:
        logger.warning(
            "removed %s of %s in %s, from an earlier training, because this run writes its own; to keep both, use "
            "a different output_dir for each", count_text(dropped, "row"), name, output_dir,
        )  # fmt: skip
    elif dropped:
        logger.info(
            "removed %s of %s after step %d, because this run writes its own", count_text(dropped, "row"), name, step
        )
    return history
