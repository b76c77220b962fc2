"""The loaded model: what of it is trained, whether its numbers are numbers, and whether a step moves them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn
from transformers.trainer_utils import check_target_module_exists

from scu_trainer.hardware.optimizers import keeps_small_steps
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
    "use tuning: lora or full, and check whether the code of the model freezes it",
)
NO_SUCH_LAYER = Check(
    "optim-target-missing",
    "error",
    "optim_target_modules names no linear layer of the model, and GaLore and APOLLO work on no other",
    "set optim_target_modules: all-linear, a list such as '[\"q_proj\"]', or a pattern for whole names: .*q_proj",
)
NOT_FINITE = Check(
    "weights-not-finite",
    "error",
    "the loaded weights already hold NaN or infinity, so every loss will be NaN",
    "load another checkpoint: this one is damaged or was saved after its training had diverged",
)
HALF_TRAINED = Check(
    "float16-trained",
    "error",
    "trained weights are float16: fp16 autocast refuses them, and without it the optimizer's small numbers become 0",
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
    "the model is stored quantized and has no adapters: its weights cannot be trained",
    "use tuning: lora, or give the full model",
)
HEAD_ONLY = Check(
    "adapters-on-head-only",
    "warning",
    "only the output layer has adapters, so the model itself stays as it is",
    "drop lora_target_modules, which adapts every linear layer",
)
RANK_TOO_LARGE = Check(
    "rank-exceeds-layers",
    "warning",
    "lora_r is at least the smaller side of every adapted layer: adapters larger than the layers themselves",
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
    "to start a new adapter give the base model",
)

HEADS = ("lm_head", "embed_out", "classifier", "score", "head", "fc")
SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS_LOOKED_AT = 200_000_000
ROUNDING_WEIGHTS = 2_000_000
BFLOAT16_HALF_STEP = 2.0**-9
"""Of a bfloat16 number: what is smaller than this share of it and added to it is lost."""
SMALL_MODEL = 30_000_000
"""Weights up to which a language model stands a high rate."""


def before_training(job: Job, model: nn.Module) -> Iterator[Finding]:
    yield from _trained(job, model)
    yield from _low_rank(job, model)
    yield from _finite(model)
    yield from _number_formats(job, model)
    yield from _adapters(job, model)
    yield from _rate(job, model)


def _trained(job: Job, model: nn.Module) -> Iterator[Finding]:
    is_packed = bool(getattr(model, "is_quantized", False)) or getattr(model, "quantization_method", None) is not None
    if is_packed and job.model.tuning == "full":
        yield QUANTIZED_TRAINED.found("tuning: full on quantized weights", "tuning, model_name_or_path")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        yield NOTHING_TRAINED.found("all weights are frozen", "tuning")


def _low_rank(job: Job, model: nn.Module) -> Iterator[Finding]:
    targets = job.training.optim_target_modules
    if not optimizer_name(job).startswith(("galore", "apollo")):
        return
    own = {name for name, _ in model.named_parameters()}  # a head tied to the embeddings has no weight of its own
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    layers = [name for name in linear if f"{name}.weight" in own]
    if layers and targets in ("all-linear", "all_linear"):
        return
    why = "fits no linear layer"
    try:
        found = [name for name, _ in model.named_modules() if check_target_module_exists(targets, name)]
        if {*found} & {*layers}:
            return
    except re.error as error:
        why = f"holds what is no pattern ({error})"
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
    what = f"optim_target_modules is {targets}, which {why}; names of linear layers end with: {leaves}"
    yield NO_SUCH_LAYER.found(what, "optim_target_modules", None if layers else "set another optim")


def _finite(model: nn.Module) -> Iterator[Finding]:
    """A weight's sum is a number only if all of it are; of large models the first part of each weight is added up."""
    readable = [(name, p) for name, p in model.named_parameters() if _is_plain(p)]
    total = sum(p.numel() for _, p in readable)
    share = min(1.0, WEIGHTS_LOOKED_AT / max(1, total))
    bad = [name for name, p in readable if not math.isfinite(_sum(p, share))]
    if bad:
        sample = "" if share == 1 else f", in a sample of {percent(share)} of each"
        yield NOT_FINITE.found(f"{len(bad)} of {len(readable)} weights, first {bad[0]}{sample}", "model_name_or_path")


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dtype in SUMMABLE and not weight.is_meta and not is_of_torchao(weight)


@torch.no_grad()
def _sum(parameter: nn.Parameter, share: float) -> float:
    taken = parameter.detach().flatten()[: math.ceil(share * parameter.numel())]
    return float(taken.sum(dtype=torch.float64 if taken.device.type == "cpu" else torch.float32))


# -- number formats ----------------------------------------------------------------------------------------------------


def _number_formats(job: Job, model: nn.Module) -> Iterator[Finding]:
    if uses_deepspeed(job.training):  # it trains float32 copies
        return
    trained = [p for p in model.parameters() if p.requires_grad and _is_plain(p)]
    half = sum(p.numel() for p in trained if p.dtype == torch.float16)
    is_plain = is_plain_gradient(optimizer_name(job))
    keeps = keeps_small_steps(optimizer_name(job), job.training.optim_args)
    if half and (job.training.fp16 or not is_plain):
        yield HALF_TRAINED.found(f"{half:,} trained weights are float16", "dtype")
    lost = None if is_plain or keeps else _share_lost(trained, job.training.learning_rate)
    if lost is not None and lost >= 0.5:
        what = f"steps of about {job.training.learning_rate:g} are lost on {percent(lost)} of the bfloat16 weights"
        yield ROUNDED_AWAY.found(what, "dtype, learning_rate")


@torch.no_grad()
def _share_lost(trained: list[nn.Parameter], step: float) -> Optional[float]:
    """Share of the bfloat16 weights, in a sample, that a step of this size cannot change; None where there are none."""
    narrow = [p for p in trained if p.dtype == torch.bfloat16]
    each = ROUNDING_WEIGHTS // max(1, len(narrow))
    taken = [p.detach().flatten()[:each].float().abs() for p in narrow]
    if not taken:
        return None
    lost = sum(int((part * BFLOAT16_HALF_STEP > step).sum()) for part in taken)
    return lost / sum(part.numel() for part in taken)


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapters(job: Job, model: nn.Module) -> Iterator[Finding]:
    ranks = dict(_adapted(model))
    if not ranks:
        return
    if all(name.rpartition(".")[2] in HEADS for name in ranks):
        yield HEAD_ONLY.found(f"adapters on {', '.join(sorted(ranks))} alone", "lora_target_modules")
    if all(rank >= smaller for rank, smaller in ranks.values()):
        rank, smaller = max(ranks.values())
        yield RANK_TOO_LARGE.found(f"rank {rank} on layers whose smaller side is {smaller} or less", "lora_r")
    yield from _own_configuration(job, model)


def _adapted(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name of the adapted layer, (rank, its smaller side)) of linear layers with LoRA."""
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        first, second = (next(iter(side.values()), None) for side in (module.lora_A, module.lora_B))
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
            yield name, (first.out_features, min(first.in_features, second.out_features))


def _own_configuration(job: Job, model: Any) -> Iterator[Finding]:
    if not is_adapter(Path(job.model.model_name_or_path or "").expanduser()):
        return
    own = active_config(model)
    if (own.r, own.lora_alpha) != (job.model.lora_r, job.model.lora_alpha):
        what = f"the adapter has lora_r {own.r} and lora_alpha {own.lora_alpha:g}, which count"
        yield OWN_CONFIGURATION.found(what, "model_name_or_path, lora_r, lora_alpha")


# -- the learning rate -------------------------------------------------------------------------------------------------


def _rate(job: Job, model: nn.Module) -> Iterator[Finding]:
    rate = job.training.learning_rate
    low, high = usual_rates(job, sum(weight_count(p) for p in model.parameters()))
    how = f"learning_rate {rate:g} with {optimizer_name(job)}, tuning {job.model.tuning}"
    if 0 < rate <= low:
        yield RATE_LOW.found(how, "learning_rate")
    elif high <= rate < 1:  # above, it is an error already
        yield RATE_HIGH.found(how, "learning_rate")


def usual_rates(job: Job, weights: int) -> tuple[float, float]:
    """Rates at and beyond which a word is due, below and above; generous, for schedules and batches differ."""
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
