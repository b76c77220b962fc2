"""Mistakes of users, each built again, and what each one must be reported as.

``source``: the thread in an issue tracker where users met it, or "common". ``expected``: the id of a finding of
preflight, or, where ``refused``, part of the message of an earlier refusal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.train.silent_losses import ROWS, Rows

Flags = dict[str, Any]
IMAGES = {"task": "image-classification", "model_name_or_path": None, "block_size": None, "image_size": 32}
IMAGES |= {"validation_split_percentage": 20, "per_device_train_batch_size": 8}
WORDS = {"task": "word-generation", "model_name_or_path": None, "mode": "tiny"}
STEPS = {"eval_strategy": "steps", "eval_steps": 10}
EPOCHS = {"max_steps": -1, "num_train_epochs": 1}
GIB = 2**30


@dataclass(frozen=True)
class Mistake:
    """``did``: what the user did. ``build``: files made in the bench -> flags beside the healthy ones; None takes one
    of those away. ``free``: bytes of free memory and disk to pretend."""

    id: str
    source: str
    did: str
    build: Callable[[Bench], Flags]
    expected: str
    refused: bool = False
    free: int | None = None


class Bench:
    """A folder to build in, and a healthy run to spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Path(tiny.saved_llama(folder / "model", layers=1))
        self._made = 0

    def new(self) -> Path:
        self._made += 1
        path = self.folder / f"made_{self._made}"
        path.mkdir()
        return path

    @cached_property
    def documents(self) -> Path:
        subjects = [", ".join("abcdefgh"[: 1 + i % 8]) for i in range(60)]
        return self.rows({"text": f"Shelf {i} holds {3 * i + 1} books about {subjects[i]}. " * 4} for i in range(60))

    def healthy(self) -> Flags:
        return {
            "model_name_or_path": self.model,
            "dataset": self.documents,
            "block_size": 64,
            "validation_split_percentage": 20,
            "max_steps": 40,
            "per_device_train_batch_size": 2,
            "learning_rate": 2e-4,
            "save_steps": 20,
            "output_dir": self.new() / "run",
            "cache_dir": self.folder / "cache",
            "use_cpu": "true",
        }

    def words(self, flags: Flags) -> list[str]:
        """The command line of the healthy run with ``flags``."""
        merged = {name: value for name, value in {**self.healthy(), **flags}.items() if value is not None}
        return [word for name, value in merged.items() for word in (f"--{name}", str(value))]

    # -- files ---------------------------------------------------------------------------------------------------------

    def rows(self, rows: Iterable[Any]) -> Path:
        path = self.new() / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    def texts(self, text: Callable[[int], str], count: int = 60, column: str = "text") -> Flags:
        return {"dataset": self.rows({column: text(i)} for i in range(count))}

    def pairs(self, prompt: Callable[[int], str], completion: Callable[[int], str]) -> Flags:
        return {"dataset": self.rows({"prompt": prompt(i), "completion": completion(i)} for i in range(60))}

    def chats(self, answer: str = "Number {}.", role: Callable[[int], str] = lambda i: "assistant") -> Flags:
        def turns(i: int) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"Which? {i}"}, {"role": role(i), "content": answer.format(i)}]

        return {"dataset": self.rows({"messages": turns(i)} for i in range(60))}

    def template(self, text: str) -> Flags:
        path = self.new() / "template.jinja"
        path.write_text(text)
        return {"chat_template": path}

    def file(self) -> Path:
        path = self.new() / "file"
        path.write_text("in the way")
        return path

    def pictures(self, pixels: Callable[[int], numpy.ndarray], label: Callable[[int], str]) -> Flags:
        folder = self.new()
        for i in range(40):
            place = folder / label(i)
            place.mkdir(exist_ok=True)
            Image.fromarray(pixels(i).astype(numpy.uint8)).save(place / f"{i}.png")
        return {**IMAGES, "dataset": folder}

    # -- models --------------------------------------------------------------------------------------------------------

    def damaged_model(self) -> Flags:
        folder = self._copied()
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return {"model_name_or_path": folder}

    def model_without_template(self) -> Flags:
        folder = self._copied()
        (folder / "chat_template.jinja").unlink()
        return {"model_name_or_path": folder}

    def model_with_embeddings(self, count: int) -> Flags:
        folder = self._copied()
        model = tiny.llama(layers=1)
        model.resize_token_embeddings(count)
        model.save_pretrained(folder)
        return {"model_name_or_path": folder}

    def adapter(self) -> Flags:
        from scu_trainer.models.loading.load import load_model, prepare_for_tuning
        from scu_trainer.settings import ModelSettings

        folder, settings = self.new(), ModelSettings(model_name_or_path=str(self.model))
        prepare_for_tuning(load_model(settings), settings).save_pretrained(folder)
        return {"model_name_or_path": folder}

    def _copied(self) -> Path:
        return Path(shutil.copytree(self.model, self.new() / "model"))


def noise(i: int) -> numpy.ndarray:
    return torch.randint(0, 256, (16, 16, 3), generator=torch.Generator().manual_seed(i)).numpy()


ANSWER_UNMARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ "
    "eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ONLY_END_MARKED = (
    "{% for m in messages %}{{ m.content }}{% generation %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endgeneration %}{% endfor %}"
)
LONG_PROMPT = "Read this with care, for the answer is hidden in one of its many words. " * 8


def _lost(rows: Rows, flags: Flags) -> Callable[[Bench], Flags]:
    def build(bench: Bench) -> Flags:
        template = bench.template(flags["chat_template"]) if "chat_template" in flags else {}
        return {**flags, "dataset": bench.rows(map(rows, range(60))), "packing": False, **template}

    return build


LOSSES = tuple(
    Mistake(name, "common", did, _lost(rows, flags), expected, refused)
    for name, did, rows, flags, expected, refused in ROWS
)
MISTAKES = (
    # -- refused before preflight --------------------------------------------------------------------------------------
    Mistake("unknown-key", "common", "misspelt a setting", lambda b: {"learning_rat": 1}, "did you mean", True),
    Mistake(
        "wrong-column",
        "common",
        "left text_column at text, the file has content",
        lambda b: b.texts(lambda i: f"Number {i}", column="content"),
        "has no column 'text'",
        True,
    ),
    Mistake(
        "nothing-to-learn",
        "unsloth#2900",
        "conversations in which nobody is the assistant, answers only learned",
        lambda b: b.chats(role=lambda i: "helper"),
        "no document to learn from",
        True,
    ),
    Mistake(
        "no-template",
        "TRL#3927",
        "conversations for a base model without a chat template",
        lambda b: {**b.chats(), **b.model_without_template()},
        "has no chat template",
        True,
    ),
    Mistake(
        "block-too-long",
        "axolotl PR #3401",
        "rows longer than the model has positions, in the belief that they are truncated",
        lambda b: {"block_size": 256},
        "exceed the 128 positions",
        True,
    ),
    Mistake(
        "foreign-tokenizer",
        "common",
        "a tokenizer with more tokens than the model has embeddings",
        lambda b: b.model_with_embeddings(1000),
        "use the tokenizer that belongs to the model",
        True,
    ),
    Mistake(
        "evaluates-nothing",
        "common",
        "eval_strategy: steps with nothing held out",
        lambda b: {**STEPS, "validation_split_percentage": 0},
        "held-out data",
        True,
    ),
    Mistake("fp16-on-cpu", "common", "fp16 on a CPU", lambda b: {"fp16": "true"}, "fp16", True),
    Mistake(
        "missing-file",
        "common",
        "a path that does not exist",
        lambda b: {"dataset": "./no_such.jsonl"},
        "does not exist",
        True,
    ),
    Mistake(
        "torn-row",
        "common",
        "a row of the file is no JSON",
        lambda b: {"dataset": b.rows([{"text": "one"}, '{"text": "tw'])},
        "Repair the row",
        True,
    ),
    Mistake(
        "full-on-adapter",
        "common",
        "tuning: full on the folder of an adapter",
        lambda b: {**b.adapter(), "tuning": "full"},
        "cannot start from the adapter",
        True,
    ),
    Mistake(
        "no-such-layer",
        "common",
        "lora_target_modules of another architecture",
        lambda b: {"lora_target_modules": "c_attn"},
        "the model has no module 'c_attn'",
        True,
    ),
    Mistake(
        "resume-from-nothing",
        "LlamaFactory#6146",
        "resume_from_checkpoint: true in an empty folder",
        lambda b: {"resume_from_checkpoint": "true"},
        "holds no checkpoint",
        True,
    ),
    # -- settings ------------------------------------------------------------------------------------------------------
    Mistake(
        "no-exponent",
        "common",
        "learning_rate: 2 for 2e-4",
        lambda b: {"learning_rate": 2},
        "learning-rate-above-one",
    ),
    Mistake("rate-zero", "common", "learning_rate: 0", lambda b: {"learning_rate": 0}, "learning-rate-not-positive"),
    Mistake(
        "lora-rate-low",
        "common",
        "the rate of full tuning for adapters",
        lambda b: {"learning_rate": 5e-6},
        "learning-rate-low",
    ),
    Mistake(
        "lora-rate-high",
        "LlamaFactory#5627",
        "adapters at a rate that ends in NaN",
        lambda b: {"learning_rate": 0.05},
        "learning-rate-high",
    ),
    Mistake(
        "full-rate-high",
        "common",
        "a trained model, all weights, at a rate from scratch",
        lambda b: {"tuning": "full", "learning_rate": 0.02},
        "learning-rate-high",
    ),
    Mistake(
        "sgd-rate-low",
        "common",
        "SGD with the rate of AdamW",
        lambda b: {"optim": "sgd", "learning_rate": 2e-5},
        "learning-rate-low",
    ),
    Mistake("no-epochs", "common", "num_train_epochs: 0", lambda b: {**EPOCHS, "num_train_epochs": 0}, "no-steps"),
    Mistake("no-steps", "common", "max_steps: 0", lambda b: {"max_steps": 0}, "no-steps"),
    Mistake(
        "no-batch",
        "common",
        "per_device_eval_batch_size: 0",
        lambda b: {"per_device_eval_batch_size": 0},
        "no-rows-per-step",
    ),
    Mistake("decay-large", "common", "weight_decay: 10", lambda b: {"weight_decay": 10}, "weight-decay-above-one"),
    Mistake(
        "decay-negative", "common", "weight_decay: -0.1", lambda b: {"weight_decay": -0.1}, "weight-decay-negative"
    ),
    Mistake(
        "betas-swapped",
        "common",
        "adam_beta1 and adam_beta2 swapped",
        lambda b: {"adam_beta1": 0.999, "adam_beta2": 0.9},
        "adam-beta2-small",
    ),
    Mistake("beta-one", "common", "adam_beta2: 1", lambda b: {"adam_beta2": 1.0}, "adam-betas"),
    Mistake("epsilon", "common", "adam_epsilon: 1", lambda b: {"adam_epsilon": 1.0}, "adam-epsilon"),
    Mistake("clipping", "common", "max_grad_norm: 1e-6", lambda b: {"max_grad_norm": 1e-6}, "clips-nearly-all"),
    Mistake(
        "smoothing",
        "common",
        "label_smoothing_factor in percent",
        lambda b: {"label_smoothing_factor": 10},
        "label-smoothing",
    ),
    Mistake("alpha", "common", "lora_alpha: 512 at rank 8", lambda b: {"lora_alpha": 512}, "adapter-scale"),
    Mistake(
        "finds-batch-size",
        "sentence-transformers#3145",
        "auto_find_batch_size, which starts the steps over",
        lambda b: {"auto_find_batch_size": "true", "memory_control": "false"},
        "restarts-on-out-of-memory",
    ),
    Mistake(
        "finds-batch-size-twice",
        "common",
        "the same beside memory control",
        lambda b: {"auto_find_batch_size": "true"},
        "memory control fits the requested batch into memory",
        refused=True,
    ),
    Mistake(
        "grouped-by-length",
        "qlora#84",
        "group_by_length, whose loss is a sawtooth",
        lambda b: {"train_sampling_strategy": "group_by_length"},
        "batches-grouped-by-length",
    ),
    Mistake(
        "not-shuffled",
        "common",
        "images in the order of their classes",
        lambda b: {**b.pictures(noise, lambda i: "ab"[i % 2]), "train_sampling_strategy": "sequential"},
        "rows-not-shuffled",
    ),
    Mistake(
        "schedule",
        "common",
        "polynomial that ends above where it begins",
        lambda b: {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 1.0}'},
        "schedule-cannot-be-made",
    ),
    # -- the length of the run -----------------------------------------------------------------------------------------
    Mistake(
        "accumulates-all",
        "transformers#37766",
        "accumulation beyond an epoch",
        lambda b: {**EPOCHS, "gradient_accumulation_steps": 512},
        "batch-exceeds-rows",
    ),
    Mistake(
        "few-steps",
        "transformers#21950",
        "a batch so large that the run is a handful of steps",
        lambda b: {**EPOCHS, "per_device_train_batch_size": 12},
        "few-steps",
    ),
    Mistake(
        "drops-all",
        "common",
        "dataloader_drop_last with a batch larger than the data",
        lambda b: {"dataloader_drop_last": "true", "per_device_train_batch_size": 4096},
        "no-full-batch",
    ),
    Mistake(
        "warm-up",
        "common",
        "warmup_steps of a longer run",
        lambda b: {"warmup_steps": 500},
        "warm-up-covers-run",
    ),
    Mistake(
        "saves-never", "common", "save_steps beyond the run", lambda b: {"save_steps": 400}, "no-checkpoint-before-end"
    ),
    Mistake(
        "keeps-nothing",
        "common",
        "save_strategy: no in a long run",
        lambda b: {"save_strategy": "no", "max_steps": 20_000},
        "no-checkpoint-before-end",
    ),
    Mistake(
        "evaluates-late",
        "common",
        "eval_steps beyond the run",
        lambda b: {**STEPS, "eval_steps": 400},
        "no-evaluation-before-end",
    ),
    Mistake("logs-never", "common", "logging_steps: 500", lambda b: {"logging_steps": 500}, "nothing-logged"),
    Mistake(
        "auto-target",
        "common",
        "scu_target_s: auto with two evaluations",
        lambda b: {**STEPS, "eval_steps": 20, "scu_target_s": "auto"},
        "target-needs-evaluations",
    ),
    Mistake(
        "evaluates-never",
        "common",
        "eval_steps with eval_strategy: no",
        lambda b: {"eval_strategy": "no", "eval_steps": 5},
        "setting-without-effect",
    ),
    Mistake(
        "guards-never",
        "common",
        "noise_guard_max_fraction without curriculum: noise_guard",
        lambda b: {"noise_guard_max_fraction": 0.2},
        "setting-without-effect",
    ),
    Mistake(
        "headroom-of-nothing",
        "common",
        "target_headroom_gb with memory_control: false",
        lambda b: {"target_headroom_gb": 2, "memory_control": "false"},
        "setting-without-effect",
    ),
    Mistake(
        "rate-of-no-batch",
        "common",
        "batch_size_lr_rule without batch_mode: logical",
        lambda b: {"batch_size_lr_rule": "linear"},
        "setting-without-effect",
    ),
    Mistake(
        "layer-of-galore-misspelled",
        "common",
        "optim: galore_adamw with the name of a layer that is not there",
        lambda b: {"optim": "galore_adamw", "optim_target_modules": "q_prj"},
        "optim-target-missing",
    ),
    # -- surroundings --------------------------------------------------------------------------------------------------
    Mistake(
        "no-mlflow",
        "common",
        "report_to: mlflow without mlflow",
        lambda b: {"report_to": "mlflow"},
        "report-to-missing",
    ),
    Mistake("no-token", "common", "push_to_hub without a token", lambda b: {"push_to_hub": "true"}, "no-hub-token"),
    Mistake(
        "metric-unknown",
        "common",
        "accuracy as the metric of a language model",
        lambda b: {**STEPS, "metric_for_best_model": "accuracy"},
        "best-metric-unknown",
    ),
    Mistake(
        "metric-reversed",
        "common",
        "bpt as the metric, greater_is_better left to the stock default",
        lambda b: {**STEPS, "metric_for_best_model": "bpt"},
        "best-metric-reversed",
    ),
    Mistake(
        "many-workers",
        "LlamaFactory#9531",
        "10,000 data loader workers",
        lambda b: {"dataloader_num_workers": 10_000},
        "more-workers-than-cores",
    ),
    Mistake(
        "cache-in-the-way",
        "common",
        "cache_dir below a file",
        lambda b: {"cache_dir": b.file() / "cache"},
        "cache-not-writable",
    ),
    Mistake(
        "writes-into-data",
        "common",
        "output_dir inside the folder of the dataset",
        lambda b: {"dataset": b.documents.parent, "output_dir": b.documents.parent / "run"},
        "writes-into-dataset",
    ),
    Mistake(
        "memory",
        "LlamaFactory#3825",
        "full tuning of what cannot fit",
        lambda b: {"tuning": "full", "learning_rate": 1e-4},
        "memory-too-small",
        free=2**20,
    ),
    Mistake(
        "keeps-all-checkpoints",
        "common",
        "every checkpoint of a long run on a small disk",
        lambda b: {"max_steps": 4000, "save_total_limit": 0},
        "checkpoints-fill-disk",
        free=6 * 2**20,
    ),
    # -- data ----------------------------------------------------------------------------------------------------------
    Mistake(
        "half-masked",
        "TRL#3927",
        "every second conversation calls the assistant by another name",
        lambda b: b.chats(role=lambda i: ("assistant", "helper")[i % 2]),
        "many-dropped",
    ),
    Mistake(
        "end-unmarked",
        "unsloth#2900",
        "a chat template whose learned part leaves out the end",
        lambda b: {**b.chats(), **b.template(ANSWER_UNMARKED)},
        "end-not-learned",
    ),
    Mistake(
        "only-ends",
        "LlamaFactory#8088",
        "a chat template that marks nothing but the end as learned",
        lambda b: {**b.chats(), **b.template(ONLY_END_MARKED)},
        "only-ends-learned",
    ),
    Mistake(
        "little-learned",
        "TRL#3927",
        "one word is learned after a very long prompt",
        lambda b: {**b.pairs(lambda i: f"{i} {LONG_PROMPT * 6}", lambda i: "a"), "block_size": 128},
        "little-learned",
    ),
    Mistake(
        "conversations-cut",
        "axolotl PR #3401",
        "block_size shorter than prompt and answer",
        lambda b: {**b.pairs(lambda i: f"Say {i} " * 10, lambda i: f"I say {i}. " * 20), "block_size": 32},
        "conversations-cut",
    ),
    Mistake(
        "doubled-start",
        "common",
        "texts that begin with the start token, which the tokenizer adds too",
        lambda b: b.texts(lambda i: f"<|bos|>Number {i} comes after number {i - 1}."),
        "start-doubled",
    ),
    Mistake(
        "held-out-is-train",
        "common",
        "eval_dataset is the training file",
        lambda b: {"dataset": b.documents, "eval_dataset": b.documents},
        "held-out-seen",
    ),
    Mistake(
        "held-out-tiny",
        "common",
        "one document is held out",
        lambda b: {**STEPS, "validation_split_percentage": 1},
        "held-out-tiny",
    ),
    Mistake(
        "rows-four-times",
        "common",
        "the file holds its rows several times",
        lambda b: b.texts(lambda i: f"Number {i % 15} comes after number {i % 15 - 1}."),
        "documents-repeated",
    ),
    Mistake(
        "one-token-repeated",
        "common",
        "some documents are one word hundreds of times",
        lambda b: b.texts(lambda i: "the " * (500 + i) if i % 10 == 7 else f"Shelf {i} holds {3 * i + 1} books. " * 4),
        "tokens-repeat",
    ),
    Mistake(
        "labels-as-text",
        "common",
        "text_column names the labels",
        lambda b: {**b.texts(lambda i: ("positive", "negative")[i % 2], column="label"), "text_column": "label"},
        "documents-repeated",
    ),
    Mistake(
        "paths-as-text",
        "common",
        "text_column names the paths of the files",
        lambda b: b.texts(lambda i: f"/data/part_{i % 7}/document_{i}.txt"),
        "text-is-no-text",
    ),
    Mistake(
        "json-as-text",
        "common",
        "conversations written as JSON into the column text",
        lambda b: b.texts(lambda i: json.dumps([{"role": "user", "content": f"Number {i}?"}])),
        "text-is-no-text",
    ),
    Mistake(
        "answers-alone",
        "common",
        "text_column: output of instruction data",
        lambda b: {
            "dataset": b.rows({"instruction": f"Say {i}", "output": f"I say {i}"} for i in range(60)),
            "text_column": "output",
        },
        "question-not-read",
    ),
    Mistake(
        "empty-prompts",
        "common",
        "the column prompt was never filled",
        lambda b: b.pairs(lambda i: "", lambda i: f"I say {i}"),
        "prompts-empty",
    ),
    Mistake(
        "copied-prompts",
        "common",
        "prompt and completion filled from one column",
        lambda b: b.pairs(lambda i: f"I say {i}", lambda i: f"I say {i}"),
        "prompt-is-completion",
    ),
    Mistake(
        "foreign-alphabet",
        "common",
        "a vocabulary of eight words",
        lambda b: {**WORDS, "category_column": "", "vocabulary_size": 8},
        "words-unknown",
    ),
    Mistake(
        "ids-as-categories",
        "common",
        "category_column names the ids",
        lambda b: {
            **WORDS,
            "dataset": b.rows({"text": f"Number {i} after {i - 1}", "id": f"r{i}"} for i in range(60)),
            "category_column": "id",
        },
        "labels-nearly-unique",
    ),
    Mistake(
        "lopsided",
        "common",
        "one class of two has nearly all images",
        lambda b: b.pictures(noise, lambda i: "ab"[i % 20 == 0]),
        "classes-lopsided",
    ),
    Mistake(
        "black-pictures",
        "common",
        "images scaled to 0..1 and then cast to whole numbers",
        lambda b: b.pictures(lambda i: noise(i) // 128, lambda i: "ab"[i % 2]),
        "inputs-constant",
    ),
    # -- the model -----------------------------------------------------------------------------------------------------
    Mistake(
        "damaged-weights",
        "LlamaFactory#5627",
        "a checkpoint saved after its loss became NaN",
        lambda b: b.damaged_model(),
        "weights-not-finite",
    ),
    Mistake(
        "float16-weights",
        "LlamaFactory#8088",
        "full tuning of float16 weights",
        lambda b: {"tuning": "full", "dtype": "float16", "learning_rate": 1e-4},
        "float16-trained",
    ),
    Mistake(
        "bfloat16-weights",
        "common",
        "full tuning of bfloat16 weights at a small rate",
        lambda b: {"tuning": "full", "dtype": "bfloat16", "learning_rate": 1e-6, "optim": "adamw_torch"},
        "loses the steps that are too small for bfloat16 weights",
        True,
    ),
    Mistake(
        "small-tokenizer",
        "common",
        "the tokenizer of a much smaller vocabulary",
        lambda b: b.model_with_embeddings(8192),
        "tokenizer-much-smaller",
    ),
    Mistake(
        "head-only",
        "common",
        "adapters on the output layer alone",
        lambda b: {"lora_target_modules": "lm_head"},
        "adapters-on-head-only",
    ),
    Mistake(
        "rank-large",
        "common",
        "a rank wider than the layers",
        lambda b: {"lora_r": 128, "lora_alpha": 128},
        "rank-exceeds-layers",
    ),
    Mistake(
        "adapter-rank",
        "common",
        "another lora_r for an adapter that is trained on",
        lambda b: {**b.adapter(), "lora_r": 4},
        "adapter-keeps-configuration",
    ),
    *LOSSES,
)
