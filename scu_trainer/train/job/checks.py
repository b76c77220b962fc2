"""Checks for settings of a job that contradict each other, before anything is loaded. Each raises SettingsError."""

from __future__ import annotations

import os
from typing import Optional

import torch
from accelerate.utils import DynamoBackend, parse_flag_from_env
from transformers import TrainingArguments

from scu_trainer.data.sources import require_existing_path
from scu_trainer.errors import RequirementError, did_you_mean
from scu_trainer.hardware.optimizers import FOR_BFLOAT16, STOCHASTIC, check_optimizer, preserves_small_updates
from scu_trainer.hardware.probe import installed_version
from scu_trainer.models.loading.names import check_source
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    RetentionSettings,
)
from scu_trainer.settings.base import as_typed, require
from scu_trainer.settings.mixture import is_same_dataset
from scu_trainer.settings.regularization import SAMPLED
from scu_trainer.train.job.optimizer_checks import check_optimizer_arguments, check_schedule
from scu_trainer.train.loss.rows.model_loss import liger_replaces_loss
from scu_trainer.train.retention.choice import SHARDED_WEIGHTS_MESSAGE
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed, zero_stage
from scu_trainer.train.step.distributed.launchers import refuse_fields
from scu_trainer.train.step.distributed.sharded import form_of_fsdp


def check_evaluation(
    training: TrainingArguments, data: DataSettings, regularization: Optional[RegularizationSettings]
) -> None:
    """Require held-out data for evaluations, and evaluations for ``target_s: auto``."""
    holds_out = data.eval_dataset is not None or data.streaming or data.validation_split_percentage > 0
    evaluates = training.eval_strategy != "no"
    require(
        holds_out or not evaluates,
        "eval_strategy needs held-out data, but validation_split_percentage is 0; raise it, give eval_dataset "
        "or set eval_strategy: no",
    )
    auto = regularization is not None and regularization.target_s == "auto"
    require(
        not auto or evaluates,
        "scu_target_s: auto needs the held-out loss; set eval_strategy: steps and eval_steps, for instance 20",
    )


def check_launcher(training: TrainingArguments) -> None:
    """Reject launcher settings that no run supports; accelerate reports them after the model is loaded, or never."""
    require(
        not (training.use_cpu and parse_flag_from_env("ACCELERATE_USE_FSDP")),
        "FSDP has no effect on a CPU (accelerate would silently train data parallel); use "
        "accelerate_configs/cpu_2_processes.yaml, or a machine with GPUs and no use_cpu",
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    require(
        launched == training.world_size,
        f"the launcher started {launched} processes, but training would use {training.world_size}: each would "
        "train alone; add use_cpu: true (CPU), or start with torchrun --nproc_per_node",
    )
    require(
        not training.fsdp or training.world_size > 1,
        "fsdp splits a model over processes, and there is only one; start with torchrun or accelerate launch, or "
        "drop fsdp",
    )
    instead = "distributed_type: MULTI_GPU, FSDP or DEEPSPEED"
    require(
        not parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"),
        f"the launcher requests Megatron-LM, which the Trainer of transformers does not support; use {instead}",
    )
    if not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    tensor_parallel = os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")
    require(
        tensor_parallel == "1",
        f"the launcher's parallelism_config has tp_size {tensor_parallel}, but tensor parallelism is not supported "
        f"here; drop it, and use {instead}",
    )
    require(not training.use_cpu, "the launcher's parallelism_config does not work on a CPU; drop it, or use_cpu")


def check_text_values(training: TrainingArguments) -> None:
    """Check text values that the stock Trainer reads only after the run has started."""
    backend = training.torch_compile_backend
    known = [item.value.lower() for item in DynamoBackend]
    require(
        backend is None or backend.lower() in known,
        f"torch_compile_backend is {backend!r}; allowed: {', '.join(known)}{did_you_mean(str(backend), known)}",
    )
    pairs = (training.optim_args or "").replace(" ", "").split(",")
    malformed = next((pair for pair in pairs if pair and pair.count("=") != 1), None)
    require(
        malformed is None and (pairs == [""] or "" not in pairs),
        f"optim_args is {training.optim_args!r}; write NAME=VALUE,NAME=VALUE, such as momentum=0.9",
    )
    check_optimizer_arguments(training, dict(pair.split("=") for pair in pairs if pair))
    check_schedule(training)
    _check_dependent_fields(training)
    _check_custom_evaluation(training)


def _check_dependent_fields(training: TrainingArguments) -> None:
    """Check fields that need each other, which the stock Trainer checks only after the run has started."""
    require(
        training.dataloader_prefetch_factor is None or training.dataloader_num_workers > 0,
        "dataloader_prefetch_factor is for worker processes; set dataloader_num_workers to 1 or more, or drop it",
    )
    require(
        not training.dataloader_persistent_workers or training.dataloader_num_workers > 0,
        "dataloader_persistent_workers is for worker processes; set dataloader_num_workers to 1 or more, or drop it",
    )
    require(
        training.save_strategy != "best" or training.metric_for_best_model is not None,
        "save_strategy: best needs metric_for_best_model, such as loss",
    )


def _check_custom_evaluation(training: TrainingArguments) -> None:
    """Reject fields for custom evaluations: the command line reads the task's labels and the scores of all rows."""
    require(
        training.label_names in (None, ["labels"]),
        f"label_names is {training.label_names}, but the command line sets the names of its labels; drop it",
    )
    require(
        not training.prediction_loss_only,
        "prediction_loss_only would leave out the held-out bits per token (or label) of each evaluation; drop it: "
        "logits are never kept",
    )
    require(
        training.eval_do_concat_batches,
        "eval_do_concat_batches: false is for your own compute_metrics, which the command line does not have; drop it",
    )
    require(
        not training.batch_eval_metrics,
        "batch_eval_metrics needs your own compute_metrics, which the command line does not have; drop it",
    )


def check_training_optimizer(training: TrainingArguments, model: ModelSettings) -> None:
    """Check that ``optim`` and related settings work on the training device and with the type of the weights."""
    optim, device = as_typed(training.optim), training.device
    _check_liger(training, device.type)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    zero = getattr(training, "hf_deepspeed_config", None)
    _check_loraplus(optim, training, model)
    require(
        model.init_lora_weights != "loftq" or device.type in ("cuda", "xpu"),
        f"init_lora_weights: loftq is computed by peft on CUDA or XPU only, but this job runs on {device.type}; use "
        "init_lora_weights: true, or pissa",
    )
    check_optimizer(optim, device.type, capability, deepspeed_offload=zero is not None and zero.is_offload())
    require(
        not model.trains_bfloat16 or uses_deepspeed(training) or preserves_small_updates(optim, training.optim_args),
        f"optim: {optim} loses the steps that are too small for bfloat16 weights (dtype: bfloat16, tuning: full); "
        f"drop optim, so that the run uses {FOR_BFLOAT16} with optim_args: {STOCHASTIC}, use stable_adamw (Kahan "
        "summation, pip install torch-optimi), or set dtype: float32 with mixed_precision: bf16",
    )


def _check_liger(training: TrainingArguments, device_type: str) -> None:
    """Check for a GPU and for the Liger package, which the stock Trainer imports only when training starts."""
    if not training.use_liger_kernel:
        return
    require(device_type != "cpu", "use_liger_kernel has kernels for GPUs only, but this run is on a CPU; drop it")
    if installed_version("liger-kernel") is None:
        raise RequirementError("use_liger_kernel needs liger-kernel, not installed here (pip install liger-kernel)")


def _check_loraplus(optim: str, training: TrainingArguments, model: ModelSettings) -> None:
    """Check loraplus_lr_ratio: its groups of weights precede sharding, and the optimizer must not make its own."""
    if model.loraplus_lr_ratio is None:
        return
    shards = uses_deepspeed(training) or bool(training.fsdp)
    require(not shards, "loraplus_lr_ratio has no effect under DeepSpeed and FSDP, which make the optimizer; drop it")
    require(
        not optim.startswith(("galore", "apollo", "lomo", "adalomo")),
        f"loraplus_lr_ratio and optim: {optim} both define groups of weights; drop one of them",
    )


def check_packing(training: TrainingArguments, data: DataSettings) -> None:
    """Reject use_cache with isolated documents: with a key-value cache, transformers does not treat restarting
    positions as the border of a document, not even in training."""
    isolates = data.packing and data.isolate_documents is not False
    require(
        not (training.use_cache and isolates),
        "use_cache: true lets packed documents see each other, but they are to be isolated; drop it, or set packing: "
        "false",
    )


def check_memory(training: TrainingArguments, memory: MemorySettings) -> None:
    """Check settings that do not work with micro-batches, and the bounds on their rows against the rows of a step."""
    if memory.acts:
        refuse_fields(training)
    if memory.batch_mode == "logical":
        memory.largest_logical_batch(training.per_device_train_batch_size)
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    lowest = memory.min_batch_size
    require(
        not memory.acts or lowest <= rows or rows < 1,  # preflight reports fewer than 1
        f"min_batch_size {lowest} exceeds the {rows} rows of an optimizer step on a device "
        "(per_device_train_batch_size x gradient_accumulation_steps); lower min_batch_size",
    )


def check_teacher(
    training: TrainingArguments, model: ModelSettings, memory: MemorySettings, curriculum: CurriculumSettings
) -> None:
    """Check settings against distillation, which computes the loss from the logits of both models."""
    if model.teacher is None:
        return
    check_source(model.teacher, "teacher", typed="teacher ")
    contradictions = {
        "chunked_loss: always makes no logits": memory.chunked_loss == "always",
        "use_liger_kernel makes no logits": liger_replaces_loss(training),
        "label_smoothing_factor changes the loss": training.label_smoothing_factor,
        "curriculum: infobatch weights the task's loss of each row": "infobatch" in curriculum.methods,
        "ZeRO-3 shards every model that is loaded": zero_stage(training) == 3,
    }
    conflict = next((reason for reason, is_so in contradictions.items() if is_so), None)
    require(conflict is None, f"{conflict}, but a teacher needs the plain loss of whole models; drop one of them")


def check_retention(
    training: TrainingArguments,
    retention: RetentionSettings,
    regularization: Optional[RegularizationSettings],
    memory: MemorySettings,
    curriculum: CurriculumSettings,
) -> None:
    """Check the retention settings against the loops that its actuators use."""
    if not retention.acts:
        return
    require(zero_stage(training) != 3 and form_of_fsdp(training) is None, SHARDED_WEIGHTS_MESSAGE)
    steers = regularization is not None and regularization.steers
    require(
        retention.retain_actuator != "lambda" or (regularization is not None and not steers),
        "retain_actuator: lambda acts through the regularization loop, which "
        + ("scu_target_s or scu_law already control; drop them" if steers else "scu: false switches off; set scu: true")
        + ", or set retain_actuator: replay",
    )
    replays = retention.retain_actuator != "lambda"
    require(
        not (replays and curriculum.methods),
        f"curriculum: {curriculum.curriculum} plans every batch, but replay adds rows to it; set retain_actuator: "
        "lambda, or curriculum: none",
    )
    require(
        not (replays and memory.batch_mode == "logical"),
        "batch_mode: logical gives each step as many rows as memory allows, but replay adds rows to it; set "
        "retain_actuator: lambda, or drop batch_mode",
    )


def check_anchor(name: str, data: DataSettings) -> None:
    """Check the text that must not be forgotten (``retain``) against the training data."""
    if name == SAMPLED:
        require(
            name not in [source.name for source in data.sources],
            f"retain: {SAMPLED} means text that the model generates, but a source of the data has the same name; give "
            "the source another name (name: in its entry of dataset)",
        )
        return
    place = data.index_of_source(name)
    is_learned = place is not None or (isinstance(data.dataset, str) and is_same_dataset(data.dataset, name))
    require(
        not (is_learned and data.streaming),
        f"retain: {name} is trained on, but the held-out documents of streamed data are not known in advance; "
        "set streaming: false, or give another text",
    )
    require(
        place is None or data.eval_dataset is None,
        f"retain: {name} is a source of the data, but with an eval_dataset no source has held-out documents to measure "
        "on; drop eval_dataset, or give a text that is not trained on",
    )
    if place is None:
        require_existing_path(name)
