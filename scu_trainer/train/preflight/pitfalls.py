"""Settings of the stock Trainer that do what they say, and something else that costs a run; and settings that were
given and do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from scu_trainer.settings.base import changed, plain
from scu_trainer.settings.curriculum import METHODS
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding
from scu_trainer.train.step.distributed.deepspeed_config import source_of
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed

FINDS_BATCH_SIZE = Check(
    "restarts-on-out-of-memory",
    "warning",
    "auto_find_batch_size starts the steps over after an out-of-memory, with the weights trained so far: samples are "
    "repeated or never seen",
    "drop it: memory_control: true recovers without",
)
GROUPS_BY_LENGTH = Check(
    "batches-grouped-by-length",
    "warning",
    "train_sampling_strategy: group_by_length makes the loss a sawtooth and gives short rows too much weight",
    "use curriculum: token_budget, which saves the same padding",
)
NO_SHUFFLE = Check(
    "rows-not-shuffled",
    "warning",
    "train_sampling_strategy: sequential shows samples in the order of the file, class after class if it is sorted",
    "use train_sampling_strategy: random",
)
WITHOUT_EFFECT = Check(
    "setting-without-effect",
    "note",
    "a setting was given that has no effect beside another one, or with this value",
    "drop it, or change the other setting",
)

OF_MEMORY_CONTROL = ("target_headroom_gb", "gc_threshold_gb", "ram_threshold_gb", "pid_kp", "pid_ki", "pid_kd")
OF_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


def before_loading(job: Job) -> Iterator[Finding]:
    training = job.training
    if training.auto_find_batch_size:
        yield FINDS_BATCH_SIZE.found("auto_find_batch_size: true", "auto_find_batch_size")
    if training.train_sampling_strategy == "group_by_length":
        yield GROUPS_BY_LENGTH.found("train_sampling_strategy: group_by_length", "train_sampling_strategy")
    if training.train_sampling_strategy == "sequential" and job.task.task != TEXT:
        yield NO_SHUFFLE.found("train_sampling_strategy: sequential", "train_sampling_strategy")
    yield from _idle_adapters(job)
    yield from _idle_numbers(job)
    yield from _idle_clipping(job)
    yield from _idle_memory(job)
    yield from _idle_curriculum(job)


def _idle_adapters(job: Job) -> Iterator[Finding]:
    """Only what differs from its default is known to be given; a job that has other defaults knows them."""
    model = job.model
    if model.tuning != "full":
        return
    fields = type(model).__dataclass_fields__
    unasked = {name: job.task.defaults.get(name, fields[name].default) for name in OF_LORA}
    given = [name for name in OF_LORA if getattr(model, name) not in (unasked[name], fields[name].default)]
    if given:
        what = f"{', '.join(given)} given, and tuning is full, which has no adapters"
        yield WITHOUT_EFFECT.found(what, ", ".join(given), "drop it, or set tuning: lora")


def _idle_numbers(job: Job) -> Iterator[Finding]:
    training = job.training
    strategy = plain(training.eval_strategy)
    if training.eval_steps is not None and strategy != "steps":
        what = f"eval_steps {training.eval_steps:g} given, and eval_strategy is {strategy}, which does not count steps"
        yield WITHOUT_EFFECT.found(what, "eval_steps", "set eval_strategy: steps, or drop eval_steps")
    if training.save_total_limit is not None and training.save_total_limit <= 0:
        what = f"save_total_limit is {training.save_total_limit}, which limits nothing: every checkpoint is kept"
        yield WITHOUT_EFFECT.found(what, "save_total_limit", "give 1 or more, or save_strategy: no for no checkpoints")


def _idle_memory(job: Job) -> Iterator[Finding]:
    memory, given = job.memory, changed(job.memory)
    if memory.batch_mode == "chunk" and "batch_size_lr_rule" in given:
        what = "batch_size_lr_rule given, and batch_mode is chunk, which never changes the batch of the optimizer"
        yield WITHOUT_EFFECT.found(what, "batch_size_lr_rule", "drop it, or set batch_mode: logical")
    idle = [name for name in OF_MEMORY_CONTROL if name in given]
    if idle and not memory.memory_control:
        what = f"{', '.join(idle)} given, and memory_control is false"
        yield WITHOUT_EFFECT.found(what, ", ".join(idle), "drop it, or set memory_control: true")


def _idle_curriculum(job: Job) -> Iterator[Finding]:
    """Fields that begin with the name of a method are of that method."""
    curriculum = job.curriculum
    for method in METHODS:
        idle = [name for name in changed(curriculum) if name.startswith(f"{method}_")]
        if idle and method not in curriculum.methods:
            what = f"{', '.join(idle)} given, and curriculum is {curriculum.curriculum}"
            yield WITHOUT_EFFECT.found(what, ", ".join(idle), f"drop it, or set curriculum: {method}")


def _idle_clipping(job: Job) -> Iterator[Finding]:
    """DeepSpeed clips by its own configuration alone, and the stock Trainer fills in only what is there as "auto"."""
    training = job.training
    if not uses_deepspeed(training) or "gradient_clipping" in training.hf_deepspeed_config.config:
        return
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT as default

    asked = training.max_grad_norm or 0
    if asked != default:
        what = f"max_grad_norm is {asked:g}, and {source_of(training)} has no gradient_clipping: DeepSpeed takes "
        yield WITHOUT_EFFECT.found(f"{what}{default:g}", "max_grad_norm", 'add "gradient_clipping": "auto" there')
