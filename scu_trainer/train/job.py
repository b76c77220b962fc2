"""A job: every setting of one training run, and the checks that need more than one of them."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Optional

import torch
from transformers import TrainingArguments

from scu_trainer.errors import SettingsError, nearest
from scu_trainer.hardware.optimizers import check_optimizer
from scu_trainer.hardware.probe import accelerators, probe
from scu_trainer.models.dispatch import Free
from scu_trainer.secrets import redact_data, secret, where_secret
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    SafetySettings,
)
from scu_trainer.settings.base import require
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.settings.tasks import TaskSettings
from scu_trainer.train.curriculum_rules import obstacle, require_enough_epochs
from scu_trainer.train.deepspeed_rules import check_deepspeed, uses_deepspeed
from scu_trainer.train.resume import check_resumable
from scu_trainer.train.sharded import trained_bytes
from scu_trainer.train.tasks import task_of

if TYPE_CHECKING:
    from scu_trainer.train.tasks.task import Task


@dataclass
class Job:
    """``own``: the settings that only its task has. ``regularization``: None trains without that loop. ``memory``: with
    its ``acts`` False, as the stock Trainer.

    ``curriculum``: what was asked for; ``acting_curriculum`` is what runs. ``notes``: lines for the user about what was
    chosen for this machine. ``changed_from``: the default of every field that was given another value.
    """

    model: ModelSettings
    data: DataSettings
    regularization: Optional[RegularizationSettings]
    training: TrainingArguments
    memory: MemorySettings = field(default_factory=MemorySettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    own: Optional[Any] = None
    efficiency: EfficiencySettings = field(default_factory=EfficiencySettings)
    safety: SafetySettings = field(default_factory=SafetySettings)
    notes: tuple[str, ...] = ()
    changed_from: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Task:
        return task_of(self.task.task)

    def as_dict(self) -> dict[str, Any]:
        """Flat, under the names of the command line; can be read back as a configuration file."""
        scu: dict[str, Any] = {"scu": self.regularization is not None}
        if self.regularization is not None:
            scu.update({f"scu_{name}": value for name, value in asdict(self.regularization).items()})
        found = {
            **asdict(self.task),
            **asdict(self.model),
            **asdict(self.data),
            **(asdict(self.own) if self.own is not None else {}),
            **scu,
            **asdict(self.memory),
            **asdict(self.curriculum),
            **asdict(self.efficiency),
            **asdict(self.safety),
            **_training_as_dict(self.training),
        }
        return {name: value for name, value in found.items() if name not in self.task.kind.unused}

    def check(self) -> None:
        """Raise SettingsError for settings that contradict each other, or would write a secret into the run's files."""
        training = self.training
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
        require(
            not (training.use_cpu and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"),
            "FSDP has no effect on a CPU (accelerate would silently train data parallel); use "
            "accelerate_configs/cpu_2_processes.yaml, or drop use_cpu",
        )
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        require(
            launched == training.world_size,
            f"the launcher started {launched} processes, but training would use {training.world_size}: each would "
            "train alone; add use_cpu: true (CPU), or start with torchrun --nproc_per_node",
        )
        check_deepspeed(training, self.model, self.memory, self.regularization)
        self._check_words()
        self._check_optimizer()
        self._check_evaluation()
        self._check_memory()
        self._check_curriculum()
        check_efficiency(self.efficiency, training)
        self.kind.check(self)
        check_resumable(training)

    def _check_evaluation(self) -> None:
        training, data = self.training, self.data
        holds_out = data.eval_dataset is not None or data.streaming or data.validation_split_percentage > 0
        evaluates = training.eval_strategy != "no"
        require(
            holds_out or not evaluates,
            "eval_strategy asks for held-out data but validation_split_percentage is 0; raise it, give eval_dataset "
            "or set eval_strategy: no",
        )
        auto = self.regularization is not None and self.regularization.target_s == "auto"
        require(
            not auto or evaluates,
            "scu_target_s: auto watches the held-out loss; set eval_strategy: steps and eval_steps, for instance 20",
        )

    def _check_words(self) -> None:
        """Words that the stock Trainer reads only once the run has begun."""
        from accelerate.utils import DynamoBackend

        backend = self.training.torch_compile_backend
        known = [item.value.lower() for item in DynamoBackend]
        require(
            backend is None or backend.lower() in known,
            f"torch_compile_backend is {backend!r}; allowed: {', '.join(known)}{nearest(str(backend), known)}",
        )
        pairs = (self.training.optim_args or "").replace(" ", "").split(",")
        odd = next((pair for pair in pairs if pair and pair.count("=") != 1), None)
        require(
            odd is None and (pairs == [""] or "" not in pairs),
            f"optim_args is {self.training.optim_args!r}; write NAME=VALUE,NAME=VALUE, such as momentum=0.9",
        )
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Fields that need each other, and of which the stock Trainer complains only once the run has begun."""
        training = self.training
        require(
            not training.fsdp or training.world_size > 1,
            "fsdp shares a model out among processes, and there is one; start with torchrun or accelerate launch, or "
            "drop fsdp",
        )
        require(
            training.dataloader_prefetch_factor is None or training.dataloader_num_workers > 0,
            "dataloader_prefetch_factor is for loader processes; add dataloader_num_workers: 1 or more, or drop it",
        )
        require(
            not training.dataloader_persistent_workers or training.dataloader_num_workers > 0,
            "dataloader_persistent_workers is for loader processes; add dataloader_num_workers: 1 or more, or drop it",
        )
        best = getattr(training.save_strategy, "value", training.save_strategy) == "best"
        require(
            not best or training.metric_for_best_model is not None,
            "save_strategy: best needs metric_for_best_model, such as loss",
        )
        require(
            not training.batch_eval_metrics,
            "batch_eval_metrics needs a compute_metrics of one's own, which the command line has not; drop it",
        )

    def _check_optimizer(self) -> None:
        optim, device = getattr(self.training.optim, "value", self.training.optim), self.training.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        zero = getattr(self.training, "hf_deepspeed_config", None)
        check_optimizer(optim, device.type, capability, deepspeed_offload=zero is not None and zero.is_offload())

    def _check_memory(self) -> None:
        rows = self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        lowest = self.memory.min_batch_size
        require(
            not self.memory.acts or lowest <= rows or rows < 1,  # preflight says what is wrong with no rows
            f"min_batch_size {lowest} exceeds the {rows} rows of an optimizer step on a device "
            "(per_device_train_batch_size x gradient_accumulation_steps); lower min_batch_size",
        )

    @property
    def acting_curriculum(self) -> Optional[CurriculumSettings]:
        """None where nothing was asked for and losses of samples cannot be tracked."""
        tracks = not self.data.streaming and obstacle(self.training, self.memory) is None
        return self.curriculum if self.curriculum.methods or tracks else None

    def _check_curriculum(self) -> None:
        if not self.curriculum.methods:
            return
        require(
            not self.data.streaming,
            f"curriculum {self.curriculum.curriculum} chooses samples by number, and streaming data have none; set "
            "streaming: false, or curriculum: none",
        )
        reason = obstacle(self.training, self.memory)
        require(reason is None, str(reason))
        if self.training.max_steps <= 0:
            require_enough_epochs(self.curriculum, self.training.num_train_epochs)

    def planned_steps(self, rows: int) -> int:
        """Optimizer steps for ``rows`` training rows, counted as the stock Trainer does."""
        training = self.training
        if training.max_steps > 0:
            return training.max_steps
        batches = math.ceil(
            rows / (training.per_device_train_batch_size * max(1, training.n_gpu) * training.world_size)
        )
        per_epoch = max(1, math.ceil(batches / training.gradient_accumulation_steps))
        return math.ceil(per_epoch * training.num_train_epochs)


def _refuse_secrets(settings: dict[str, Any]) -> None:
    """Names and paths end up in files that people share: the model card, the adapter's configuration, TensorBoard."""
    name = where_secret(settings)
    if name is not None:
        raise SettingsError(
            f"{name} holds a password or token ({redact_data(settings[name])}), which would stand in the run's files; "
            "take it out, and give it in the environment (HF_TOKEN for the Hub) or by hf auth login"
        )


def _training_as_dict(training: TrainingArguments) -> dict[str, Any]:
    # What the launcher decides is no part of a configuration, and mixed_precision says what bf16 and fp16 say.
    left_out = {"local_rank", "deepspeed_plugin", "distributed_state", "bf16", "fp16", "tf32"}
    # Tokens stand there as a placeholder, which would be taken for a token when the configuration is read back.
    found = training.to_dict().items()
    return {name: value for name, value in found if name not in left_out and not name.endswith("_token")}


def checkpoint_bytes(model, training: TrainingArguments, averaged: bool = False) -> int:
    """Room for the checkpoints that this run will hold at once, beside the final model: weights, two Adam moments and
    w0 of what is trained; full tuning saves all weights as well. DeepSpeed keeps the weights twice more, for its engine
    and as float32 masters. ``averaged``: with moving averages of the weights beside them."""
    kept = 1 if training.save_total_limit is None else training.save_total_limit + 1
    saves = 0 if training.save_strategy == "no" else kept
    copies = 6 if uses_deepspeed(training) else 4
    copies += averaged
    return trained_bytes(model) * (copies * saves + 1)


def free_memory(training: TrainingArguments) -> Free:
    return Free(cuda_bytes(training), int(probe().ram_available_bytes))


def cuda_bytes(training: TrainingArguments) -> tuple[int, ...]:
    """Free bytes of each CUDA GPU that training uses."""
    return () if training.use_cpu else tuple(gpu.free_bytes for gpu in accelerators() if gpu.kind == "cuda")


def is_leader() -> bool:
    """Whether this process is the one of all ranks that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0
