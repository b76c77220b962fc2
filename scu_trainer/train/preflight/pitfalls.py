"""Checks of settings of the stock Trainer that have costly side effects, and of settings without any effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from scu_trainer.settings.base import as_typed, changed_fields
from scu_trainer.settings.curriculum import METHODS
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding
from scu_trainer.train.step.distributed.deepspeed_config import source_of
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed

FINDS_BATCH_SIZE = Check(
    "restarts-on-out-of-memory",
    "warning",
    "after running out of memory, auto_find_batch_size restarts the steps with the weights trained so far: samples are "
    "repeated or never seen",
    "drop it: memory_control: true recovers without a restart",
)
GROUPS_BY_LENGTH = Check(
    "batches-grouped-by-length",
    "warning",
    "train_sampling_strategy: group_by_length makes the loss rise and fall with the length of the rows and gives short "
    "rows too much weight",
    "use curriculum: token_budget, which saves the same padding",
)
NO_SHUFFLE = Check(
    "rows-not-shuffled",
    "warning",
    "train_sampling_strategy: sequential trains in the order of the file, one class after another if it is sorted",
    "use train_sampling_strategy: random",
)
WITHOUT_EFFECT = Check(
    "setting-without-effect",
    "note",
    "a setting was given that has no effect, because of another setting or of its value",
    "drop it, or change the other setting",
)

OF_MEMORY_CONTROL = ("target_headroom_gb", "gc_threshold_gb", "ram_threshold_gb", "pid_kp", "pid_ki", "pid_kd")
OF_SPLITTING = ("min_batch_size", "max_batch_size")
"""These also have an effect without memory control, if token_cap is set."""
OF_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
WITHOUT_ADAM = ("sgd", "rmsprop", "adagrad", "adafactor", "lomo", "adalomo", "galore", "schedule_free_sgd")
"""Prefixes of the names of optimizers that do not read Adam's settings."""


class Idle(NamedTuple):
    """Settings that have no effect on jobs with ``is_idle``. ``why``: the reason. ``instead``: what to do."""

    names: tuple[str, ...]
    is_idle: Callable[[Job], bool]
    why: str
    instead: str = "drop it"


IDLE = (
    Idle(
        ("warmup_steps",),
        lambda job: as_typed(job.training.lr_scheduler_type) in ("constant", "reduce_lr_on_plateau")
        and not as_typed(job.training.optim).startswith("schedule_free"),
        "this lr_scheduler_type starts at the full rate", "set lr_scheduler_type: constant_with_warmup, or drop it",
    ),
    Idle(
        ("warmup_steps",), lambda job: as_typed(job.training.optim) == "schedule_free_radam",
        "this optim has its own warm-up",
    ),
    Idle(
        ("weight_decay",), lambda job: as_typed(job.training.optim).startswith(("galore", "apollo")),
        "transformers does not pass it to this optim",
    ),
    Idle(
        ("save_steps",), lambda job: as_typed(job.training.save_strategy) != "steps",
        "save_strategy does not count steps", "set save_strategy: steps, or drop it",
    ),
    Idle(
        ("logging_steps",),  # without a target, S is measured at this interval with any strategy
        lambda job: as_typed(job.training.logging_strategy) != "steps" and job.regularization is None,
        "logging_strategy does not count steps", "set logging_strategy: steps, or drop it",
    ),
    Idle(
        ("eval_delay",), lambda job: as_typed(job.training.eval_strategy) == "no", "eval_strategy is no",
        "set eval_strategy: epoch, or drop it",
    ),
    Idle(
        ("hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push"),
        lambda job: not job.training.push_to_hub, "push_to_hub is false", "set push_to_hub: true, or drop it",
    ),
    Idle(("do_predict",), lambda job: True, "this command never predicts", "use scu-trainer eval after training"),
    Idle(("include_for_metrics",), lambda job: True, "only a compute_metrics function in Python can use it"),
    Idle(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        lambda job: as_typed(job.training.optim).startswith(WITHOUT_ADAM), "this optim does not read it",
    ),
    Idle(
        ("optim_target_modules",), lambda job: not as_typed(job.training.optim).startswith(("galore", "apollo")),
        "this optim does not read it",
    ),
    Idle(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        lambda job: not job.training.activation_checkpointing, "activation_checkpointing is off",
        "set activation_checkpointing: true, or drop it",
    ),
    Idle(
        ("liger_kernel_config",), lambda job: not job.training.use_liger_kernel, "use_liger_kernel is false",
        "set use_liger_kernel: true, or drop it",
    ),
    Idle(("fsdp_config",), lambda job: not job.training.fsdp, "fsdp is off", "set fsdp: true, or drop it"),
    Idle(
        ("length_column_name",),
        lambda job: job.training.train_sampling_strategy != "group_by_length" and not job.curriculum.methods,
        "neither train_sampling_strategy: group_by_length nor a curriculum reads it",
    ),
    Idle(
        ("validation_split_percentage",), lambda job: job.data.eval_dataset is not None,
        "eval_dataset is the held-out data", "drop one of them",
    ),
    Idle(("sample_max_new_tokens",), lambda job: job.data.sample_prompts == 0, "sample_prompts is 0"),
    Idle(
        ("model_revision",),
        lambda job: job.model.model_name_or_path is None and job.model.adapter_name_or_path is None,
        "the model is the embedded base",
    ),
    Idle(
        ("embedded_base_steps",), lambda job: job.model.model_name_or_path is not None,
        "the model is not the embedded base",
    ),
    Idle(
        ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
        lambda job: job.model.tuning != "qlora" or job.model.load_in_8bit, "no weights are stored in 4 bits",
        "drop it, or set tuning: qlora without load_in_8bit",
    ),
    Idle(("divergence_factor",), lambda job: job.safety.divergence == "off", "divergence is off"),
    Idle(
        ("difficulty_alpha", "difficulty_window", "difficulty_stale_epochs"),
        lambda job: not job.curriculum.methods, "curriculum is none",
    ),
    Idle(
        ("scu_kp", "scu_ki", "scu_integral_clamp", "scu_integral_leak"),
        lambda job: _scu_law(job) not in (None, "original"), "scu_law is not original",
    ),
    Idle(
        ("scu_time_constant", "scu_growth_alpha"), lambda job: _scu_law(job) not in (None, "model"),
        "scu_law is not model",
    ),
    Idle(
        ("scu_lambda_min", "scu_lambda_max", "scu_deadband"), lambda job: _scu_law(job) in ("fixed", "schedule"),
        "scu_law is fixed or schedule, which do not use it",
    ),
    Idle(("scu_lambda_init",), lambda job: _scu_law(job) == "model", "scu_law is model, which computes lambda"),
    Idle(
        ("scu_lambda_final", "scu_schedule"), lambda job: _scu_law(job) not in (None, "schedule"),
        "scu_law is not schedule",
    ),
)  # fmt: skip


def _scu_law(job: Job) -> Optional[str]:
    return None if job.regularization is None else job.regularization.law


def before_loading(job: Job) -> Iterator[Finding]:
    training = job.training
    if training.auto_find_batch_size:
        yield FINDS_BATCH_SIZE.found("auto_find_batch_size: true", "auto_find_batch_size")
    if training.train_sampling_strategy == "group_by_length":
        yield GROUPS_BY_LENGTH.found("train_sampling_strategy: group_by_length", "train_sampling_strategy")
    if training.train_sampling_strategy == "sequential" and job.task.task != TEXT:
        yield NO_SHUFFLE.found("train_sampling_strategy: sequential", "train_sampling_strategy")
    yield from _check_listed_settings(job)
    yield from _check_adapter_settings(job)
    yield from _check_intervals(job)
    yield from _check_deepspeed_clipping(job)
    yield from _check_memory_settings(job)
    yield from _check_curriculum_settings(job)


def _check_listed_settings(job: Job) -> Iterator[Finding]:
    for idle in IDLE:
        given = [name for name in idle.names if name in job.changed_from]
        if given and idle.is_idle(job):
            yield WITHOUT_EFFECT.found(f"{', '.join(given)} given, and {idle.why}", ", ".join(given), idle.instead)


def _check_adapter_settings(job: Job) -> Iterator[Finding]:
    """Check LoRA settings with tuning: full. A setting counts as given if it differs from the defaults of dataclass and
    task, because a job does not record which fields were set."""
    model = job.model
    if model.tuning != "full":
        return
    fields = type(model).__dataclass_fields__
    defaults = {name: job.task.defaults.get(name, fields[name].default) for name in OF_LORA}
    given = [name for name in OF_LORA if getattr(model, name) not in (defaults[name], fields[name].default)]
    if given:
        what = f"{', '.join(given)} given, and tuning is full, which has no adapters"
        yield WITHOUT_EFFECT.found(what, ", ".join(given), "drop it, or set tuning: lora")


def _check_intervals(job: Job) -> Iterator[Finding]:
    training = job.training
    strategy = as_typed(training.eval_strategy)
    if training.eval_steps is not None and strategy != "steps":
        what = f"eval_steps {training.eval_steps:g} given, and eval_strategy is {strategy}, which does not count steps"
        yield WITHOUT_EFFECT.found(what, "eval_steps", "set eval_strategy: steps, or drop eval_steps")
    if training.save_total_limit is not None and training.save_total_limit <= 0:
        what = f"save_total_limit is {training.save_total_limit}, which limits nothing: every checkpoint is kept"
        yield WITHOUT_EFFECT.found(what, "save_total_limit", "give 1 or more, or save_strategy: no for no checkpoints")


def _check_memory_settings(job: Job) -> Iterator[Finding]:
    memory, given = job.memory, changed_fields(job.memory)
    if memory.batch_mode == "chunk" and "batch_size_lr_rule" in given:
        what = "batch_size_lr_rule given, and batch_mode is chunk, which never changes the batch of the optimizer"
        yield WITHOUT_EFFECT.found(what, "batch_size_lr_rule", "drop it, or set batch_mode: logical")
    idle = [name for name in (*OF_MEMORY_CONTROL, *(() if memory.acts else OF_SPLITTING)) if name in given]
    if idle and not memory.memory_control:
        what = f"{', '.join(idle)} given, and memory_control is false"
        yield WITHOUT_EFFECT.found(what, ", ".join(idle), "drop it, or set memory_control: true")


def _check_curriculum_settings(job: Job) -> Iterator[Finding]:
    """Check the fields of curriculum methods that are off; their names begin with the name of the method."""
    curriculum = job.curriculum
    for method in METHODS:
        idle = [name for name in changed_fields(curriculum) if name.startswith(f"{method}_")]
        if idle and method not in curriculum.methods:
            what = f"{', '.join(idle)} given, and curriculum is {curriculum.curriculum}"
            yield WITHOUT_EFFECT.found(what, ", ".join(idle), f"drop it, or set curriculum: {method}")


def _check_deepspeed_clipping(job: Job) -> Iterator[Finding]:
    """Check max_grad_norm with DeepSpeed, whose configuration alone counts; the Trainer fills in only "auto" there."""
    training = job.training
    if not uses_deepspeed(training) or "gradient_clipping" in training.hf_deepspeed_config.config:
        return
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT as default

    requested = training.max_grad_norm or 0
    if requested != default:
        what = f"max_grad_norm is {requested:g}, and {source_of(training)} has no gradient_clipping: DeepSpeed uses "
        yield WITHOUT_EFFECT.found(f"{what}{default:g}", "max_grad_norm", 'add "gradient_clipping": "auto" there')
