"""The training step. START HERE.

``SCUTrainer`` is the stock ``transformers.Trainer`` with feedback loops attached, written as a mixin over any subclass
of it (``with_loops``). It calls the loops and computes nothing itself: ``loop.py`` defines what a loop is and when it
is called, ``loops/`` holds the loops of this package (one file each), ``engine.py`` computes a step, and ``control/``
holds the arithmetic of the loops.

Without loops every method here is the stock one (``is_stock``), bit for bit and including its errors, with two
exceptions: checkpoints are complete or absent, and a Hub token is never pickled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import torch
from transformers import DefaultFlowCallback, PreTrainedModel, Trainer, TrainerCallback

from scu_trainer.data.random_states import RngStates, preserve_rng_states, restore_rng_states, rng_states
from scu_trainer.errors import ControlError, NonFiniteLoss
from scu_trainer.hardware import heap
from scu_trainer.models.loading.hub_errors import as_hub_error
from scu_trainer.models.loading.safety import tensors_only
from scu_trainer.models.quantize import prevent_repacking
from scu_trainer.secrets import secret
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.checkpoints.findings import EPOCH_START, has_optimizer
from scu_trainer.train.checkpoints.optimizer_types import state_dtypes_kept
from scu_trainer.train.checkpoints.pushing import Pushes
from scu_trainer.train.checkpoints.renamed_weights import renamed_weights_loaded
from scu_trainer.train.checkpoints.selection import selected_checkpoint
from scu_trainer.train.checkpoints.writer import CheckpointWriter
from scu_trainer.train.epochs import epochs, run_and_report_epoch
from scu_trainer.train.loop import Loop, LoopEvents, checked_result
from scu_trainer.train.loop_checks import (
    checked_rate_factor,
    checked_scalars,
    error_for_late_loop,
    require_no_attribute_clash,
    require_no_conflicts,
    require_no_name_clash,
    require_settings,
    warn_about_unsaved_weights,
    warn_about_unused_argument,
)
from scu_trainer.train.loops import difficulty_of, make_loops
from scu_trainer.train.loss.rows.model_loss import defined_between, is_public, user_loss_below
from scu_trainer.train.loss.wrap import batches_to_count, prepare_wrapped_trainer, weighted_items
from scu_trainer.train.resuming import (
    advance_order,
    advance_schedule,
    check_resume,
    is_evaluated,
    is_evaluation_missing,
    stream_position,
    warn_about_loader,
    warn_about_no_step,
    warn_about_resume,
)
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.engine import StockEngine
from scu_trainer.train.step.recovery.loader_workers import protect_workers
from scu_trainer.train.step.recovery.memory import Gauge
from scu_trainer.train.step.recovery.snapshot import replaced


class SCUTrainer(Trainer):
    """``transformers.Trainer`` with feedback loops for regularization, memory and data.

    Takes everything that the stock Trainer takes (custom loops go into ``callbacks``), and

    - regularization: ``RegularizationSettings``, or None for no regularization loop. Without ``target_s`` the loop
      measures S and steers nothing.
    - regularization_tokens: N of ParamBPT, the supervised tokens of one pass over the training data. None: estimated
      from the first optimizer step. ``RegularizationSettings.tokens`` overrides both.
    - model: also any ``nn.Module`` whose forward returns its loss: as a bare tensor, first in a tuple, or as
      ``["loss"]``. ``compute_loss`` of a subclass, or ``compute_loss_func``, receives what the model returns.
    - memory: ``MemorySettings``, or None for the stock order of operations without recovery.
    - memory_gauge: reads the memory in use; None: the gauge of the device.
    - curriculum: ``CurriculumSettings``, or None for the stock order of samples, without their losses.
    - efficiency: ``EfficiencySettings`` (weight averages, layout, schedules in steps, throughput), or None.
    - safety: ``SafetySettings``, or None. With it, steps without a finite loss or gradient are skipped and a diverging
      loss is reported.

    Raises SettingsError if one of these settings has the wrong type, ControlError if lambda should act but cannot reach
    the trained weights (FSDP, ZeRO-3, float16 weights).
    """

    # The stock constructor calls methods of this class before __init__ below has set these attributes.
    is_stock = True
    _is_made = False
    regularizer = micro_batches = prediction = curriculum = nonfinite_guard = loss_path = None
    checkpoints = pushes = None
    resumes_weights_only = False
    new_loss_path: Callable[[], Any] = staticmethod(lambda: None)
    after_epoch: Optional[Callable[[dict[str, float]], None]] = None
    _events: Optional[LoopEvents] = None
    _own_loops: tuple[Loop, ...] = ()
    _known_callbacks: Sequence[TrainerCallback] = ()
    _loops: Sequence[Loop] = ()
    _steps_per_epoch: Optional[int] = None
    _flops_per_entry: Optional[int] = None
    _is_training = _rests = False
    _epoch_began: Optional[RngStates] = None
    step_is_taken_back = False
    """Whether a loop has vetoed the current step."""
    rate_of_step: Optional[float] = None
    """The learning rate of the current step, if the schedule no longer holds it after the step."""
    task_loss: Optional[torch.Tensor] = None
    """The task's own loss in the accumulation batch of the current ``on_loss``, without what loops add to it."""
    difficulty = property(difficulty_of)
    # For calls of training_step before train(): the stock Trainer sets it in train().
    current_gradient_accumulation_steps = 1

    def __init__(
        self,
        *args: Any,
        regularization: Optional[RegularizationSettings] = None,
        regularization_tokens: Optional[float] = None,
        memory: Optional[MemorySettings] = None,
        memory_gauge: Optional[Gauge] = None,
        curriculum: Optional[CurriculumSettings] = None,
        efficiency: Optional[EfficiencySettings] = None,
        safety: Optional[SafetySettings] = None,
        **kwargs: Any,
    ) -> None:
        require_settings(
            ("regularization", regularization, RegularizationSettings),
            ("memory", memory, MemorySettings),
            ("curriculum", curriculum, CurriculumSettings),
            ("efficiency", efficiency, EfficiencySettings),
            ("safety", safety, SafetySettings),
        )
        warn_about_unused_argument("memory_gauge", memory_gauge, "memory", memory, MemorySettings)
        warn_about_unused_argument(
            "regularization_tokens", regularization_tokens, "regularization", regularization, RegularizationSettings
        )
        # With every loop off, every method below is the stock one.
        self.is_stock = (regularization, memory, curriculum, efficiency, safety) == (None,) * 5
        self.engine = StockEngine(self)
        super().__init__(*args, **kwargs)
        require_no_attribute_clash(self, SCUTrainer)
        self.args.hub_token = secret(self.args.hub_token)  # each checkpoint contains a pickled copy of the arguments
        prepare_wrapped_trainer(self)
        self._is_made = True
        given_loops = self.loops
        efficiency = efficiency or EfficiencySettings()
        self._own_loops = tuple(
            make_loops(
                self, regularization, regularization_tokens, memory, memory_gauge, curriculum, efficiency, safety
            )
        )
        for loop in given_loops:  # add them again after our own
            self.callback_handler.callbacks.remove(loop)
        for loop in (*self._own_loops, *given_loops):
            self.add_callback(loop)
        self.resumes_weights_only = safety is not None and safety.weights_only
        self.checkpoints = CheckpointWriter(self)
        self.pushes = Pushes(self)

    # -- loops ---------------------------------------------------------------------------------------------------------

    @property
    def loops(self) -> list[Loop]:
        """All loops of this trainer, in the order in which they are called."""
        callbacks, known = self.callback_handler.callbacks, self._known_callbacks
        if len(callbacks) != len(known) or not all(map(operator.is_, callbacks, known)):  # read many times per step
            self._known_callbacks = tuple(callbacks)
            self._loops = [callback for callback in callbacks if isinstance(callback, Loop)]
        return list(self._loops)

    def loop(self, name: str) -> Optional[Loop]:
        """Return the loop with this name, or None if it is off."""
        return next((loop for loop in self.loops if loop.name == name), None)

    def add_callback(self, callback: Union[TrainerCallback, type[TrainerCallback]]) -> None:
        super().add_callback(callback)
        newest = self.callback_handler.callbacks[-1]
        if isinstance(newest, Loop) and self._is_made:
            self._attach_loop(newest)

    def _attach_loop(self, loop: Loop) -> None:
        callbacks = self.callback_handler.callbacks
        try:
            require_no_conflicts(loop, [other for other in callbacks[:-1] if isinstance(other, Loop)])
            if self._is_training:
                raise error_for_late_loop(loop)
        except ControlError:
            callbacks.pop()
            raise
        self.is_stock = False
        if self._events is None:
            self._events = LoopEvents(self)
            self.callback_handler.callbacks.insert(0, self._events)  # before the user's callbacks
        if loop.is_first:
            self.callback_handler.callbacks.remove(loop)
            self.callback_handler.callbacks.insert(1, loop)
        loop.attach(self)

    @property
    def rate_factor(self) -> float:
        """The product of the ``rate_factor`` of all loops: this step multiplies the scheduled learning rate by it."""
        factor = 1.0
        for loop in self.loops:
            own = loop.rate_factor
            factor *= own if isinstance(own, float) and 0 <= own < math.inf else checked_rate_factor(loop)
        return factor

    def _get_learning_rate(self) -> float:
        return super()._get_learning_rate() if self.rate_of_step is None else self.rate_of_step

    # -- a training ----------------------------------------------------------------------------------------------------

    @functools.wraps(Trainer.train)
    def train(self, *args, **kwargs):
        given = _arguments_by_name(Trainer.train, args, kwargs)
        if given.get("resume_from_checkpoint"):
            takes_weights_only = self.resumes_weights_only or self.is_stock
            given["resume_from_checkpoint"] = selected_checkpoint(
                given["resume_from_checkpoint"],
                self.args.output_dir,
                takes_weights_only,
                is_main=self.is_world_process_zero(),
            )
            if not self.is_stock:
                check_resume(Path(str(given["resume_from_checkpoint"])), self)
        self._reset_for_training()
        self._is_training, loops = True, self.loops  # loops that are removed during training get their end() too
        try:
            with self.engine.error_context(lambda: f"step {self.state.global_step + 1} of training"):
                return super().train(**given)
        finally:
            self._is_training = False
            with contextlib.ExitStack() as ends:  # call every end(), even if one of them raises
                if self._events is not None:
                    ends.callback(self._events.close)
                for loop in reversed(loops):
                    ends.callback(loop.end)

    def epochs(self, **arguments: Any) -> Iterator[dict[str, float]]:
        """Run ``train(**arguments)`` epoch by epoch: ``for metrics in trainer.epochs(): ...``

        Yields after each epoch a dict with ``epoch`` and ``step`` (completed so far), ``train_loss`` (mean over the
        steps of the epoch) and the ``eval_...`` metrics of the last evaluation in the epoch. Leaving the ``for`` loop
        ends the training as a callback would. Raises ControlError while another ``epochs`` of this trainer is running,
        and whatever ``train`` raises.
        """
        return epochs(self, **arguments)

    def save(self, path: Union[str, Path]) -> None:
        """Write a checkpoint to the new folder ``path``: weights, optimizer, loops and random states.

        The folder is complete or absent. ``train(resume_from_checkpoint=path)`` resumes from it. ``save_total_limit``
        does not count it. Every rank must call this, between steps or after training. Raises ControlError before the
        first training, StorageError if ``path`` already exists or cannot be written.
        """
        if self.optimizer is None or self.state.global_step == 0:
            raise ControlError("there is no training to save yet: call train() or epochs() first, or save_model(path)")
        self.before_save()
        self.checkpoints.save_as(Path(path), functools.partial(super()._save_checkpoint, self.model_wrapped, None))

    def _reset_for_training(self) -> None:
        """Reset everything that an earlier call of ``train`` counted or learned about the model. Raises ControlError if
        one of the trainer's own loops was removed."""
        missing = [type(one).__name__ for one in self._own_loops if one not in self.loops]
        if missing:
            raise ControlError(
                f"{', '.join(missing)} was removed from this trainer, which was set up to use it; create the trainer "
                "without the loop, or put it back with add_callback"
            )
        if not self.is_stock:
            heap.settle_malloc_thresholds()
            if self.is_world_process_zero() and not is_sharded(self):
                warn_about_unsaved_weights(self.model)
        for loop in self.loops:
            loop.trainer = self  # as _owning_loops does around evaluations, but for the whole training
            loop.begin()
        self.loss_path = self.new_loss_path()
        self._flops_per_entry = None

    def get_train_dataloader(self):
        chosen = _first_not_none(loop.loader() for loop in self.loops)
        return super().get_train_dataloader() if chosen is None else chosen

    def _get_dataloader(self, *args, **kwargs):
        loader = super()._get_dataloader(*args, **kwargs)
        return self.engine.prepare_loader(loader if self.is_stock else protect_workers(loader))

    def _wrap_model(self, model, *args, **kwargs):
        if not self.is_stock:
            prevent_repacking(model)  # also without evaluations, because the loops compute losses without a gradient
        return super()._wrap_model(model, *args, **kwargs)

    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        self._steps_per_epoch = values[1]
        for loop in self.loops:
            values = checked_result(loop, "training_values", loop.training_values(values))
        return values

    @functools.wraps(Trainer.create_scheduler)
    def create_scheduler(self, *args, **kwargs):
        given = _arguments_by_name(Trainer.create_scheduler, args, kwargs)
        if self.lr_scheduler is None:
            optimizer = self.optimizer if given.get("optimizer") is None else given["optimizer"]
            zero = getattr(optimizer, "optimizer", None)
            if hasattr(zero, "optimizer") and not hasattr(zero, "defaults"):
                zero.defaults = zero.optimizer.defaults  # for DeepSpeed, where the polynomial schedule reads its rate
            arguments = optimizer, given["num_training_steps"], self._steps_per_epoch
            self.lr_scheduler = _first_not_none(loop.scheduler(*arguments) for loop in self.loops)
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(**given)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        for loop in self.loops if self._is_made else ():
            loop.on_model(model)
        return model

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        arguments = (max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
        position = super()._init_training_state(*arguments)
        is_stream = num_train_epochs == sys.maxsize  # the value that the stock Trainer uses for data without a length
        if resume_from_checkpoint is not None and is_stream and not self.is_stock and not self.args.ignore_data_skip:
            position = stream_position(Path(resume_from_checkpoint), self.args.gradient_accumulation_steps)
        for loop in self.loops if resume_from_checkpoint is not None else ():
            new_position = loop.resume_position(resume_from_checkpoint, position)
            position = checked_result(loop, "resume_position", new_position)
        if resume_from_checkpoint is not None and not self.is_stock and self.is_over and self.is_world_process_zero():
            warn_about_no_step(self)
        return position

    @property
    def is_over(self) -> bool:
        """Whether no step is left to train."""
        return self.state.global_step >= self.state.max_steps or any(loop.is_over for loop in self.loops)

    def _run_epoch(self, **kwargs):
        if self.is_over and not self.is_stock:  # killed after its last step: the stock loop would add another one
            self.control.should_training_stop = True
            return None
        is_resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        is_at_start = is_resumed and kwargs["steps_trained_in_current_epoch"] == 0
        if is_at_start and not self.is_stock and is_evaluation_missing(self.state, self.args):
            self._load_rng_state(kwargs["resume_from_checkpoint"])
            self._end_epoch(kwargs["model"], kwargs["trial"], kwargs["start_time"], kwargs["ignore_keys_for_eval"])
            if self.control.should_training_stop:
                return None
            kwargs["resume_from_checkpoint"] = None  # already loaded above, and the evaluation has drawn from it since
        skipped = kwargs["steps_trained_in_current_epoch"] if is_resumed else 0
        for loop in self.loops:
            kwargs |= loop.begin_epoch(kwargs["epoch"], skipped) or {}
        position = kwargs["steps_trained_in_current_epoch"]
        skips = is_resumed and position > 0 and not self.args.ignore_data_skip
        if is_resumed and self.is_world_process_zero():
            warn_about_loader(kwargs["train_dataloader"], kwargs["epoch"], skips, self.is_stock)
        if not self.is_stock:
            if is_resumed:
                advance_order(kwargs["train_dataloader"], kwargs["epoch"])
            checkpoint = kwargs["resume_from_checkpoint"] if is_resumed else None
            # the random states that the order of the rows is drawn from; the stock loop restores those of the step
            if checkpoint is not None and (skips or position == 0):
                self._load_rng_state(str(Path(checkpoint, EPOCH_START) if skips else checkpoint))
            self._epoch_began = rng_states()
        run = functools.partial(super()._run_epoch, **kwargs)
        return run_and_report_epoch(self, functools.partial(self.engine.run_epoch, run, kwargs["train_dataloader"]))

    def _end_epoch(self, model, trial, start_time, ignore_keys=None) -> None:
        """Log, save and evaluate for an epoch that was saved after its last step but before its evaluation."""
        self.control = DefaultFlowCallback().on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(self._tr_loss, None, model, trial, self.state.epoch, ignore_keys, start_time)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        is_resumed_here = self.state.global_step == self._initial_global_step > 0 and not self.is_stock
        if is_resumed_here and is_evaluated(self.state):  # at the end of a pass over a stream that was trained before
            self.control.should_evaluate = False
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, trial, num_train_samples, start_time):
        is_resumed_at_end = self.state.global_step == self._initial_global_step > 0 and not self.is_stock
        if is_resumed_at_end and is_evaluation_missing(self.state, self.args):
            self._end_epoch(self.model_wrapped, trial, start_time)
        rows = _first_not_none(loop.rows_trained for loop in self.loops)
        if rows is not None:  # the stock loop multiplies this number by the same share
            share = (self.state.global_step - self._initial_global_step) / max(self.state.max_steps, 1)
            num_train_samples = rows / share if share else 0
        return super()._finalize_training(trial, num_train_samples, start_time)

    # -- a step --------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        for loop in reversed(self.loops):
            epoch_iterator = checked_result(loop, "batches", loop.batches(epoch_iterator, num_batches))
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for loop in self.loops:
            loop.on_window(batches, num_items)
        return batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        if not self._is_training:  # called outside of train(), so no loop acts: run the stock step
            with replaced(self, "_rests", True):
                return super().training_step(model, inputs, num_items_in_batch)
        loops = self.loops
        if loops:
            self._events.scale_rates()
        for batch in self.engine.next_to_run(inputs):
            for loop in loops:
                loop.on_batch(batch, num_items_in_batch)
        try:
            loss = self.engine.loss(model, inputs, num_items_in_batch)
        except NonFiniteLoss as error:
            for loop in loops:
                loop.on_nonfinite(error)
            raise
        loss, self.task_loss = loss.unbind() if loss.numel() == 2 else (loss, loss)
        for loop in loops:
            loop.on_loss(loss, num_items_in_batch)
        if self.accelerator.sync_gradients and loops:
            scale = self._loss_scale()  # read once, because it waits for the device
            for loop in loops:
                loop.on_gradients(scale)
        return loss

    def stock_training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Run forward and backward of one micro-batch as ``transformers.Trainer`` does for a batch; return its loss. If
        a loop adds to the loss, the result has shape (2,): the full loss and the task's own loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        task_loss = _first_not_none(loop.task_loss(loss) for loop in self.loops)
        # Clone, because losses are kept while further batches run, and a CUDA graph (torch_compile_mode:
        # reduce-overhead) overwrites the loss of the previous batch in place.
        return loss.clone() if task_loss is None else torch.stack([loss, task_loss])

    def _loss_scale(self) -> float:
        scaler = self.accelerator.scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        path = self.loss_path
        if path is None:
            return self._stock_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._rests or return_outputs or not model.training:
            inputs = path.inputs_for_model(inputs)
            with self.engine.forward_context(inputs):
                return self._stock_loss(model, inputs, return_outputs, num_items_in_batch)
        return path.loss(model, inputs, num_items_in_batch)

    def _stock_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """Compute the loss as the stock Trainer does; a plain module may also return a bare loss tensor."""
        for loop in self.loops:
            inputs = checked_result(loop, "on_forward", loop.on_forward(inputs))
        given = {"num_items_in_batch": num_items_in_batch, **({"return_outputs": True} if return_outputs else {})}
        is_plain = not (isinstance(self.model, PreTrainedModel) or self.compute_loss_func or user_loss_below(self))
        with self.model.register_forward_hook(_bare_loss_in_tuple) if is_plain else contextlib.nullcontext():
            return super().compute_loss(model, inputs, **given)

    @property
    def changes_loss(self) -> bool:
        """Whether user code computes the loss or changes what the model returns as its loss."""
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind) and kind is not SCUTrainer]
        return self.compute_loss_func is not None or not all(map(is_public, owners))

    def _get_num_items_in_batch(self, batch_samples, device):
        def count(on_device):
            items = super(SCUTrainer, self)._get_num_items_in_batch(batches_to_count(self, batch_samples), on_device)
            return weighted_items(self, batch_samples, items, on_device)

        return self.engine.count_labels(count, batch_samples, device)

    def _clip_grad_norm(self, model):
        return self.engine.clip_gradients(functools.partial(super()._clip_grad_norm, model))

    def _get_grad_norm(self, model, grad_norm=None):
        norm = functools.partial(super()._get_grad_norm, model, grad_norm=grad_norm)
        norm = norm() if grad_norm is not None else self.engine.clip_gradients(norm)
        for loop in self.loops:
            logged = loop.on_grad_norm(norm)
            if logged is not None or self.step_is_taken_back:
                norm = logged
        return norm

    def floating_point_ops(self, inputs) -> int:
        """Return the stock count, with the weights counted once per training, which takes long for a small step."""
        is_counted = self._is_training and not self.is_stock and not defined_between(self, "floating_point_ops")
        name = getattr(self.model, "main_input_name", "input_ids")
        entries = inputs[name] if is_counted and name in inputs else None
        if not torch.is_tensor(entries) or not entries.numel():
            return super().floating_point_ops(inputs)
        if self._flops_per_entry is None:
            self._flops_per_entry = super().floating_point_ops(inputs) // entries.numel()
        return self._flops_per_entry * entries.numel()

    # -- evaluation and logs -------------------------------------------------------------------------------------------

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        ignore_keys = getattr(self.model, "keys_to_ignore_at_inference", None) if ignore_keys is None else ignore_keys

        def predict(part):
            return super(SCUTrainer, self).prediction_step(model, part, prediction_loss_only, ignore_keys=ignore_keys)

        return self.engine.run_prediction(predict, inputs, prediction_loss_only)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        # True only for eval_on_start; a run that resumes has started before, and early stopping would count it again
        if skip_scheduler and self.state.global_step > 0 and not self.is_stock:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    @functools.wraps(Trainer.evaluate)
    def evaluate(self, *args, **kwargs):
        with self._owning_loops():
            return super().evaluate(*args, **kwargs)

    @functools.wraps(Trainer.predict)
    def predict(self, *args, **kwargs):
        with self._owning_loops():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _owning_loops(self) -> Iterator[None]:
        """Inside, ``loop.trainer`` is this trainer, even if a loop is shared with another trainer that is training."""
        previous_owners = [(loop, loop.trainer) for loop in self.loops]
        for loop, _ in previous_owners:
            loop.trainer = self
        try:
            yield
        finally:
            for loop, trainer in previous_owners:
                loop.trainer = trainer

    @functools.wraps(Trainer.evaluation_loop)
    def evaluation_loop(self, *args, **kwargs):
        given = _arguments_by_name(Trainer.evaluation_loop, args, kwargs)
        dataloader = given.pop("dataloader")
        evaluate = functools.partial(super().evaluation_loop, dataloader, **given)
        loss_only = given.get("prediction_loss_only")
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        with self.engine.error_context(lambda: "evaluation"), contextlib.ExitStack() as stack:
            for loop in self.loops:
                stack.enter_context(checked_result(loop, "evaluation", loop.evaluation()))
            return self.engine.run_evaluation(evaluate, dataloader, loss_only)

    def log(self, logs: dict[str, float], start_time: Optional[float] = None) -> None:
        for loop in self.loops:
            if "loss" in logs:
                logs.update(checked_scalars(loop, "scalars", logs))
            elif "train_runtime" in logs:
                logs.update(checked_scalars(loop, "final_scalars", logs))
        super().log(logs, start_time)

    # -- checkpoints: complete or absent. The stock method writes to a staging folder, which is renamed at the end. ----

    def _save_checkpoint(self, model, trial):
        self.before_save()
        self.checkpoints.save(trial, functools.partial(super()._save_checkpoint, model, trial))

    def _load_best_model(self):
        if self.checkpoints.last_is_better():
            self.state.best_model_checkpoint = None  # tells callbacks that the weights are those of the last step
        else:
            with renamed_weights_loaded(self, self.state.best_model_checkpoint, self.model):
                super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with renamed_weights_loaded(self, resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def before_save(self) -> None:
        """Raise, on all ranks, if a loop objects to saving the current weights."""
        for loop in self.loops:
            loop.before_save()

    def _get_output_dir(self, trial):
        staging = self.checkpoints.staging
        return super()._get_output_dir(trial) if staging is None else str(staging)

    # States of the loops are saved with the optimizer's: both are needed to resume training, not to use the model.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        for loop in self.loops:
            loop.save_state(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._epoch_began is not None:
            folder = Path(output_dir, EPOCH_START)
            folder.mkdir(exist_ok=True)
            with preserve_rng_states():
                restore_rng_states(self._epoch_began)
                super()._save_rng_state(str(folder))

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        with tensors_only(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        with tensors_only(checkpoint), state_dtypes_kept(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.is_world_process_zero():
            warn_about_resume(Path(checkpoint), self, self._steps_per_epoch)
        if self.is_stock or checkpoint is None:
            return
        if not has_optimizer(Path(checkpoint)):  # saved with weights_only, so everything else starts over
            advance_schedule(self.lr_scheduler, Path(checkpoint))
            return
        for loop in self.loops:
            loop.load_state(checkpoint)

    # -- the Hub -------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: Optional[str] = None, private: Optional[bool] = None) -> None:
        if self.is_stock:
            return super().init_hf_repo(token, private)
        with as_hub_error(self.args.hub_model_id or Path(self.args.output_dir).name):
            super().init_hf_repo(token, private)
        if self.hub_model_id is not None:  # only the main process asks the Hub
            self.args.hub_model_id = self.hub_model_id  # now includes the owner

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.checkpoints.push_later(super()._push_from_checkpoint if self.is_stock else self.pushes.begin)


@functools.cache
def with_loops(trainer_class: type[Trainer]) -> type[SCUTrainer]:
    """Return ``trainer_class``, any subclass of ``transformers.Trainer``, with feedback loops mixed in.

    It takes the arguments of both, and is the same class for the same ``trainer_class``. Raises TypeError for anything
    else, ControlError if ``trainer_class`` defines a name or takes an argument that ``SCUTrainer`` needs.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"with_loops takes a subclass of transformers.Trainer, not {trainer_class!r}")
    if issubclass(trainer_class, SCUTrainer):
        return trainer_class
    if issubclass(SCUTrainer, trainer_class):  # Trainer itself
        return SCUTrainer
    require_no_name_clash(trainer_class, SCUTrainer)
    return type(f"SCU{trainer_class.__name__}", (SCUTrainer, trainer_class), {})


def _first_not_none(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _arguments_by_name(method: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments, and no others, by their names in ``method`` of the stock Trainer. An override may
    take them in another order, with other defaults, or not at all."""
    bound = inspect.signature(method).bind(None, *args, **kwargs)
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _bare_loss_in_tuple(module: torch.nn.Module, inputs: Any, output: Any) -> Optional[tuple[torch.Tensor]]:
    """Wrap a bare loss in a tuple. A forward hook at module level, so that it holds no trainer and can be pickled."""
    return (output,) if torch.is_tensor(output) and output.dim() == 0 else None
