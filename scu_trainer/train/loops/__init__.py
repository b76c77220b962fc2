"""The loops of this package, one file each, and the order in which a trainer calls them."""

from __future__ import annotations

import logging
from functools import partial
from numbers import Real
from typing import Optional

import torch
from transformers import Trainer

from scu_trainer.control.difficulty import Difficulty
from scu_trainer.errors import ControlError
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.models.memory_format import apply_channels_last
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.base import require, short
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.settings.safety import check_safety
from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.curriculum import CurriculumLoop
from scu_trainer.train.loops.memory import MemoryLoop
from scu_trainer.train.loops.nonfinite_guard import NonFiniteGuard
from scu_trainer.train.loops.overflow import OverflowWatch
from scu_trainer.train.loops.profile import Profile
from scu_trainer.train.loops.rate_steps import RateSteps
from scu_trainer.train.loops.regularization import NotMeasured, RegularizationLoop
from scu_trainer.train.loops.saves_and_ends import EarlyStopping, SaveEpochs
from scu_trainer.train.loops.throughput import Throughput
from scu_trainer.train.loops.weight_average import (
    ScheduleFreeWeights,
    WeightAverage,
    check_schedule_free,
    may_be_schedule_free,
    own_schedule_free,
)
from scu_trainer.train.loss.evaluation_path import LeanPrediction
from scu_trainer.train.loss.loss_path import LossPath
from scu_trainer.train.regularization.regularizer import Regularizer, prior_class_for
from scu_trainer.train.step.distributed.launchers import refuse_arguments
from scu_trainer.train.step.engine import MicroBatchEngine
from scu_trainer.train.step.micro_batches import MicroBatchStep
from scu_trainer.train.step.muon import MuonWithAdamW, muon_for
from scu_trainer.train.step.prediction import Prediction
from scu_trainer.train.step.recovery.memory import Gauge
from scu_trainer.train.step.recovery.memory_limit import release_limit

logger = logging.getLogger("scu_trainer")

ORDER = (
    OverflowWatch,  # first: all others ask whether the optimizer has stepped
    NonFiniteGuard,  # may undo the step, so the loops after it must not have learned from it yet
    EarlyStopping,  # before the curriculum, which asks on resume whether any step is left
    MemoryLoop,
    CurriculumLoop,  # after MemoryLoop: that one groups the rows that this one chooses
    RegularizationLoop,  # measures the weights after the step, and decays them
    NotMeasured,  # replaces the loop before it
    WeightAverage,  # after regularization: averages the weights as it leaves them
    ScheduleFreeWeights,
    RateSteps,
    SaveEpochs,
    Throughput,  # includes the time of all loops above
    Profile,
)
"""The user's own loops follow these, as the user's callbacks do in the stock Trainer."""

ASK_FOR_SKIPPED_STEPS = (NonFiniteGuard, MemoryLoop, CurriculumLoop, RegularizationLoop, WeightAverage)


def make_loops(
    trainer: Trainer,
    regularization: Optional[RegularizationSettings],
    regularization_tokens: Optional[float],
    memory: Optional[MemorySettings],
    memory_gauge: Optional[Gauge],
    curriculum: Optional[CurriculumSettings],
    efficiency: EfficiencySettings,
    safety: Optional[SafetySettings],
) -> list[Loop]:
    """Return the loops of ``trainer`` in their order, as requested by the arguments of ``SCUTrainer``.

    Also sets the trainer's engine and loss path. Raises SettingsError for settings that contradict each other or the
    trainer's arguments, and ControlError if a loop could not act.
    """
    check_efficiency(efficiency, trainer.args)
    if not trainer.is_stock:
        check_schedule_free(trainer.args, regularization, efficiency, own_schedule_free(trainer))
    loops: list[Loop] = []
    if safety is not None:
        epochs_differ = curriculum is not None and bool(curriculum.methods)
        trainer.nonfinite_guard = NonFiniteGuard(trainer, safety, epochs_differ)
        loops.append(trainer.nonfinite_guard)
        check_safety(safety, trainer.args)
        if safety.save_epochs is not None:
            loops.append(SaveEpochs(safety.save_epochs))
        if safety.early_stopping_patience is not None:
            loops.append(EarlyStopping(safety.early_stopping_patience, safety.early_stopping_threshold))
    release_limit(trainer.args.device)
    if memory is not None and memory.acts:
        refuse_arguments(trainer)
        trainer.micro_batches = MicroBatchStep(trainer, memory, memory_gauge)
        trainer.prediction = Prediction(trainer) if memory.memory_control else None
        lean = LeanPrediction(trainer, memory.resolved_chunked_loss, memory.resolved_padding_free)
        trainer.engine = MicroBatchEngine(trainer, lean)
        loops.append(MemoryLoop(trainer.micro_batches))
    if curriculum is not None:
        trainer.curriculum = CurriculumLoop(trainer, curriculum)
        loops.append(trainer.curriculum)
    chunked_loss = "never" if memory is None else memory.resolved_chunked_loss
    padding_free = False if memory is None else memory.resolved_padding_free
    if curriculum is not None or chunked_loss != "never" or padding_free is not False:
        # A partial and not a lambda, so that in a copy of the trainer it refers to the copy.
        trainer.new_loss_path = partial(LossPath, trainer, chunked_loss, padding_free)
        trainer.loss_path = trainer.new_loss_path()
    if regularization is not None:
        loops.append(_make_regularization(trainer, regularization, regularization_tokens))
    loops += _make_efficiency_loops(trainer, efficiency)
    if loops and may_be_schedule_free(trainer):
        loops.append(ScheduleFreeWeights())
    if any(isinstance(loop, ASK_FOR_SKIPPED_STEPS) for loop in loops):
        loops.append(OverflowWatch())
    return sorted(loops, key=lambda loop: ORDER.index(type(loop)))


def _make_regularization(trainer: Trainer, settings: RegularizationSettings, tokens: Optional[float]) -> Loop:
    """Return the regularization loop, or ``NotMeasured`` if S cannot be measured and lambda is not requested. Raises
    ControlError if lambda is requested but could not act."""
    is_count = tokens is None or (isinstance(tokens, Real) and tokens > 0)
    require(is_count, f"regularization_tokens is {short(tokens)}; it must be 1 or more, or None for an estimate")
    try:
        prior_class = prior_class_for(trainer, settings)
        trainer.regularizer = Regularizer(settings, trainer.model, tokens, prior_class)
    except ControlError as error:
        if settings.steers:
            raise
        return NotMeasured(str(error))
    return RegularizationLoop(trainer.regularizer)


def _make_efficiency_loops(trainer: Trainer, settings: EfficiencySettings) -> list[Loop]:
    """Apply the efficiency settings to the trainer, and return the loops that they need."""
    if settings.channels_last and not apply_channels_last(trainer.model):
        logger.warning("channels_last has no effect: the model has no convolution over images")
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark or torch.backends.cudnn.benchmark
    if settings.keep_freed_memory and trainer.args.device.type == "cpu":
        keep_freed()
    if settings.use_muon:
        is_free = trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
        require(is_free, "use_muon and your own optimizer were both passed to the trainer; drop one of them")
        trainer.optimizer_cls_and_kwargs = (lambda: partial(_make_muon, trainer), {})
    loops: list[Loop] = []
    if settings.ema_decay is not None:
        loops.append(WeightAverage(trainer, settings.ema_decay))
    if settings.has_lr_steps:
        loops.append(RateSteps(settings))
    if settings.throughput:
        loops.append(Throughput(settings.peak_tflops))
    if settings.profile_steps:
        loops.append(Profile(settings.profile_steps))
    return loops


def _make_muon(trainer: Trainer, model: torch.nn.Module) -> MuonWithAdamW:
    args = trainer.args
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    decayed = trainer.get_decay_parameter_names(model)
    return muon_for(model, decayed, args.learning_rate, args.weight_decay, **adam)


def difficulty_of(trainer: Trainer) -> Optional[Difficulty]:
    """Return ``scores``, ``observations`` and ``quarantined`` of every training sample; None without a curriculum."""
    return None if trainer.curriculum is None else trainer.curriculum.difficulty
