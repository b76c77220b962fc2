"""Checks of optimizer settings that make no sense for any model and any data."""

from __future__ import annotations

from collections.abc import Iterator

from scu_trainer.settings.base import as_typed
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding

LEARNING_RATE_SIGN = Check(
    "learning-rate-not-positive",
    "error",
    "learning_rate is 0 (no weight moves) or negative (the optimizer refuses it)",
    "set a learning_rate above 0, such as 2e-4 for LoRA or 2e-5 for full tuning",
)
LEARNING_RATE_ABOVE_ONE = Check(
    "learning-rate-above-one",
    "error",
    "learning_rate is 1 or more, and Adam and similar optimizers move each weight by about learning_rate per step",
    "add the exponent, such as 2e-4",
)
NO_ROWS_PER_STEP = Check(
    "no-rows-per-step",
    "error",
    "a batch size or gradient_accumulation_steps is below 1, which the data loader refuses",
    "give 1 or more",
)
NO_STEPS = Check(
    "no-steps",
    "error",
    "max_steps is 0, or num_train_epochs is 0 or less and max_steps is not given, so the run would have no steps",
    "set num_train_epochs, for instance to 1, or max_steps",
)
WEIGHT_DECAY_NEGATIVE = Check(
    "weight-decay-negative", "error", "the optimizer refuses a weight_decay below 0", "give 0 or more, such as 0.01"
)
WEIGHT_DECAY_ABOVE_ONE = Check(
    "weight-decay-above-one",
    "warning",
    "weight_decay is above 1; usual values are 0 to 0.1",
    "lower weight_decay, unless you want such a strong decay toward zero",
)
BETAS = Check(
    "adam-betas", "error", "adam_beta1 or adam_beta2 is not from 0 to below 1", "use 0.9 and 0.999, or 0.9 and 0.95"
)
SHORT_MEMORY = Check(
    "adam-beta2-small",
    "warning",
    "adam_beta2 is below adam_beta1, so the size of a step follows the noise of single batches",
    "use 0.95 to 0.999 for adam_beta2; perhaps the two were swapped",
)
EPSILON = Check(
    "adam-epsilon",
    "warning",
    "adam_epsilon is 0 (which gives 0/0 for weights without a gradient) or so large that steps hardly adapt",
    "use 1e-8, or 1e-6 in half precision",
)
CLIPPING = Check(
    "clips-nearly-all",
    "warning",
    "max_grad_norm is so small that clipping leaves almost nothing of each gradient",
    "use 1.0, or 0 for no clipping",
)
SMOOTHING = Check(
    "label-smoothing",
    "error",
    "label_smoothing_factor is not in the range from 0 to below 1, so training would lower the correct answers",
    "give 0 or, for instance, 0.1",
)
ADAPTER_SCALE = Check(
    "adapter-scale",
    "warning",
    "lora_alpha / lora_r, the factor on the output of the adapters, is far from the usual 0.5 to 4",
    "set lora_alpha to one or two times lora_r",
)

SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
LARGEST_EPSILON = 1e-3
SMALLEST_CLIPPING = 1e-3
SCALES = (1 / 32, 32)


def before_loading(job: Job) -> Iterator[Finding]:
    yield from _check_counts(job)
    yield from _check_rates(job)
    yield from _check_adam(job)
    yield from _check_adapter_scale(job)


def optimizer_name(job: Job) -> str:
    """Return the value of ``optim``, or "muon" if ``use_muon`` replaces it."""
    return "muon" if job.efficiency.use_muon else as_typed(job.training.optim)


def is_plain_gradient(name: str) -> bool:
    """Whether a step is the gradient times the learning rate, instead of about the learning rate for each weight."""
    return "sgd" in name or name == "lomo"


def _check_counts(job: Job) -> Iterator[Finding]:
    training = job.training
    for name in SIZES:
        if getattr(training, name) < 1:
            yield NO_ROWS_PER_STEP.found(f"{name} is {getattr(training, name)}", name)
    if training.max_steps == 0:
        fix = "give 1 or more, or drop max_steps to train for num_train_epochs"
        yield NO_STEPS.found("max_steps is 0: no steps", "max_steps", fix)
    elif training.max_steps < 0 and training.num_train_epochs <= 0:
        yield NO_STEPS.found(f"num_train_epochs is {training.num_train_epochs:g}: no steps", "num_train_epochs")


def _check_rates(job: Job) -> Iterator[Finding]:
    training, rate = job.training, job.training.learning_rate
    if rate <= 0:
        what = "no weight would move" if rate == 0 else "the optimizer refuses it"
        yield LEARNING_RATE_SIGN.found(f"learning_rate is {rate:g}: {what}", "learning_rate")
    elif rate >= 1 and not is_plain_gradient(optimizer_name(job)):
        what = f"learning_rate is {rate:g}: each step would move each weight by about that much"
        yield LEARNING_RATE_ABOVE_ONE.found(what, "learning_rate")
    if training.weight_decay < 0:
        yield WEIGHT_DECAY_NEGATIVE.found(f"weight_decay is {training.weight_decay:g}", "weight_decay")
    elif training.weight_decay > 1:
        yield WEIGHT_DECAY_ABOVE_ONE.found(f"weight_decay is {training.weight_decay:g}", "weight_decay")
    if not 0 <= training.label_smoothing_factor < 1:
        what = f"label_smoothing_factor is {training.label_smoothing_factor:g}"
        yield SMOOTHING.found(what, "label_smoothing_factor")
    if training.max_grad_norm is not None and 0 < training.max_grad_norm < SMALLEST_CLIPPING:
        yield CLIPPING.found(f"max_grad_norm is {training.max_grad_norm:g}", "max_grad_norm")


def _check_adam(job: Job) -> Iterator[Finding]:
    training = job.training
    if is_plain_gradient(optimizer_name(job)):
        return
    first, second, epsilon = training.adam_beta1, training.adam_beta2, training.adam_epsilon
    betas = {"adam_beta1": first, "adam_beta2": second}
    outside = [f"{name} {value:g}" for name, value in betas.items() if not 0 <= value < 1]
    if outside:
        yield BETAS.found(f"{' and '.join(outside)}; allowed: 0 to below 1", "adam_beta1, adam_beta2")
    elif second < first:
        yield SHORT_MEMORY.found(f"adam_beta2 {second:g} is below adam_beta1 {first:g}", "adam_beta2")
    if epsilon <= 0 or epsilon > LARGEST_EPSILON:
        yield EPSILON.found(f"adam_epsilon is {epsilon:g}", "adam_epsilon")


def _check_adapter_scale(job: Job) -> Iterator[Finding]:
    model = job.model
    scale = model.lora_alpha / model.lora_r
    if model.tuning != "full" and not SCALES[0] <= scale <= SCALES[1]:
        what = f"lora_alpha {model.lora_alpha:g} over lora_r {model.lora_r} multiplies the adapters by {scale:g}"
        yield ADAPTER_SCALE.found(what, "lora_alpha, lora_r")
