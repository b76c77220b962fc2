"""Unsloth, used as its documentation describes, on the same weights, rows and steps; and a folder with the weights.

Unsloth cannot be imported without CUDA, so this code has never run on our machines. It follows the documentation, and
an error in it becomes a row of the table with its message. gpu_point.py imports Unsloth before transformers, as it must
be.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.gpu_window import Window
from benchmarks.lib.text_job import Trained
from benchmarks.lib.turns import TakesTurns
from scu_trainer.data import default_cache_dir, embedded_tokenizer

if TYPE_CHECKING:
    from benchmarks.gpu.gpu_work import CardJob

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The modules that peft's ``all-linear`` adapts in a Llama."""


@contextmanager
def saved(job: CardJob) -> Iterator[str]:
    """Yield a folder with the model of the job, without quantization and adapters, and a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tuning = "lora" if job.shape.tuning == "qlora" else job.shape.tuning
        replace(job.shape, tuning=tuning).model().save_pretrained(folder)
        embedded_tokenizer(default_cache_dir(None)).save_pretrained(folder)
        torch.cuda.empty_cache()
        yield folder


def counted(trainer: Any) -> list[Any]:
    """Return the predicted tokens of each optimizer step that ``trainer`` will take, as the Trainer counts them."""
    tokens: list[Any] = []
    inner = trainer.training_step

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if trainer.state.global_step == len(tokens):
            tokens.append(num_items_in_batch)
        return inner(model, inputs, num_items_in_batch)

    trainer.training_step = training_step
    return tokens


def unsloth(job: CardJob, window: Window) -> Trained:
    """Train with FastLanguageModel and TRL's SFTTrainer, which Unsloth patches on import."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    rows = job.token_rows()
    columns = datasets.Dataset.from_dict({"input_ids": [rows[i]["input_ids"].tolist() for i in range(len(rows))]})
    with saved(job) as folder, tempfile.TemporaryDirectory() as out:
        model, tokenizer = _unsloth_model(job, folder)
        window.watch(model)
        quiet = {"output_dir": out, "report_to": "none", "save_strategy": "no", "logging_steps": 100_000}
        given = {**job.training(), **quiet, "remove_unused_columns": True, "max_length": job.shape.longest_row}
        given["activation_checkpointing"] = False  # the model has Unsloth's own
        trainer = SFTTrainer(model, SFTConfig(**given), train_dataset=columns, processing_class=tokenizer)
        trainer.add_callback(TakesTurns(window))
        step_tokens = counted(trainer)
        trainer.train()
        return trainer.model, [int(tokens) for tokens in step_tokens]


def _unsloth_model(job: CardJob, folder: str) -> tuple[torch.nn.Module, Any]:
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=folder,
        max_seq_length=job.shape.longest_row,
        dtype=job.shape.dtype,
        load_in_4bit=job.shape.tuning == "qlora",
        full_finetuning=job.lora_rank is None,
    )
    if job.lora_rank is None:
        return model, tokenizer
    adapted = FastLanguageModel.get_peft_model(
        model,
        r=job.lora_rank,
        lora_alpha=2 * job.lora_rank,
        lora_dropout=0,
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth" if job.checkpointing else False,
    )
    return adapted, tokenizer
