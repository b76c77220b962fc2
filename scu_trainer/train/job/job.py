"""A job: all settings of one training run, and the checks that involve several of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Protocol

import torch
from rich.console import Console
from transformers import TrainingArguments

from scu_trainer.data.sources import require_existing_path
from scu_trainer.errors import SettingsError
from scu_trainer.hardware.probe import accelerators, probe
from scu_trainer.models.loading.dispatch import FreeMemory
from scu_trainer.secrets import find_secret, redact_data, secret
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    RetentionSettings,
    SafetySettings,
)
from scu_trainer.settings.base import require
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.settings.safety import check_safety
from scu_trainer.settings.tasks import TaskSettings, require_mixable
from scu_trainer.train.curriculum.rules import obstacle, require_enough_epochs
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.job.checks import (
    check_anchor,
    check_evaluation,
    check_launcher,
    check_memory,
    check_retention,
    check_teacher,
    check_text_values,
    check_training_optimizer,
)
from scu_trainer.train.job.components import EvaluationSource, TrainingComponents
from scu_trainer.train.loops.guard.spikes import check_spike_guard
from scu_trainer.train.loops.weight_average import check_schedule_free
from scu_trainer.train.run_directory.resume import check_resumable
from scu_trainer.train.step.distributed.deepspeed_rules import check_deepspeed, uses_deepspeed
from scu_trainer.train.step.distributed.sharded import weight_bytes


class Task(Protocol):
    """Interface of a task.

    ``item``: singular name of a held-out unit, such as document. ``unit``: what bits are counted per, such as token.
    ``compute_metrics``, ``preprocess_logits``: arguments of the stock Trainer; the metrics include ``eval_bpt``.
    """

    name: str
    item: str
    unit: str
    compute_metrics: Callable[[Any], dict[str, float]]
    preprocess_logits: Callable[[Any, torch.Tensor], torch.Tensor]

    def check(self, job: Job) -> None:
        """Raise SettingsError for settings that contradict each other, without loading anything."""

    def load(self, job: Job, console: Console) -> TrainingComponents:
        """Load what training needs. Raises a UserError if settings, data, model, memory or disk do not fit."""

    def load_scored(self, source: EvaluationSource) -> TrainingComponents:
        """Load a trained model in evaluation mode, and its held-out rows."""

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        """Score ``model`` on ``parts.data.eval``."""

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        """Return a small input of the model, to find out which kernels run."""


@dataclass
class Job:
    """All settings of one training run.

    ``own``: the settings that only its task has. ``kind``: the task. ``regularization``: None trains without that loop.
    ``memory``: if its ``acts`` is False, batches are those of the stock Trainer. ``curriculum``: the requested
    curriculum; ``acting_curriculum`` is the one that runs. ``notes``: lines for the user about choices for this
    machine. ``changed_from``: defaults of all fields that were given another value. ``saves_by_length``: ``save_steps``
    was not given, so it is derived from the length of the run.
    """

    model: ModelSettings
    data: DataSettings
    regularization: Optional[RegularizationSettings]
    training: TrainingArguments
    memory: MemorySettings = field(default_factory=MemorySettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    kind: Optional[Task] = None
    own: Optional[Any] = None
    efficiency: EfficiencySettings = field(default_factory=EfficiencySettings)
    safety: SafetySettings = field(default_factory=SafetySettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    notes: tuple[str, ...] = ()
    changed_from: dict[str, Any] = field(default_factory=dict)
    saves_by_length: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return all settings in one flat dict with the names of the command line, a valid configuration file."""
        scu: dict[str, Any] = {"scu": self.regularization is not None}
        if self.regularization is not None:
            scu.update({f"scu_{name}": value for name, value in asdict(self.regularization).items()})
        settings = {
            **asdict(self.task),
            **asdict(self.model),
            **asdict(self.data),
            **(asdict(self.own) if self.own is not None else {}),
            **scu,
            **asdict(self.memory),
            **asdict(self.curriculum),
            **asdict(self.efficiency),
            **asdict(self.safety),
            **asdict(self.retention),
            **_training_as_dict(self.training),
        }
        if self.saves_by_length:
            settings["save_steps"] = None  # so that it still counts as not given when it is read back
        return {name: value for name, value in settings.items() if name not in self.task.kind.unused}

    def require_one_gpu(self) -> None:
        """Raise SettingsError if the stock Trainer would use several GPUs with DataParallel, which no loop supports."""
        gpus = self.training.n_gpu
        acts = self.memory.acts or self.regularization is not None or self.acting_curriculum is not None
        require(
            gpus < 2 or not acts or self.model.device_map is not None,
            f"{gpus} GPUs are available, but one process trains on only one of them: start the command with "
            "scu-trainer launch accelerate instead of scu-trainer train to run a process on each GPU, or put "
            "CUDA_VISIBLE_DEVICES=0 before it to use only the first one; device_map: auto spreads one large model over "
            "them",
        )

    def check(self) -> None:
        """Raise SettingsError for settings that contradict each other or would write a secret to the run's files."""
        training = self.training
        require_mixable(self.data, self.task.task)
        training.hub_token = secret(training.hub_token)
        _refuse_secrets(self.as_dict())
        require(
            not (self.data.streaming and training.max_steps <= 0),
            "streaming data has no known length; give max_steps, for instance --max_steps 1000",
        )
        require(
            not (training.fp16 and training.use_cpu),
            "fp16 has no effect on a CPU (training would silently run in float32); use bf16: true or drop fp16",
        )
        check_launcher(training)
        check_training_optimizer(training, self.model)
        self.check_machine_independent()
        self.kind.check(self)
        if self.data.eval_dataset is not None:  # it is read only after all training data, as is the anchor
            require_existing_path(self.data.eval_dataset)
        if self.retention.retain is not None:
            check_anchor(self.retention.retain, self.data)
        check_resumable(training)

    def check_machine_independent(self) -> None:
        """Run those of the checks that do not depend on the machine."""
        training = self.training
        check_deepspeed(training, self.model, self.memory, self.regularization)
        check_text_values(training)
        check_evaluation(training, self.data, self.regularization)
        check_memory(training, self.memory)
        check_teacher(training, self.model, self.memory, self.curriculum)
        self._check_curriculum()
        check_efficiency(self.efficiency, training)
        check_schedule_free(training, self.regularization, self.efficiency)
        check_safety(self.safety, training)
        if self.safety.spike_guard != "off":
            check_spike_guard(uses_deepspeed(training))
        check_retention(training, self.retention, self.regularization, self.memory, self.curriculum)

    @property
    def acting_curriculum(self) -> Optional[CurriculumSettings]:
        """The curriculum that runs; None if no method is requested and the losses of samples cannot be tracked."""
        tracks = not self.data.streaming and obstacle(self.training, self.memory) is None
        return self.curriculum if self.curriculum.methods or tracks else None

    def _check_curriculum(self) -> None:
        if not self.curriculum.methods:
            return
        require(
            not self.data.streaming,
            f"curriculum {self.curriculum.curriculum} selects samples by number, but streaming data has no numbers; "
            "set streaming: false, or curriculum: none",
        )
        reason = obstacle(self.training, self.memory)
        require(reason is None, str(reason))
        if self.training.max_steps <= 0:
            require_enough_epochs(self.curriculum, self.training.num_train_epochs)

    def check_rows(self, rows: int) -> None:
        """Raise SettingsError if ``max_steps`` is too small for infobatch; token-budget batches are checked later."""
        steps, curriculum = self.training.max_steps, self.curriculum
        if "infobatch" in curriculum.methods and steps > 0 and curriculum.token_budget is None:
            require_enough_epochs(curriculum, steps / self.steps_of_epoch(rows), steps)

    def planned_steps(self, rows: int) -> int:
        """Return the number of optimizer steps for ``rows`` training rows, counted as by the stock Trainer."""
        if self.training.max_steps > 0:
            return self.training.max_steps
        return math.ceil(self.steps_of_epoch(rows) * self.training.num_train_epochs)

    def steps_of_epoch(self, rows: int) -> int:
        training = self.training
        batches = rows / (training.train_batch_size * training.world_size)
        batches = math.floor(batches) if training.dataloader_drop_last else math.ceil(batches)
        return max(1, math.ceil(batches / training.gradient_accumulation_steps))


def _refuse_secrets(settings: dict[str, Any]) -> None:
    """Raise SettingsError for a secret, because settings are written to files that people share: the model card, the
    adapter's configuration, TensorBoard logs."""
    name = find_secret(settings)
    if name is not None:
        raise SettingsError(
            f"{name} contains a password or token ({redact_data(settings[name])}), which would be written to the "
            f"run's files; remove it, and set it in the environment (HF_TOKEN for the Hub) or with hf auth login"
        )


def _training_as_dict(training: TrainingArguments) -> dict[str, Any]:
    # The launcher's decisions do not belong to a configuration, and mixed_precision stands for bf16 and fp16.
    left_out = {"local_rank", "bf16", "fp16", "tf32"}
    # to_dict replaces tokens by a placeholder, which would be used as a token when the configuration is read back.
    settings = training.to_dict().items()
    return {name: value for name, value in settings if name not in left_out and not name.endswith("_token")}


def checkpoint_bytes(model, training: TrainingArguments, averaged: bool = False) -> int:
    """Return the disk space for all checkpoints that the run keeps at the same time, plus the final model.

    A checkpoint has the trained weights, their two Adam moments and their initial values w0, and without an adapter the
    frozen weights as well. DeepSpeed saves the trained weights two more times, for its engine and as float32 master
    weights. ``averaged``: checkpoints also have moving averages of the weights.
    """
    kept = 1 if training.save_total_limit is None else training.save_total_limit + 1
    saves = 0 if training.save_strategy == "no" else kept
    copies = 6 if uses_deepspeed(training) else 4
    copies += averaged
    frozen_bytes = 0 if hasattr(model, "peft_config") else weight_bytes(model, is_trained=False)
    return weight_bytes(model) * (copies * saves + 1) + frozen_bytes * (saves + 1)


def free_memory(training: TrainingArguments) -> FreeMemory:
    return FreeMemory(cuda_bytes(training), int(probe().ram_available_bytes))


def cuda_bytes(training: TrainingArguments) -> tuple[int, ...]:
    """Return the free bytes of each CUDA GPU that training uses."""
    return () if training.use_cpu else tuple(gpu.free_bytes for gpu in accelerators() if gpu.kind == "cuda")


def is_main_process() -> bool:
    """Whether this is the process that prints and writes for all ranks."""
    return int(os.environ.get("RANK", "0")) == 0
