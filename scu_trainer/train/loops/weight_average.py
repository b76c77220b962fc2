"""Keep an exponential moving average of the trained weights for evaluations and the final model.

The average is updated after each optimizer step and the regularization loop's decay that follows it. Training itself
does not use it: the weights of every step are those of a training without it, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.settings import RegularizationSettings
from scu_trainer.settings.base import as_typed, require
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.checkpoints.saved_state import reading
from scu_trainer.train.loop import Loop
from scu_trainer.train.loss.analysis.trials import batch_norm_statistics
from scu_trainer.train.loss.rows.model_loss import comes_from
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer
from scu_trainer.train.step.recovery.second_try import second_try

EMA_FILE = "ema.safetensors"
IN_TRAINING_FILE = "schedule_free.safetensors"
"""File in a checkpoint with the weights of the training step; the checkpoint's own weights are the averaged ones."""

USE_LESS_MEMORY = (
    "Lower max_batch_size or per_device_train_batch_size, use tuning: lora, or leave ema_decay out; "
    "resume_from_checkpoint: true resumes from the newest checkpoint"
)
USE_LESS_MEMORY_SCHEDULE_FREE = USE_LESS_MEMORY.replace("leave ema_decay out", "take another optim")


class WeightAverage(Loop):
    """Keeps the average of the trained weights and BatchNorm statistics, in float32.

    Frozen weights have no second copy.

    Raises ControlError if no process has whole weights (ZeRO-3, FSDP).
    """

    name = "weight_average"

    def __init__(self, trainer: Trainer, decay: float) -> None:
        if is_sharded(trainer):
            raise ControlError(
                "ema_decay averages whole weights, and under ZeRO-3 and FSDP no process has them; leave ema_decay out, "
                "or use ZeRO stage 1 or 2"
            )
        self.trainer, self.decay = trainer, decay
        self._names: list[str] = []
        self._averages: list[torch.Tensor] = []
        self._count = 0
        self._checkpoint: Optional[Path] = None

    def opening_lines(self) -> list[str]:
        line = f"evaluations and the final model use the moving average of the weights (ema_decay {self.decay:g})"
        if self.trainer.loop("regularization") is None:
            return [line]
        return [f"{line}; S is measured on the weights in training, not on their average"]

    # -- events of the stock loop --------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        tensors = self._averaged_tensors()
        self._names = list(tensors)
        self._averages = [tensor.to(torch.float32, copy=True) for tensor in tensors.values()]
        self._count = 0
        if self._checkpoint is not None:
            self._load_averages(self._checkpoint)
            self._checkpoint = None

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        if self.trainer.accelerator.optimizer_step_was_skipped:
            return
        tensors = self._averaged_tensors()
        if list(tensors) != self._names:
            raise ControlError(
                "the set of trained weights changed during training, but ema_decay averages the set it started with; "
                "drop ema_decay"
            )
        # The first update is a copy and can be repeated; later ones can if no average has been written to yet.
        written = self._averages if self._count else []
        second_try(partial(self._add, tensors.values()), "averaging the weights", USE_LESS_MEMORY, written)

    def _add(self, weights: Iterable[torch.Tensor]) -> None:
        """Update the averages. The decay grows from 2/11 to ``self.decay``, so that a short run forgets its start.

        This is the rule of TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``. torch's ``AveragedModel`` is
        not used, because it waits for the GPU in each step.
        """
        weights, n = [weight.float() for weight in weights], self._count
        if n:
            torch._foreach_lerp_(self._averages, weights, 1 - min(self.decay, (1 + n) / (10 + n)))
        else:
            torch._foreach_copy_(self._averages, weights)
        self._count = n + 1

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Put the average into the model; with load_best_model_at_end, the average of the best step."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_averages(Path(state.best_model_checkpoint))
        self._put_averages_into_model()

    # -- use -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put the averages into the model meanwhile; does nothing outside of training or before its first step."""
        if not self.trainer.is_in_train or not self._count:
            yield
            return
        doing = "a copy of the training weights, needed while their average is evaluated,"
        weights = second_try(
            lambda: {name: tensor.clone() for name, tensor in self._averaged_tensors().items()}, doing, USE_LESS_MEMORY
        )
        try:
            self._put_averages_into_model()
            yield
        finally:
            for name, tensor in self._averaged_tensors().items():
                tensor.copy_(weights[name])

    def _put_averages_into_model(self) -> None:
        if not self._count:
            return
        self._share_statistics()
        averages = dict(zip(self._names, self._averages, strict=True))
        for name, tensor in self._averaged_tensors().items():
            tensor.copy_(averages[name])

    def _share_statistics(self) -> None:
        """Use rank 0's BatchNorm statistics, so that all ranks, which differ in them, evaluate the saved model."""
        if self.trainer.accelerator.num_processes == 1:
            return
        buffers = {name for name, _ in self.trainer.model.named_buffers()}
        for name, average in zip(self._names, self._averages, strict=True):
            if name in buffers:
                dist.broadcast(average, src=0)

    def _averaged_tensors(self) -> dict[str, torch.Tensor]:
        """Return the averaged tensors of the model; not cached, because placing a model replaces its tensors."""
        model = self.trainer.model
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return trained | dict(batch_norm_statistics(model))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_state(self, folder: str) -> None:
        if not self.trainer.args.should_save:
            return
        tensors = dict(zip(self._names, self._averages, strict=True))
        count = {"n_averaged": str(self._count)}
        save_file({name: t.contiguous() for name, t in tensors.items()}, Path(folder) / EMA_FILE, metadata=count)

    def load_state(self, checkpoint: str) -> None:
        """Use the averages of ``checkpoint`` when training begins. Raises CheckpointError if it has none."""
        self._checkpoint = Path(checkpoint)
        _require_file(self._checkpoint)

    def _load_averages(self, checkpoint: Path) -> None:
        _require_file(checkpoint)
        with reading(checkpoint / EMA_FILE), safe_open(checkpoint / EMA_FILE, framework="pt") as saved:
            if sorted(saved.keys()) != sorted(self._names):
                raise CheckpointError(
                    f"{checkpoint / EMA_FILE} averages a different set of weights than this run trains; resume with "
                    "the same model and tuning"
                )
            for name, average in zip(self._names, self._averages, strict=True):
                average.copy_(saved.get_tensor(name))
            self._count = int(saved.metadata()["n_averaged"])


def _require_file(checkpoint: Path) -> None:
    if not (checkpoint / EMA_FILE).is_file():
        raise CheckpointError(
            f"{checkpoint} holds no {EMA_FILE}: it was written without ema_decay or with save_only_model; resume "
            "without ema_decay, or start over from its weights with model_name_or_path"
        )


class ScheduleFreeWeights(Loop):
    """Makes schedule-free optimizers put their averaged weights into the model when it is saved.

    The stock Trainer does so for evaluations only; a step without one saves the weights at which the next gradient is
    computed. Also, the optimizer computes the training weights from the averaged ones by arithmetic that rounds. Here
    the training weights are kept in memory, and in the checkpoint next to the averaged ones, so neither an evaluation,
    a save nor a resume changes a bit of the training.
    """

    name = "schedule_free"

    def __init__(self) -> None:
        self._acts = False
        self._training_weights: Optional[dict[str, torch.Tensor]] = None
        self._checkpoint: Optional[Path] = None

    def opening_lines(self) -> list[str]:
        return ["evaluations, checkpoints and the final model use the averaged weights of the schedule-free optimizer"]

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        optimizer = inner_optimizer(self.trainer.optimizer)
        self._acts = is_schedule_free_class(type(optimizer))
        if not self._acts:  # the user's create_optimizer made another one, or DeepSpeed has wrapped it
            inner = type(getattr(optimizer, "optimizer", None))
            require(
                not (self.trainer.is_deepspeed_enabled and is_schedule_free_class(inner)),
                f"{inner.__name__} switches between two kinds of weights, but DeepSpeed gives it a copy of them that "
                "evaluations and checkpoints do not see; use another optim, or train without DeepSpeed",
            )
            return
        regularizer, average = self.trainer.regularizer, self.trainer.loop(WeightAverage.name)
        check_own_schedule_free(
            type(optimizer).__name__, regularizer is not None and regularizer.steers, average is not None
        )
        self._average_into_model, self._average_out_of_model = type(optimizer).eval, type(optimizer).train
        optimizer.eval, optimizer.train = self._to_average, self._to_training
        if self._checkpoint is not None and (self._checkpoint / IN_TRAINING_FILE).is_file():
            with reading(self._checkpoint / IN_TRAINING_FILE):
                self._training_weights = load_file(self._checkpoint / IN_TRAINING_FILE)
        self._checkpoint = None

    def _to_average(self) -> None:
        optimizer = inner_optimizer(self.trainer.optimizer)
        if any(holder["train_mode"] for holder in _modes(optimizer)):
            doing = "a copy of the training weights, needed while the averaged ones are used,"
            self._training_weights = second_try(self._copy_weights, doing, USE_LESS_MEMORY_SCHEDULE_FREE)
        self._average_into_model(optimizer)

    def _to_training(self) -> None:
        optimizer = inner_optimizer(self.trainer.optimizer)
        self._average_out_of_model(optimizer)
        for name, weight in (self._training_weights or {}).items():
            self._weights()[name].copy_(weight)
        self._training_weights = None

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.to("cpu", copy=True) for name, weight in self._weights().items()}

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    def before_save(self) -> None:
        if self._acts:
            self.trainer.optimizer.eval()

    def save_state(self, folder: str) -> None:
        if self.trainer.args.should_save and self._training_weights is not None and not is_sharded(self.trainer):
            save_file(self._training_weights, Path(folder) / IN_TRAINING_FILE)

    def load_state(self, checkpoint: str) -> None:
        self._checkpoint = Path(checkpoint)

    def on_train_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        if not self._acts:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            for holder in _modes(inner_optimizer(optimizer)):  # the model already has the best step's averaged weights
                holder["train_mode"] = False
        optimizer.eval()
        inner = inner_optimizer(optimizer)
        del inner.eval, inner.train
        self._training_weights = None


def _modes(optimizer: Any) -> list[dict[str, Any]]:
    """Return the dicts with "train_mode", which tells whether weights are those of training. These are the parameter
    groups, or the attributes of an optimizer that wraps another one."""
    return [holder for holder in (vars(optimizer), *optimizer.param_groups) if "train_mode" in holder]


def own_schedule_free(trainer: Trainer) -> Optional[str]:
    """Return the class name of a schedule-free optimizer passed to the trainer; None if there is none. Schedule-free
    optimizers that take a closure never switch, so they do not count."""
    kind = (trainer.optimizer_cls_and_kwargs or (None,))[0] if trainer.optimizer is None else type(trainer.optimizer)
    return kind.__name__ if isinstance(kind, type) and is_schedule_free_class(kind) else None


def is_schedule_free_class(kind: type) -> bool:
    return comes_from(kind, "schedulefree") and hasattr(kind, "eval")


def may_be_schedule_free(trainer: Trainer) -> bool:
    """Return whether the optimizer may be schedule-free; a user's ``create_optimizer`` may make one."""
    is_own = type(trainer).create_optimizer is not Trainer.create_optimizer
    return is_own or own_schedule_free(trainer) is not None or is_schedule_free(trainer.args)


def is_schedule_free(training: TrainingArguments) -> bool:
    return as_typed(training.optim).startswith("schedule_free")


def check_schedule_free(
    training: TrainingArguments,
    regularization: Optional[RegularizationSettings],
    efficiency: EfficiencySettings,
    own: Optional[str] = None,
) -> None:
    """Raise SettingsError for settings that contradict a schedule-free optimizer.

    It trains at a point between two points that it keeps, and code that moves or averages the weights only sees that
    point. ``own``: see ``own_schedule_free``; the schedule of such an optimizer is the user's responsibility.
    """
    if own is None:
        if not is_schedule_free(training):
            return
        _check_schedule(training, efficiency)
    optim = own or f"optim: {as_typed(training.optim)}"
    steers = regularization is not None and regularization.steers
    check_own_schedule_free(optim, steers, efficiency.ema_decay is not None)


def check_own_schedule_free(optim: str, steers: bool, averages: bool) -> None:
    """Raise SettingsError if other code changes or averages the weights of a schedule-free optimizer."""
    require(
        not steers,
        f"the regularization loop changes the weights of the training step, but {optim} switches to others "
        "that the loop does not see; drop scu_target_s, or use another optim",
    )
    require(
        not averages,
        f"{optim} already averages the weights, but ema_decay would average the weights before that; drop ema_decay",
    )


def _check_schedule(training: TrainingArguments, efficiency: EfficiencySettings) -> None:
    optim, kind = as_typed(training.optim), as_typed(training.lr_scheduler_type)
    require(
        kind == "constant" and not efficiency.has_lr_steps,
        f"optim: {optim} replaces the schedule, but lr_scheduler_type is {kind}"
        f"{' with learning rate steps' if efficiency.has_lr_steps else ''}; set only lr_scheduler_type: constant",
    )
    require(
        not 0 < training.warmup_steps < 1,
        f"optim: {optim} counts its warm-up in steps, but warmup_steps is a share, {training.warmup_steps:g}; give a "
        "whole number of steps",
    )
