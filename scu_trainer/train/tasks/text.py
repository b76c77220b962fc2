"""The task text-generation: causal language models, documents, tokens, bits per token."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console

from scu_trainer.data import Collator, default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.data.text.anchor import Anchor, read_anchor
from scu_trainer.data.text.mixture import whole_held_out
from scu_trainer.errors import ModelError
from scu_trainer.models.fit import require_fit
from scu_trainer.models.isolation import isolates
from scu_trainer.models.kernels import best_attention
from scu_trainer.models.loading.adapters import CAUSAL, add_tokens, grow_embeddings, grow_embeddings_for_adapter
from scu_trainer.models.loading.dispatch import check_limits, require_compatible_training
from scu_trainer.models.loading.load import (
    causal_config,
    load_for_evaluation,
    load_model,
    load_tokenizer,
    plan_placement,
    supports_flash_attention,
)
from scu_trainer.models.loading.names import expanded_name, is_adapter, with_adapter_as_model
from scu_trainer.models.quantize import require_quantization
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.settings.regularization import SAMPLED
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.train.evaluation.scoring import MODEL_INPUTS, DocumentScores, bpt_metrics, score_documents
from scu_trainer.train.evaluation.sliding import SlidingRows
from scu_trainer.train.fixtures.base_model import embedded_base, is_cached
from scu_trainer.train.job.checks import check_packing
from scu_trainer.train.job.components import EvaluationSource, TrainingComponents
from scu_trainer.train.job.job import Job, cuda_bytes, free_memory
from scu_trainer.train.loss.rows.row_readings import preprocess_logits
from scu_trainer.train.retention.choice import make_actuator_chooser
from scu_trainer.train.retention.sampled import sampled_text
from scu_trainer.train.tasks.common import (
    checkpoints_activations,
    print_data_summary,
    require_same_as_student,
    seed_before_model,
    teacher_settings,
    tuned_components,
)
from scu_trainer.train.tasks.packing import Packing

logger = logging.getLogger("scu_trainer")

PROBED_TOKENS = 32
"""Enough tokens to see which kernels run; whole rows with their logits could exceed memory outside the memory loop."""


class TextTask:
    name, item, unit = "text-generation", "document", "token"
    compute_metrics = staticmethod(bpt_metrics)
    preprocess_logits = staticmethod(preprocess_logits)

    def check(self, job: Job) -> None:
        require_compatible_training(job.model, job.training)
        check_limits(job.model, job.memory, len(cuda_bytes(job.training)))
        check_packing(job.training, job.data)

    def load(self, job: Job, console: Console) -> TrainingComponents:
        cache_dir, device = default_cache_dir(job.data.cache_dir), job.training.device
        require_quantization(job.model, device)
        settings, tokenizer = _with_default_model(with_adapter_as_model(job.model), cache_dir, console)
        start = Path(expanded_name(settings.model_name_or_path))
        new_rows = () if is_adapter(start) else add_tokens(tokenizer, settings)
        teacher = teacher_settings(job)
        if teacher is not None:
            vocabularies = load_tokenizer(teacher).get_vocab(), tokenizer.get_vocab()
            require_same_as_student(job.model.teacher, *vocabularies, "tokens")
        is_half = job.training.bf16 or job.training.fp16 or settings.dtype in ("bfloat16", "float16")
        settings = _with_best_attention(settings, device, is_half)
        packing = Packing.expected(job.data, causal_config(settings))
        placement = plan_placement(settings, job.memory, free_memory(job.training), device=device)
        if placement is not None:
            console.print(placement.line(checkpoints_activations(job)), soft_wrap=True)
        seed, name = effective_data_seed(job.training), settings.model_name_or_path
        data_options = {"seed": seed, "cache_dir": cache_dir, "model_name": name}
        anchor_options = {"tokenizer": tokenizer, **data_options}
        console.print(f"reading the data: {job.data.shown_dataset}", soft_wrap=True)  # may take minutes
        data = prepare(packing.applied(job.data), tokenizer, **data_options)
        print_data_summary(console, data)
        anchor = _read_anchor(job, packing.applied(job.data), data, anchor_options)
        console.print(f"reading the model: {job.model.model_name_or_path or 'the embedded base'}", soft_wrap=True)
        before_model_bytes = seed_before_model(job)
        model = load_model(settings, device=device, placement=placement)
        if is_adapter(start):
            grow_embeddings_for_adapter(model, start)
        elif new_rows:
            grow_embeddings(model, new_rows[-1] + 1)
        require_fit(model, settings.model_name_or_path, len(tokenizer), job.data.block_size)
        tested_packing = packing.tested_on(model, len(tokenizer))
        if tested_packing.applied(job.data) != packing.applied(job.data):
            data = prepare(tested_packing.applied(job.data), tokenizer, **data_options)
            print_data_summary(console, data)
            anchor = _read_anchor(job, tested_packing.applied(job.data), data, anchor_options)
        if job.data.packing:
            console.print(tested_packing.line(), soft_wrap=True)
        loaded = TrainingComponents(tokenizer, data, model, Collator.of(tokenizer), before_model_bytes)
        parts = tuned_components(job, console, loaded, settings, replace(CAUSAL, new_rows=new_rows))
        if job.retention.retain == SAMPLED:
            if placement is None and settings.tuning != "qlora":
                parts.model.to(device)
            anchor = _sampled_anchor(job, tested_packing.applied(job.data), parts, anchor_options)
        parts.anchor = anchor
        if anchor is not None and (settings.tuning == "full" or is_adapter(start)):
            parts.load_base = functools.partial(load_for_evaluation, settings.model_name_or_path, settings)
        if teacher is not None:
            parts.teacher = load_for_evaluation(job.model.teacher, teacher)
            require_fit(parts.teacher, job.model.teacher, len(tokenizer), job.data.block_size)
            _require_isolating(parts.teacher, tested_packing.applied(job.data), job.model.teacher, len(tokenizer))
        return parts

    def load_scored(self, source: EvaluationSource) -> TrainingComponents:
        name, row_settings = source.model.model_name_or_path, source.tokenizer_of or source.model
        tokenizer, cache_dir = load_tokenizer(source.model), default_cache_dir(source.data.cache_dir)
        row_tokenizer = tokenizer if row_settings == source.model else load_tokenizer(row_settings)
        data_options = {"seed": source.seed, "cache_dir": cache_dir, "model_name": row_settings.model_name_or_path}
        model = load_for_evaluation(name, source.model)
        packing = Packing.expected(source.data, model.config).tested_on(model, len(tokenizer))
        data = prepare(packing.applied(source.data), row_tokenizer, **data_options)
        if source.windows is not None and data.eval is not None:
            data = replace(
                data, eval=SlidingRows(whole_held_out(source.data, row_tokenizer, **data_options), source.windows)
            )
        if data.eval is not None:
            require_fit(model, name, len(tokenizer), max(data.eval["length"]))
        return TrainingComponents(tokenizer, data, model, Collator.of(tokenizer))

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        return score_documents(model, parts.data.eval, parts.collator, parts.batch_tokens)

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        batch = parts.collator([next(iter(parts.data.train))])
        return {name: batch[name][:, :PROBED_TOKENS] for name in MODEL_INPUTS if name in batch}


def _sampled_anchor(
    job: Job, data: DataSettings, parts: TrainingComponents, anchor_options: dict[str, Any]
) -> Optional[Anchor]:
    """Return the anchor of text that the model generates before training."""
    if data.is_mixture:
        names = ", ".join(source.name for source in data.sources)
        logger.info(
            "retain: %s means text that the model generates; to retain a source of the data, give its name: %s",
            SAMPLED,
            names,
        )
    path = sampled_text(
        parts.model,
        anchor_options["tokenizer"],
        anchor_options["cache_dir"],
        documents=job.retention.retain_documents,
        tokens=data.block_size,
        seed=anchor_options["seed"],
    )
    job = replace(job, retention=replace(job.retention, retain=str(path)))
    return replace(_read_anchor(job, data, parts.data, anchor_options), name="text that the model wrote")


def _with_best_attention(settings: ModelSettings, device: torch.device, half_precision: bool) -> ModelSettings:
    attention = best_attention(settings.attn_implementation, device, half_precision)
    if attention != settings.attn_implementation and not supports_flash_attention(settings):
        return settings
    return replace(settings, attn_implementation=attention)


def _read_anchor(job: Job, data: DataSettings, prepared: Any, anchor_options: dict[str, Any]) -> Optional[Anchor]:
    """Return the anchor, the text that must not be forgotten; None without one, and for ``retain: sampled``, where it
    does not exist yet. ``prepared``: the training data."""
    settings = job.retention
    if not settings.acts or settings.retain == SAMPLED:
        return None
    training, regularization = job.training, job.regularization
    rows_per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    rows = 0 if data.streaming else len(prepared.train)  # with a stream the length of the run is given by max_steps
    has_lambda = regularization is not None and not regularization.steers
    choose = make_actuator_chooser(settings, job.planned_steps(rows) * rows_per_step, has_lambda)
    return read_anchor(data, settings.retain, settings.retain_documents, choose=choose, **anchor_options)


def _with_default_model(settings: ModelSettings, cache_dir: Path, console: Console):
    """Return the settings with the model name filled in, and the tokenizer of that model."""
    if settings.model_name_or_path is not None:
        return settings, load_tokenizer(settings)
    if not is_cached(cache_dir, settings.embedded_base_steps):
        console.print(
            "training the embedded base model once: a Granite hybrid on Python's documentation", soft_wrap=True
        )
    folder = embedded_base(cache_dir, settings.embedded_base_steps)
    return replace(settings, model_name_or_path=str(folder)), embedded_tokenizer(cache_dir)


def _require_isolating(teacher: torch.nn.Module, rows: DataSettings, name: str, vocab_size: int) -> None:
    """Raise ModelError if the student isolates packed documents and the teacher does not."""
    if rows.packing and rows.isolate_documents and not isolates(teacher, vocab_size):
        raise ModelError(
            f"the teacher {name} lets packed documents see each other, but the student keeps them apart; set packing: "
            "false"
        )
