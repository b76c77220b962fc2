"""Checks of the loaded model: which weights are trained, whether all are finite, and whether a step changes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn
from transformers.trainer_utils import check_target_module_exists

from scu_trainer.hardware.optimizers import preserves_small_updates
from scu_trainer.models.loading.adapters import active_config
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.models.quantize import is_of_torchao
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent
from scu_trainer.train.preflight.optimization import is_plain_gradient, optimizer_name
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed
from scu_trainer.train.step.distributed.sharded import weight_count

NOTHING_TRAINED = Check(
    "nothing-trained",
    "error",
    "no weight of the model is trainable",
    "use tuning: lora or full, and check whether the model's code freezes its weights",
)
NO_SUCH_LAYER = Check(
    "optim-target-missing",
    "error",
    "optim_target_modules names no linear layer of the model, but GaLore and APOLLO work only on linear layers",
    "set optim_target_modules: all-linear, a list such as '[\"q_proj\"]', or a pattern for whole names: .*q_proj",
)
NOT_FINITE = Check(
    "weights-not-finite",
    "error",
    "the loaded weights contain NaN or infinity, so every loss will be NaN",
    "load another checkpoint: this one is damaged, or was saved after its training had diverged",
)
HALF_TRAINED = Check(
    "float16-trained",
    "error",
    "trained weights are float16: fp16 autocast refuses them, and without it small values in the optimizer become 0",
    "set dtype: float32 (with mixed_precision: fp16 for speed) or bfloat16",
)
ROUNDED_AWAY = Check(
    "updates-round-away",
    "warning",
    "trained weights are bfloat16, and at this learning rate most steps are too small to change them",
    "set dtype: float32 with mixed_precision: bf16, or raise learning_rate",
)
QUANTIZED_TRAINED = Check(
    "quantized-trained",
    "error",
    "the model is quantized and has no adapters, so its weights cannot be trained",
    "use tuning: lora, or the unquantized model",
)
HEAD_ONLY = Check(
    "adapters-on-head-only",
    "warning",
    "only the output layer has adapters, so all other layers stay unchanged",
    "drop lora_target_modules: by default every linear layer is adapted",
)
RANK_TOO_LARGE = Check(
    "rank-exceeds-layers",
    "warning",
    "lora_r is at least the smaller side of every adapted layer, so the adapters are larger than the layers",
    "lower lora_r, or use tuning: full",
)
RATE_LOW = Check(
    "learning-rate-low",
    "warning",
    "learning_rate is so far below the usual range for this optimizer and tuning that little will be learned",
    "usual with AdamW: 1e-4 to 1e-3 for adapters, 1e-5 to 1e-4 for all weights of a trained model",
)
RATE_HIGH = Check(
    "learning-rate-high",
    "warning",
    "learning_rate is so far above the usual range for this optimizer and tuning that training will likely diverge",
    "usual with AdamW: 1e-4 to 1e-3 for adapters, 1e-5 to 1e-4 for all weights of a trained model",
)
OWN_CONFIGURATION = Check(
    "adapter-keeps-configuration",
    "note",
    "model_name_or_path is an adapter: it keeps its own rank and scale, not lora_r and lora_alpha",
    "to start a new adapter, set model_name_or_path to the base model",
)

HEADS = ("lm_head", "embed_out", "classifier", "score", "head", "fc")
SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS_LOOKED_AT = 200_000_000
ROUNDING_WEIGHTS = 2_000_000
BFLOAT16_HALF_STEP = 2.0**-9
"""A step smaller than this share of a bfloat16 weight is lost by rounding."""
SMALL_MODEL = 30_000_000
"""Language models with at most this many weights tolerate high learning rates."""


def before_training(job: Job, model: nn.Module) -> Iterator[Finding]:
    yield from _check_trained(job, model)
    yield from _check_low_rank_targets(job, model)
    yield from _check_finite(model)
    yield from _check_number_formats(job, model)
    yield from _check_adapters(job, model)
    yield from _check_rate(job, model)


def _check_trained(job: Job, model: nn.Module) -> Iterator[Finding]:
    is_packed = bool(getattr(model, "is_quantized", False)) or getattr(model, "quantization_method", None) is not None
    if is_packed and job.model.tuning == "full":
        yield QUANTIZED_TRAINED.found("tuning: full on quantized weights", "tuning, model_name_or_path")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        yield NOTHING_TRAINED.found("all weights are frozen", "tuning")


def _check_low_rank_targets(job: Job, model: nn.Module) -> Iterator[Finding]:
    targets = job.training.optim_target_modules
    if not optimizer_name(job).startswith(("galore", "apollo")):
        return
    own = {name for name, _ in model.named_parameters()}  # a head that is tied to the embeddings has no separate weight
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    layers = [name for name in linear if f"{name}.weight" in own]
    if layers and targets in ("all-linear", "all_linear"):
        return
    why = "matches no linear layer"
    try:
        found = [name for name, _ in model.named_modules() if check_target_module_exists(targets, name)]
        if {*found} & {*layers}:
            return
    except re.error as error:
        why = f"contains an invalid pattern ({error})"
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
    what = f"optim_target_modules is {targets}, which {why}; names of linear layers end with: {leaves}"
    yield NO_SUCH_LAYER.found(what, "optim_target_modules", None if layers else "set another optim")


def _check_finite(model: nn.Module) -> Iterator[Finding]:
    """Check that the sum of each weight is finite, which it is only if all its values are. In large models only the
    first part of each weight is summed."""
    readable = [(name, p) for name, p in model.named_parameters() if _is_summable(p)]
    total = sum(p.numel() for _, p in readable)
    share = min(1.0, WEIGHTS_LOOKED_AT / max(1, total))
    bad = [name for name, p in readable if not math.isfinite(_partial_sum(p, share))]
    if bad:
        sample = "" if share == 1 else f", in a sample of {percent(share)} of each"
        yield NOT_FINITE.found(f"{len(bad)} of {len(readable)} weights, first {bad[0]}{sample}", "model_name_or_path")


def _is_summable(weight: torch.Tensor) -> bool:
    return weight.dtype in SUMMABLE and not weight.is_meta and not is_of_torchao(weight)


@torch.no_grad()
def _partial_sum(parameter: nn.Parameter, share: float) -> float:
    taken = parameter.detach().flatten()[: math.ceil(share * parameter.numel())]
    return float(taken.sum(dtype=torch.float64 if taken.device.type == "cpu" else torch.float32))


# -- number formats ----------------------------------------------------------------------------------------------------


def _check_number_formats(job: Job, model: nn.Module) -> Iterator[Finding]:
    if uses_deepspeed(job.training):  # DeepSpeed trains float32 copies
        return
    trained = [p for p in model.parameters() if p.requires_grad and _is_summable(p)]
    half = sum(p.numel() for p in trained if p.dtype == torch.float16)
    is_plain_step = is_plain_gradient(optimizer_name(job))
    keeps = preserves_small_updates(optimizer_name(job), job.training.optim_args)
    if half and (job.training.fp16 or not is_plain_step):
        yield HALF_TRAINED.found(f"{half:,} trained weights are float16", "dtype")
    lost = None if is_plain_step or keeps else _share_of_lost_updates(trained, job.training.learning_rate)
    if lost is not None and lost >= 0.5:
        what = f"steps of about {job.training.learning_rate:g} are lost on {percent(lost)} of the bfloat16 weights"
        yield ROUNDED_AWAY.found(what, "dtype, learning_rate")


@torch.no_grad()
def _share_of_lost_updates(trained: list[nn.Parameter], step: float) -> Optional[float]:
    """Return the share of a sample of the bfloat16 weights that this step cannot change; None without such weights."""
    narrow = [p for p in trained if p.dtype == torch.bfloat16]
    each = ROUNDING_WEIGHTS // max(1, len(narrow))
    taken = [p.detach().flatten()[:each].float().abs() for p in narrow]
    if not taken:
        return None
    lost = sum(int((part * BFLOAT16_HALF_STEP > step).sum()) for part in taken)
    return lost / sum(part.numel() for part in taken)


# -- adapters ----------------------------------------------------------------------------------------------------------


def _check_adapters(job: Job, model: nn.Module) -> Iterator[Finding]:
    ranks = dict(_adapted_layers(model))
    if not ranks:
        return
    if all(name.rpartition(".")[2] in HEADS for name in ranks):
        yield HEAD_ONLY.found(f"adapters only on {', '.join(sorted(ranks))}", "lora_target_modules")
    if all(rank >= smaller for rank, smaller in ranks.values()):
        rank, smaller = max(ranks.values())
        yield RANK_TOO_LARGE.found(f"rank {rank} on layers whose smaller side is {smaller} or less", "lora_r")
    yield from _check_own_configuration(job, model)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (rank, smaller side of the layer)) for each linear layer with LoRA."""
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        first, second = (next(iter(side.values()), None) for side in (module.lora_A, module.lora_B))
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
            yield name, (first.out_features, min(first.in_features, second.out_features))


def _check_own_configuration(job: Job, model: Any) -> Iterator[Finding]:
    if not is_adapter(Path(job.model.model_name_or_path or "").expanduser()):
        return
    own = active_config(model)
    if (own.r, own.lora_alpha) != (job.model.lora_r, job.model.lora_alpha):
        what = f"the adapter has lora_r {own.r} and lora_alpha {own.lora_alpha:g}, which are used"
        yield OWN_CONFIGURATION.found(what, "model_name_or_path, lora_r, lora_alpha")


# -- the learning rate -------------------------------------------------------------------------------------------------


def _check_rate(job: Job, model: nn.Module) -> Iterator[Finding]:
    rate = job.training.learning_rate
    low, high = usual_rates(job, sum(weight_count(p) for p in model.parameters()))
    how = f"learning_rate {rate:g} with {optimizer_name(job)}, tuning {job.model.tuning}"
    if 0 < rate <= low:
        yield RATE_LOW.found(how, "learning_rate")
    elif high <= rate < 1:  # a rate of 1 or more is already an error
        yield RATE_HIGH.found(how, "learning_rate")


def usual_rates(job: Job, weights: int) -> tuple[float, float]:
    """Return (rate at or below which to warn, rate at or above which to warn). The range is wide, because schedules
    and batch sizes differ."""
    name = optimizer_name(job)
    is_scratch = job.task.task != TEXT and job.model.model_name_or_path is None
    if is_plain_gradient(name):
        return (1e-4 if job.model.tuning != "full" else 1e-5), math.inf
    if is_scratch:
        bounds = 1e-7, 0.1
    elif job.model.tuning != "full":
        bounds = 1e-5, 1e-2
    else:
        bounds = 1e-8, (1e-3 if weights > SMALL_MODEL and job.task.task == TEXT else 1e-2)
    return (bounds[0] / 10, bounds[1] / 3) if "lion" in name else bounds
