"""The training step. START HERE.

``SCUTrainer`` is the stock ``transformers.Trainer`` with controllers attached. It adapts and computes nothing itself: S
and lambda live in ``regularizer.py``, chunks and memory in ``chunked_step.py``, samples in ``curriculum_loop.py``,
their arithmetic in ``control/``. One optimizer step runs

    (_run_epoch                                   the epoch's samples are planned from the losses of the last one)
    get_batch_samples                             the window's accumulation batches are noted
    training_step (once per accumulation batch)
      first batch of the window                   all rows of the window, chunk by chunk: forward, backward; the chunk
                                                  size for the next window is decided; one reduction over ranks
      every batch                                 its loss is handed to the regularizer
      last batch of the window                    penalty actuator: lambda's gradient is added
    stock loop                                    clip
    _get_grad_norm                                a step whose loss or gradient is no number is taken back and skipped
    stock loop                                    optimizer.step
    RegularizationCallback.on_optimizer_step      decoupled actuator pulls, S is measured, lambda is decided

``compute_loss`` goes through ``loss_path.py``, which reads the loss of each row for the curriculum.
With ``regularization=None``, ``memory=None`` and ``curriculum=None`` none of this runs, and the result is the stock
Trainer's bit for bit. Without ``efficiency`` and ``safety`` as well (``is_stock``) every method here is the stock one,
errors included, but for checkpoints that are whole or absent, and a Hub token that is never pickled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Trainer

from scu_trainer.errors import CheckpointError, ControlError, NonFiniteLoss
from scu_trainer.models.hub_errors import as_hub_error
from scu_trainer.models.loading_safety import tensors_only
from scu_trainer.run_files import write_json
from scu_trainer.secrets import secret
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.bad_numbers import BadNumbers
from scu_trainer.train.callbacks import CurriculumCallback, MemoryCallback, RegularizationCallback
from scu_trainer.train.checkpoint_writer import CheckpointWriter
from scu_trainer.train.chunked_step import ChunkedStep
from scu_trainer.train.curriculum_loop import CurriculumLoop
from scu_trainer.train.efficiency import Efficiency
from scu_trainer.train.findings import has_optimizer
from scu_trainer.train.loader_workers import loading_again, shield
from scu_trainer.train.log_history import loop_scalars
from scu_trainer.train.loss_path import LossPath, without_index
from scu_trainer.train.memory import Gauge
from scu_trainer.train.overflow import OverflowWatch, unscaled
from scu_trainer.train.prediction import Prediction
from scu_trainer.train.pushing import Pushes
from scu_trainer.train.ranks import refuse_arguments
from scu_trainer.train.regularizer import Regularizer, prior_class_for
from scu_trainer.train.saved_state import read_state, read_tensors
from scu_trainer.train.second_try import last_word, second_try
from scu_trainer.train.usable import catch_up, tell_of_fresh_optimizer, usable
from scu_trainer.train.wrap import adopt, countable, weighed

STATE_FILE = "scu_state.json"
PRIOR_FILE = "scu_prior.safetensors"
MEMORY_STATE_FILE = "memory_state.json"


class SCUTrainer(Trainer):
    """``transformers.Trainer`` with feedback loops on the strength of regularization, on memory and on the data.

    Takes everything that the stock Trainer takes, and

    regularization: ``RegularizationSettings``, or None for no regularization loop.
    regularization_tokens: N of ParamBPT, the supervised tokens of one pass over the training data. None: estimated from
        the first optimizer step. ``RegularizationSettings.tokens`` overrides both.
    model: also any ``nn.Module`` whose forward returns its loss: alone, first in a tuple, or as ``["loss"]``.
    memory: ``MemorySettings``, or None for the stock order of operations without recovery.
    memory_gauge: where used memory is read; None: the device's own.
    curriculum: ``CurriculumSettings``, or None for the stock order of samples without their losses.
    efficiency: ``EfficiencySettings``, or None: averages of the weights, layout, schedules in steps, throughput.
    safety: ``SafetySettings``, or None: steps without a finite loss or gradient are skipped, a diverging loss is told.

    Raises ControlError where lambda could not reach the trained weights (FSDP, ZeRO-3, float16 weights).
    """

    _steps_per_epoch: Optional[int] = None
    _is_training = _rests = False
    # The stock constructor calls methods of this class before there is any of them.
    regularizer: Optional[Regularizer] = None
    # For a training_step before train(), where the stock Trainer has none yet.
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
        # With nothing on, every method below is the stock one.
        self.is_stock = (regularization, memory, curriculum, efficiency, safety) == (None,) * 5
        super().__init__(*args, **kwargs)
        self.args.hub_token = secret(self.args.hub_token)  # each checkpoint holds a pickled copy of the arguments
        adopt(self)
        self.overflow: Optional[OverflowWatch] = None
        averages = efficiency is not None and efficiency.ema_decay is not None
        if averages or any(loop is not None for loop in (regularization, memory, curriculum, safety)):
            self.overflow = OverflowWatch(self)
            self.callback_handler.callbacks.insert(0, self.overflow)  # also before those of the user
        # The next of our callbacks: the others ask whether it has skipped the step.
        self.bad_numbers: Optional[BadNumbers] = None if safety is None else BadNumbers(self, safety)
        self.chunked: Optional[ChunkedStep] = None
        self.prediction: Optional[Prediction] = None
        if memory is not None and memory.acts:
            refuse_arguments(self)
            self.chunked = ChunkedStep(self, memory, memory_gauge)
            self.prediction = Prediction(self) if memory.memory_control else None
            self.memory_callback = MemoryCallback(self.chunked)
            self.add_callback(self.memory_callback)
        self.curriculum: Optional[CurriculumLoop] = None
        if curriculum is not None:
            self.curriculum = CurriculumLoop(self, curriculum)
            self.curriculum_callback = CurriculumCallback(self.curriculum)
            self.add_callback(self.curriculum_callback)
        self._chunked_loss = "never" if memory is None else memory.resolved_chunked_loss
        self.loss_path: Optional[LossPath] = None
        if self.curriculum is not None or self._chunked_loss != "never":
            self.loss_path = LossPath(self, self._chunked_loss, self.curriculum)
        if regularization is not None:
            prior_class = prior_class_for(self, regularization)
            self.regularizer = Regularizer(regularization, self.model, regularization_tokens, prior_class)
            self.regularization_callback = RegularizationCallback(self)
            self.add_callback(self.regularization_callback)
        self.efficiency = Efficiency(self, efficiency or EfficiencySettings())
        self.resumes_weights_only = safety is not None and safety.weights_only
        self.checkpoints = CheckpointWriter(self)
        self.pushes = Pushes(self)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        if resume_from_checkpoint:
            takes_weights_only = self.resumes_weights_only or self.is_stock
            hashes = self.is_world_process_zero()
            resume_from_checkpoint = usable(
                resume_from_checkpoint, self.args.output_dir, takes_weights_only, hashes=hashes
            )
        self._begin_anew()
        self._is_training = True
        try:
            with self._last_word(lambda: f"step {self.state.global_step + 1} of training"):
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._is_training = False
            if self.chunked is not None:  # also after an error: the optimizer is the caller's again
                self.chunked.finish()
            if self.overflow is not None:
                self.overflow.detach()
            self.efficiency.finish()

    def _begin_anew(self) -> None:
        """What an earlier ``train`` of this trainer has counted, and found out about its model, is not of this one."""
        there = self.callback_handler.callbacks
        missing = [type(one).__name__ for one in self._callbacks_of_loops() if one not in there]
        if missing:
            raise ControlError(
                f"{', '.join(missing)} was taken off this trainer, and its loop cannot act without it; leave the loop "
                "out where the trainer is made, or put the callback back with add_callback"
            )
        for loop in (self.regularizer, self.chunked, self.bad_numbers):
            if loop is not None:
                loop.begin_anew()
        if self.loss_path is not None:
            self.loss_path = LossPath(self, self._chunked_loss, self.curriculum)

    def _callbacks_of_loops(self):
        own = [self.bad_numbers, self.efficiency.average, self.efficiency.throughput, self.efficiency.profile]
        own += [getattr(self, f"{name}_callback", None) for name in ("memory", "curriculum", "regularization")]
        return [callback for callback in own if callback is not None]

    @property
    def difficulty(self):
        """``control.difficulty.Difficulty`` of every training sample: ``scores``, ``observations``, ``quarantined``."""
        return None if self.curriculum is None else self.curriculum.difficulty

    # The curriculum decides which samples an epoch has, and so how many steps.

    def get_train_dataloader(self):
        if self.curriculum is None or self.train_dataset is None:
            return super().get_train_dataloader()
        return self.curriculum.loader()

    def _get_dataloader(self, *args, **kwargs):
        loader = super()._get_dataloader(*args, **kwargs)
        loader = loader if self.is_stock else shield(loader)
        return loader if self.prediction is None else loading_again(loader)

    def set_initial_training_values(self, args, dataloader):
        if self.curriculum is not None:
            self.curriculum.require_own_loader()
        values = super().set_initial_training_values(args, dataloader)
        self._steps_per_epoch = values[1]
        return values if self.curriculum is None else self.curriculum.training_values(values)

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self.efficiency.scheduler(optimizer, num_training_steps, self._steps_per_epoch)
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(num_training_steps, optimizer)

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        arguments = (max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
        position = super()._init_training_state(*arguments)
        if self.curriculum is None or resume_from_checkpoint is None:
            return position
        return self.curriculum.resume(resume_from_checkpoint, position)

    def _run_epoch(self, **kwargs):
        is_over = self.state.global_step >= self.state.max_steps  # killed after its last step
        if is_over and not self.is_stock:  # which would add one more
            self.control.should_training_stop = True
            return None
        if self.curriculum is not None:
            is_resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
            skipped = kwargs["steps_trained_in_current_epoch"] if is_resumed else 0
            kwargs |= self.curriculum.begin_epoch(kwargs["epoch"], skipped)
        return super()._run_epoch(**kwargs)

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.curriculum is not None:  # the stock loop takes the share of its own plan that the steps make
            share = (self.state.global_step - self._initial_global_step) / max(self.state.max_steps, 1)
            num_train_samples = self.curriculum.rows_trained / share if share else 0
        return super()._finalize_training(trial, num_train_samples, start_time)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.curriculum is not None:
            epoch_iterator = self.curriculum.batches(epoch_iterator)
        if self.chunked is not None:
            epoch_iterator = self.chunked.windows(epoch_iterator, num_batches)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.chunked is not None:
            self.chunked.prefetched(batches)
        if self.bad_numbers is not None:
            self.bad_numbers.window(batches)
        return batches, num_items

    def stock_training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Forward and backward of one chunk, as ``transformers.Trainer`` does them for a batch."""
        return super().training_step(model, inputs, num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        if not self._is_training:  # there is no run whose loops could act: the stock step
            self._rests = True
            try:
                return self.stock_training_step(model, inputs, num_items_in_batch)
            finally:
                self._rests = False
        self.efficiency.observe(inputs, num_items_in_batch)
        step = self.stock_training_step if self.chunked is None else self.chunked.loss
        try:
            loss = step(model, inputs, num_items_in_batch)
        except NonFiniteLoss as error:
            if self.bad_numbers is None:
                raise
            self.bad_numbers.stop_at(error)
        if self.curriculum is not None and not self.loss_path.was_asked:
            self.curriculum.found_no_loss()
        if self.bad_numbers is not None:
            self.bad_numbers.observe(loss, num_items_in_batch)
        if self.regularizer is not None:
            if self.chunked is not None and self.chunked.adds_means(num_items_in_batch):
                of_mean = functools.partial(torch.div, loss, self.current_gradient_accumulation_steps)
                self.regularizer.observe_loss(second_try(of_mean, "taking the mean of the losses"))
            else:
                self.regularizer.observe_loss(loss)
            self.regularization_callback.items_in_window = num_items_in_batch
            if self.accelerator.sync_gradients:
                with self.regularization_callback.timed():
                    self.regularizer.add_penalty(self._loss_scale())
        return loss

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if self.regularizer is not None:  # else it would pull at the weights of the model before
            if self.place_model_on_device:
                self._move_model_to_device(model, self.args.device)
            self.regularizer.follow(model)
        return model

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.loss_path is None or self._rests or return_outputs or not model.training:
            inputs = inputs if self.curriculum is None else without_index(inputs)
            return self._stock_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.loss_path.loss(model, inputs, num_items_in_batch, self._stock_loss)

    def _stock_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """Also of a plain module that returns its loss alone; the stock method looks for it inside of something."""
        is_plain = not isinstance(self.model, PreTrainedModel)
        with self.model.register_forward_hook(_bare_loss_in_tuple) if is_plain else contextlib.nullcontext():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def changes_loss(self) -> bool:
        """Whether somebody's own code computes the loss or changes it on its way from the model."""
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind) and kind is not SCUTrainer]
        are_public = all(kind.__module__.partition(".")[0] in ("transformers", "trl") for kind in owners)
        return self.compute_loss_func is not None or not are_public

    def _clip_grad_norm(self, model):
        return self._clipped(functools.partial(super()._clip_grad_norm, model))

    def _get_grad_norm(self, model, grad_norm=None):
        norm = functools.partial(super()._get_grad_norm, model, grad_norm=grad_norm)
        norm = norm() if grad_norm is not None else self._clipped(norm)
        return norm if self.bad_numbers is None else self.bad_numbers.before_optimizer(norm)

    def _clipped(self, clip: Callable[[], Any]) -> Any:
        """``clip``, which writes to gradients last, once more where it runs out of memory before."""
        if self.chunked is None or not self.chunked.ranks.recoverable:
            return clip()
        gradients = [p.grad for p in self.chunked.parameters if p.grad is not None]
        with unscaled(self.accelerator, gradients):
            return second_try(clip, "clipping the gradients, or taking their norm,", unchanged=gradients)

    # Evaluation is protected in the same way, with sizes of its own.

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        ignore_keys = getattr(self.model, "keys_to_ignore_at_inference", None) if ignore_keys is None else ignore_keys

        def predict(part):
            return super(SCUTrainer, self).prediction_step(model, part, prediction_loss_only, ignore_keys)

        if self.prediction is None:
            return predict(inputs)
        return self.prediction.step(inputs, predict, prediction_loss_only)

    def _get_num_items_in_batch(self, batch_samples, device):
        if self.prediction is not None and self.prediction.items is not None:
            return self.prediction.items[0]

        def count():
            items = super(SCUTrainer, self)._get_num_items_in_batch(countable(self, batch_samples), device)
            return weighed(self, batch_samples, items, device)

        if self.prediction is None or self.accelerator.num_processes > 1:  # ranks count together, once
            return count()
        return second_try(count, "counting the labels of a step")

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        with self._last_word(lambda: "evaluation"), self.efficiency.evaluation():
            return self._evaluation_loop(*given)

    def _evaluation_loop(self, dataloader, description, prediction_loss_only, *given):
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        evaluate = functools.partial(super().evaluation_loop, dataloader, description, prediction_loss_only, *given)
        with self._logits_leave_the_device(loss_only):
            return evaluate() if self.prediction is None else self.prediction.evaluated(evaluate, dataloader)

    def _last_word(self, doing: Callable[[], str]) -> AbstractContextManager:
        """With memory control, whatever runs out of memory and could not be repeated is told in one line."""
        return contextlib.nullcontext() if self.prediction is None else last_word(doing)

    @contextlib.contextmanager
    def _logits_leave_the_device(self, loss_only: bool):
        """Batch by batch, instead of piling up there."""
        if self.prediction is None or loss_only or self.args.eval_accumulation_steps is not None:
            yield
            return
        self.args.eval_accumulation_steps = 1
        try:
            yield
        finally:
            self.args.eval_accumulation_steps = None

    def log(self, logs: dict[str, float], start_time: Optional[float] = None) -> None:
        logs.update(loop_scalars(self, logs))
        super().log(logs, start_time)

    def _loss_scale(self) -> float:
        scaler = self.accelerator.scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0

    @property
    def rate_factor(self) -> float:
        """What controllers multiply the scheduled learning rate by in this step."""
        factor = 1.0 if self.regularizer is None else self.regularization_callback.rate_factor
        return factor if self.chunked is None else factor * self.chunked.rate_factor

    def _get_learning_rate(self) -> float:
        rate, factor = super()._get_learning_rate(), self.rate_factor
        return rate if factor == 1.0 else rate * factor

    # Checkpoints are whole or absent: the stock method writes into a folder beside, which gets its name last.

    def _save_checkpoint(self, model, trial):
        self.require_finite_weights()
        self.checkpoints.save(trial, functools.partial(super()._save_checkpoint, model, trial))

    def require_finite_weights(self) -> None:
        """Raises NonFiniteLoss, on all ranks, where what is about to be saved holds weights that are no numbers."""
        if self.bad_numbers is not None:
            self.bad_numbers.before_checkpoint()

    def _get_output_dir(self, trial):
        staging = self.checkpoints.staging
        return super()._get_output_dir(trial) if staging is None else str(staging)

    def init_hf_repo(self, token: Optional[str] = None, private: Optional[bool] = None) -> None:
        if self.is_stock:
            return super().init_hf_repo(token, private)
        with as_hub_error(self.args.hub_model_id or Path(self.args.output_dir).name):
            super().init_hf_repo(token, private)
        if self.hub_model_id is not None:  # only the leading process asks the Hub
            self.args.hub_model_id = self.hub_model_id  # with its owner

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.checkpoints.push_later(super()._push_from_checkpoint if self.is_stock else self.pushes.begin)

    # Controller state travels with the optimizer's: both are what a checkpoint needs to go on, not to be used.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.regularizer is not None:
            self.regularization_callback.before_checkpoint()
        if self.curriculum is not None:
            self.curriculum.save(output_dir)
        self.efficiency.save(output_dir)
        if self.bad_numbers is not None:
            self.bad_numbers.save(output_dir)
        if self.chunked is not None and self.args.should_save:
            write_json(Path(output_dir) / MEMORY_STATE_FILE, self.chunked.loop.state_dict())
        if self.regularizer is not None and self.args.should_save:
            # Base weights are read again on resume; adapters start at random and would be lost.
            prior = self.regularizer.prior.state_dict() if _has_adapters(self.model) else {}
            if prior:
                save_file({name: w.contiguous() for name, w in prior.items()}, Path(output_dir) / PRIOR_FILE)
            write_json(Path(output_dir) / STATE_FILE, self.regularizer.state_dict())

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        with tensors_only(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        with tensors_only(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            tell_of_fresh_optimizer(Path(checkpoint))
        if self.is_stock:
            return
        if checkpoint is not None and not has_optimizer(Path(checkpoint)):  # weights_only: everything else begins anew
            catch_up(self.lr_scheduler, Path(checkpoint))
            return
        if self.regularizer is not None and checkpoint is not None:
            self.regularizer.load_state_dict(*_read_controller_state(Path(checkpoint)))
        if checkpoint is not None:
            self.efficiency.load(checkpoint)
            if self.bad_numbers is not None:
                self.bad_numbers.load(checkpoint)
        if self.chunked is not None and checkpoint is not None:
            saved = Path(checkpoint) / MEMORY_STATE_FILE
            if saved.is_file():  # without it chunks start anew: no result depends on them but in rounding
                self.chunked.loop.load_state_dict(read_state(saved))


def _bare_loss_in_tuple(module: torch.nn.Module, inputs: Any, output: Any) -> Optional[tuple[torch.Tensor]]:
    """A forward hook, there only while a loss is computed: it holds no trainer, and pickles."""
    return (output,) if torch.is_tensor(output) and output.dim() == 0 else None


def _has_adapters(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _read_controller_state(checkpoint: Path) -> tuple[dict[str, Any], Optional[dict[str, torch.Tensor]]]:
    state_file, prior_file = checkpoint / STATE_FILE, checkpoint / PRIOR_FILE
    if not state_file.is_file():
        raise CheckpointError(
            f"{checkpoint} holds no {STATE_FILE}: it was written without the regularization loop or with "
            "save_only_model; "
            "resume with scu: false, or start anew from its weights with model_name_or_path"
        )
    return read_state(state_file), read_tensors(prior_file) if prior_file.is_file() else None
