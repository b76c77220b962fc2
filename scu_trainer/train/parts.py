"""What a job needs before its first step: tokenizer, rows, model with adapters; each checked against the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import set_seed

from scu_trainer.data import Collator, PreparedData, default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.fit import require_fit
from scu_trainer.models.isolation import require_isolation
from scu_trainer.models.kernels import best_attention
from scu_trainer.models.load import load_model, load_tokenizer, plan_placement, prepare_for_tuning
from scu_trainer.models.quantize import quantized_line, require_quantization
from scu_trainer.run_files import require_room
from scu_trainer.settings import ModelSettings
from scu_trainer.train.base_model import embedded_base, is_cached
from scu_trainer.train.costs import bytes_before_model
from scu_trainer.train.job import Job, checkpoint_bytes, free_memory
from scu_trainer.train.sharded import weight_count


@dataclass
class Parts:
    """Everything loaded and checked, nothing written to the run directory. ``before_model_bytes``: see costs.py."""

    tokenizer: Any
    data: PreparedData
    model: torch.nn.Module
    collator: Collator
    before_model_bytes: Optional[int] = None


def load_parts(job: Job, console: Console) -> Parts:
    """Raises a UserError where the settings, the data, the model, the memory or the disk do not fit."""
    cache_dir, device = default_cache_dir(job.data.cache_dir), job.training.device
    require_quantization(job.model, device)
    settings, tokenizer = _with_base(job.model, cache_dir, console)
    settings = replace(
        settings, attn_implementation=best_attention(settings.attn_implementation, device, _is_half(job, settings))
    )
    placement = plan_placement(settings, job.memory, free_memory(job.training), device=device)
    if placement is not None:
        console.print(placement.line(_checkpoints(job)), soft_wrap=True)
    data = prepare(
        job.data, tokenizer, seed=job.training.seed, cache_dir=cache_dir, model_name=settings.model_name_or_path
    )
    for line in data.books.lines():
        console.print(line, soft_wrap=True)
    set_seed(job.training.seed)
    before_model_bytes = bytes_before_model(device)
    model = load_model(settings, device=device, placement=placement)
    require_fit(model, settings.model_name_or_path, len(tokenizer), job.data.block_size)
    if job.data.isolate_documents:
        require_isolation(model, len(tokenizer))
    model = _tunable(model, settings, job, console)
    require_room(job.training.output_dir, checkpoint_bytes(model, job.training))
    return Parts(tokenizer, data, model, Collator.of(tokenizer), before_model_bytes)


def _with_base(settings: ModelSettings, cache_dir: Path, console: Console):
    """The settings with a model name filled in, and the tokenizer of that model."""
    if settings.model_name_or_path is not None:
        return settings, load_tokenizer(settings)
    if not is_cached(cache_dir, settings.embedded_base_steps):
        console.print(
            "making the embedded base model, once: a Granite hybrid on Python's documentation", soft_wrap=True
        )
    folder = embedded_base(cache_dir, settings.embedded_base_steps)
    return replace(settings, model_name_or_path=str(folder)), embedded_tokenizer(cache_dir)


def _is_half(job: Job, settings: ModelSettings) -> bool:
    return job.training.bf16 or job.training.fp16 or settings.dtype in ("bfloat16", "float16")


def _checkpoints(job: Job) -> bool:
    """Our name for it or the stock one, which cannot do it for every family."""
    return job.model.checkpoint_every_layer or bool(job.training.activation_checkpointing)


def _tunable(model, settings: ModelSettings, job: Job, console: Console) -> torch.nn.Module:
    """With adapters, if any, and checkpointing; says what is trained and how the rest is stored."""
    stored = quantized_line(model) if settings.tuning == "qlora" else None
    model = prepare_for_tuning(model, settings)
    trainable = sum(weight_count(p) for p in model.parameters() if p.requires_grad)
    total = sum(weight_count(p) for p in model.parameters())
    console.print(f"model: {total:,} weights, {trainable:,} trained ({settings.tuning})", soft_wrap=True)
    if stored is not None:
        console.print(stored, soft_wrap=True)
    if _checkpoints(job):
        console.print(f"activations: kept at the borders of {checkpoint_every_layer(model)} blocks", soft_wrap=True)
        job.training.activation_checkpointing = False  # it is on; the stock Trainer's own way refuses some families
    return model
