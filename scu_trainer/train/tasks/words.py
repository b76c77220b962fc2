"""The task word-generation: a GRU over words, texts with a category, bits per word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import AutoConfig

from scu_trainer.data import Collator, default_cache_dir
from scu_trainer.data.words.data import PreparedWords, prepare_words
from scu_trainer.errors import ModelError
from scu_trainer.models.gru import CadenceConfig, CadenceForCausalLM
from scu_trainer.models.loading.adapters import AdapterPlan
from scu_trainer.models.loading.load import load_for_evaluation, load_model, load_tokenizer
from scu_trainer.models.loading.names import base_of
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.base import require
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.settings.words import WordSettings
from scu_trainer.train.evaluation.scoring import MODEL_INPUTS, DocumentScores, bpt_metrics, score_documents
from scu_trainer.train.job.components import EvaluationSource, TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.loss.rows.row_readings import preprocess_logits
from scu_trainer.train.tasks.common import (
    print_data_summary,
    require_same_as_student,
    seed_before_model,
    teacher_settings,
    tuned_components,
)

ADAPTED = ("projection", "categories")
"""Modules that LoRA can adapt. The GRU's weights go to a fused kernel that would ignore adapters. The word embedding is
also the output matrix, so an adapter on one of them would be merged into the other."""

PROBED_WORDS = 32


class WordTask:
    name, item, unit = "word-generation", "document", "word"
    compute_metrics = staticmethod(bpt_metrics)
    preprocess_logits = staticmethod(preprocess_logits)

    def check(self, job: Job) -> None:
        model = job.model
        require(
            model.tuning != "qlora",
            "tuning: qlora stores linear layers in 4 or 8 bits, but a GRU has almost none; use tuning: full or lora",
        )
        require(
            model.tuning == "full" or model.model_name_or_path is not None,
            "tuning: lora adapts a trained model, but this one starts from scratch; use tuning: full, or give "
            "model_name_or_path",
        )
        unsupported = set(model.lora_target_modules or ()) - {*ADAPTED, "all-linear"}
        require(
            model.tuning != "lora" or not unsupported,
            f"lora_target_modules names {', '.join(sorted(unsupported))}, but in a GRU model adapters act only on "
            f"{' and '.join(ADAPTED)}: its recurrent weights go to a fused kernel that ignores adapters, and its word "
            "embedding is also the output matrix",
        )
        require(model.device_map is None, "device_map places large language models; for a GRU drop it")

    def load(self, job: Job, console: Console) -> TrainingComponents:
        teacher = teacher_settings(job)
        data = _prepared_data(job, teacher)
        print_data_summary(console, data)
        before_model_bytes = seed_before_model(job)
        if job.model.model_name_or_path is None:
            model = new_model(data, job.own)
            model = model if job.model.dtype == "auto" else model.to(getattr(torch, job.model.dtype))
        else:
            model = load_model(job.model, device=job.training.device)
            console.print(f"words, categories and sizes: those of {job.model.model_name_or_path}", soft_wrap=True)
        loaded = TrainingComponents(data.tokenizer, data, model, collator_of(data), before_model_bytes)
        parts = tuned_components(job, console, loaded, job.model, AdapterPlan(targets=list(ADAPTED)))
        if teacher is not None:
            parts.teacher = load_for_evaluation(job.model.teacher, teacher)
        return parts

    def load_scored(self, source: EvaluationSource) -> TrainingComponents:
        tokenizer, names = _tokenizer_and_categories(source.model)
        data = prepare_words(
            source.data,
            source.own,
            seed=source.seed,
            cache_dir=default_cache_dir(source.data.cache_dir),
            tokenizer=tokenizer,
            category_names=names,
        )
        model = load_for_evaluation(source.model.model_name_or_path, source.model)
        return TrainingComponents(tokenizer, data, model, collator_of(data))

    def score(self, model: torch.nn.Module, parts: TrainingComponents) -> DocumentScores:
        return score_documents(model, parts.data.eval, parts.collator, parts.batch_tokens)

    def example_inputs(self, parts: TrainingComponents) -> Mapping[str, Any]:
        batch = parts.collator([parts.data.train[0]])
        inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        return {name: value[:, :PROBED_WORDS] if value.dim() == 2 else value for name, value in inputs.items()}


def new_model(data: PreparedWords, own: WordSettings) -> CadenceForCausalLM:
    """Return a model with random weights for the words and categories of ``data``."""
    tokenizer = data.tokenizer
    config = CadenceConfig(
        vocab_size=len(tokenizer),
        category_names=list(data.category_names),
        embedding_size=own.embedding_size,
        category_embedding_size=own.category_embedding_size,
        hidden_size=own.gru_hidden_size,
        num_hidden_layers=own.gru_layers,
        dropout=own.gru_dropout,
        category_dropout=own.category_dropout,
        tie_word_embeddings=own.tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CadenceForCausalLM(config)


def collator_of(data: PreparedWords) -> Collator:
    return replace(Collator.of(data.tokenizer), carry=("sample_index", "category_ids"))


def _prepared_data(job: Job, teacher: Optional[ModelSettings]) -> PreparedWords:
    """Prepare the data with words and categories of the trained model, if any; a new one takes those of its teacher."""
    known: dict[str, Any] = {}
    source = teacher if job.model.model_name_or_path is None else job.model
    if source is not None:
        known["tokenizer"], known["category_names"] = _tokenizer_and_categories(source)
    if teacher is not None:
        tokenizer, names = _tokenizer_and_categories(teacher)
        vocabularies = tokenizer.get_vocab(), known["tokenizer"].get_vocab()
        require_same_as_student(job.model.teacher, *vocabularies, "words")
        require_same_as_student(job.model.teacher, list(names), list(known["category_names"]), "categories")
    cache_dir = default_cache_dir(job.data.cache_dir)
    return prepare_words(job.data, job.own, seed=effective_data_seed(job.training), cache_dir=cache_dir, **known)


def _tokenizer_and_categories(settings: ModelSettings) -> tuple[Any, list[str]]:
    """Return tokenizer and category names of a trained model. Raises ModelError for a model of another class."""
    tokenizer = load_tokenizer(settings)
    name = base_of(Path(settings.model_name_or_path).expanduser())
    # The model's own code is never needed, because a model of another class cannot be trained here.
    config = AutoConfig.from_pretrained(name, revision=settings.model_revision, trust_remote_code=False)
    if not isinstance(config, CadenceConfig):
        raise ModelError(
            f"{settings.model_name_or_path!r} is a {config.model_type} model, but task: word-generation trains "
            f"{CadenceConfig.model_type} models; drop model_name_or_path to start a new one"
        )
    return tokenizer, config.category_names
