"""The trainings of the curriculum benchmarks: docstrings of different lengths and scikit-learn's digits, also spoiled.

Every run uses ``SCUTrainer``. Uniform sampling and ``group_by_length`` are those of the stock Trainer (``curriculum``
None). All runs with the same seed and share of noise have the same rows, initial weights and schedule, which decays
over the budget of the run. No run trains on the validation rows for early stopping.
"""

from __future__ import annotations

import ast
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

import datasets
import numpy
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.lib.common import collator, embedded_data, quiet
from scu_trainer import SCUTrainer
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.data.embedded import read_embedded
from scu_trainer.data.samplers import CurriculumSampler
from scu_trainer.data.store import build_once, digest_of
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.evaluation.scoring import score_documents

GROUPED = "group_by_length"
PLANNED = ("none", "token_budget")
UNIFORM = "uniform"
TRIMMED = "token_budget, spoiled removed"
"""Not a method, but a bound: training without the spoiled rows from the start."""


@dataclass(frozen=True)
class Run:
    """One training run. ``noise``: the share of spoiled rows. ``budget``: the share of the full number of epochs."""

    part: str
    noise: float
    method: str
    budget: float
    seed: int

    @property
    def curriculum(self) -> Optional[CurriculumSettings]:
        if self.method in (UNIFORM, GROUPED):
            return None
        return CurriculumSettings("token_budget" if self.method == TRIMMED else self.method)


class Spoiled(NamedTuple):
    """Training rows, validation rows for early stopping (spoiled in the same way), and the mask of spoiled rows."""

    train: Any
    validation: Any
    is_spoiled: numpy.ndarray


# -- text --------------------------------------------------------------------------------------------------------------

TEXT = {
    "rows": 240,
    "validation_rows": 80,
    "held_out_rows": 200,
    "shortest": 32,
    "longest": 256,
    "batch": 16,
    "epochs": 4,
    "rate": 2e-3,
    "hidden": 96,
    "layers": 2,
    "base_steps": 240,
    "base_rate": 4e-3,
}
"""Docstrings with fewer than ``shortest`` tokens are left out, and those with more than ``longest`` are truncated."""

LARGE_TEXT = {
    "rows": 800,
    "validation_rows": 160,
    "held_out_rows": 300,
    "shortest": 16,
    "hidden": 192,
    "layers": 3,
    "base_steps": 500,
}
"""The changes of ``--large``: enough rows for batches of similar lengths, and a base that was trained for longer."""

HELD_OUT_MODULES = 0.15


def text_model() -> LlamaForCausalLM:
    """Return a model of about 0.7 million random weights."""
    hidden = TEXT["hidden"]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=TEXT["layers"],
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def text_base() -> Path:
    """Return the base of all text runs, which is pre-trained once on the embedded Python documentation and cached."""
    recipe = [TEXT[name] for name in ("hidden", "layers", "base_steps", "base_rate")]
    return build_once(default_cache_dir(None) / "base" / f"curriculum-{digest_of(1, recipe)[:12]}", _pretrain)


def _pretrain(folder: Path) -> None:
    data = embedded_data(0, dataset="python_docs", block_size=256, validation_split_percentage=0.0)
    set_seed(0)
    changes = {"max_steps": TEXT["base_steps"], "learning_rate": TEXT["base_rate"], "lr_scheduler_type": "cosine"}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _arguments(scratch, per_device_train_batch_size=16, warmup_steps=20, **changes)
        trainer = Trainer(text_model(), arguments, collator(), data.train)
        quiet(trainer).train()
    trainer.model.save_pretrained(folder)


@cache
def _docstrings() -> tuple[list[list[int]], list[list[int]]]:
    """Return training rows, and rows of held-out modules: one docstring each, without duplicates, at full length."""
    module_of: dict[str, str] = {}
    for record in read_embedded("stdlib_source", default_cache_dir(None), "text"):
        for text in _docstrings_of(record.value["text"]):
            module_of.setdefault(text, record.place)
    tokens = embedded_tokenizer(default_cache_dir(None))(list(module_of))["input_ids"]
    modules = sorted(set(module_of.values()))
    drawn = numpy.random.default_rng(0).permutation(modules)[: int(HELD_OUT_MODULES * len(modules))]
    held_out = set(drawn.tolist())
    contenders: tuple[list, list] = ([], [])
    for module, row in zip(module_of.values(), tokens, strict=True):
        if len(row) >= TEXT["shortest"]:
            contenders[module in held_out].append(row)
    return contenders


def _docstrings_of(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text:
            yield text if isinstance(node, ast.Module) else f"{node.name}\n{text}"


def _token_rows(rows: list[list[int]]) -> datasets.Dataset:
    columns = {"input_ids": rows, "labels": rows, "length": [len(row) for row in rows]}
    return datasets.Dataset.from_dict({**columns, "document": list(range(len(rows)))})


def text_rows(seed: int, noise: float) -> Spoiled:
    """Draw rows by ``seed``. In a spoiled row all tokens after the first one are shuffled."""
    rng = numpy.random.default_rng([seed, 1])
    pool, count = _docstrings()[0], TEXT["rows"]
    drawn = [pool[i][: TEXT["longest"]] for i in rng.permutation(len(pool))[: count + TEXT["validation_rows"]]]
    is_spoiled = _spoiled(rng, (count, len(drawn) - count), noise)
    rows = [[row[0], *rng.permutation(row[1:]).tolist()] if bad else row for row, bad in zip(drawn, is_spoiled)]  # noqa: B905
    return Spoiled(_token_rows(rows[:count]), _token_rows(rows[count:]), is_spoiled[:count])


@cache
def text_held_out() -> datasets.Dataset:
    pool = _docstrings()[1]
    order = numpy.random.default_rng(2).permutation(len(pool))
    return _token_rows([pool[i][: TEXT["longest"]] for i in order[: TEXT["held_out_rows"]]])


def nats_per_token(model: nn.Module, rows: datasets.Dataset) -> float:
    scores = score_documents(model, rows, collator())
    return float(scores.nats.sum() / scores.tokens.sum())


def padding(longest: int) -> dict[str, float]:
    """Return processed per real tokens in one epoch of all training docstrings, truncated to ``longest`` tokens."""
    lengths = numpy.array([min(len(row), longest) for row in _docstrings()[0]])
    rows = TEXT["batch"]
    planned = {name: CurriculumSampler(lengths, CurriculumSettings(name), rows_per_batch=rows) for name in PLANNED}
    batches = {name: sampler.current.batches for name, sampler in planned.items()}
    order = list(LengthGroupedSampler(rows, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(0)))
    batches[GROUPED] = [numpy.array(order[start : start + rows]) for start in range(0, len(order), rows)]
    padded = {name: sum(ids.size * int(lengths[ids].max()) for ids in of) for name, of in batches.items()}
    ratios = {name: tokens / int(lengths.sum()) for name, tokens in padded.items()}
    return {"longest": longest, "rows": len(lengths), UNIFORM: ratios.pop("none"), **ratios}


# -- digits ------------------------------------------------------------------------------------------------------------

DIGITS = {"test_rows": 450, "validation_rows": 135, "batch": 32, "epochs": 20, "rate": 0.05, "width": 16}
CLASSES = 10


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.skip = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first_norm(self.first(pictures)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.skip(pictures))


class SmallResNet(nn.Module):
    """Two residual blocks; about 17 thousand weights at width 16."""

    main_input_name = "pixel_values"

    def __init__(self, width: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        blocks = [Block(width, width, 1), Block(width, 2 * width, 2)]
        self.layers = nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES)
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixel_values)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Pictures(torch.utils.data.Dataset):
    def __init__(self, pictures: torch.Tensor, labels: torch.Tensor) -> None:
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pictures[index], "labels": self.labels[index]}


@cache
def _digits() -> tuple[torch.Tensor, numpy.ndarray]:
    from sklearn.datasets import load_digits  # only this part needs scikit-learn

    digits = load_digits()
    pictures = torch.tensor(digits.data / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    return (pictures - pictures.mean()) / pictures.std(), digits.target.astype(numpy.int64)


def digit_rows(seed: int, noise: float) -> tuple[Spoiled, Pictures]:
    """Split rows by ``seed``, and return them with the clean test rows. A spoiled row has a random other label."""
    rng = numpy.random.default_rng([seed, 1])
    pictures, classes = _digits()
    order = rng.permutation(len(classes))
    test, rest = order[: DIGITS["test_rows"]], order[DIGITS["test_rows"] :]
    count = len(rest) - DIGITS["validation_rows"]
    is_spoiled = _spoiled(rng, (count, len(rest) - count), noise)
    labels = torch.from_numpy((classes[rest] + is_spoiled * rng.integers(1, CLASSES, len(rest))) % CLASSES)
    train, validation = (Pictures(pictures[rest[part]], labels[part]) for part in (slice(count), slice(count, None)))
    return Spoiled(train, validation, is_spoiled[:count]), Pictures(pictures[test], torch.from_numpy(classes[test]))


@torch.no_grad()
def percent_right(model: nn.Module, rows: Pictures) -> float:
    was_training = model.training
    logits = model.eval()(rows.pictures, rows.labels)["logits"]
    model.train(was_training)
    return 100.0 * float((logits.argmax(dim=1) == rows.labels).double().mean())


def _spoiled(rng: numpy.random.Generator, sizes: tuple[int, ...], share: float) -> numpy.ndarray:
    """Return a mask over all parts that marks exactly ``share`` of each."""
    return numpy.concatenate([rng.permutation(size) < round(share * size) for size in sizes])


# -- runs --------------------------------------------------------------------------------------------------------------


class Counted(SCUTrainer):
    """Counts the rows and tokens that the model really gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = {"rows": 0, "real_tokens": 0, "padded_tokens": 0}

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen["rows"] += len(inputs["labels"])
        if "attention_mask" in inputs:
            self.seen["real_tokens"] += int(inputs["attention_mask"].sum())
            self.seen["padded_tokens"] += inputs["attention_mask"].numel()
        return super().training_step(model, inputs, num_items_in_batch)


class Watch(TrainerCallback):
    """Scores held-out rows and the (spoiled) validation rows after every epoch. The time for this is not counted."""

    def __init__(self, scores: Callable[[nn.Module], dict[str, float]]) -> None:
        self.scores = scores
        self.points: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        begun_s = time.process_time()
        self.points.append({"epoch": len(self.points) + 1, **self.scores(model)})
        self.seconds += time.process_time() - begun_s


def run(one: Run) -> dict[str, Any]:
    """Train. Returns scores by epoch, rows and tokens, CPU seconds, and how well suspects match spoiled rows."""
    make = {"text": _text_trainer, "digits": _digit_trainer}[one.part]
    with tempfile.TemporaryDirectory() as scratch:
        trainer, watch, is_spoiled = make(one, scratch)
        trainer.add_callback(watch)
        begun_s = time.process_time()
        quiet(trainer).train()
        cpu_seconds = time.process_time() - begun_s - watch.seconds
    return {
        "score": watch.points[-1]["held_out"],
        **trainer.seen,
        "steps": trainer.state.global_step,
        "cpu_seconds": cpu_seconds,
        "points": watch.points,
        **_suspects(trainer, is_spoiled),
    }


def _text_trainer(one: Run, scratch: str) -> tuple[Counted, Watch, numpy.ndarray]:
    data = text_rows(one.seed, one.noise)
    arguments = _arguments(
        scratch,
        **_of_recipe(one, TEXT),
        lr_scheduler_type="linear",
        warmup_steps=0.05,
        train_sampling_strategy="group_by_length" if one.method == GROUPED else "random",
    )
    model = LlamaForCausalLM.from_pretrained(text_base())
    rows = data.train.select(numpy.flatnonzero(~data.is_spoiled)) if one.method == TRIMMED else data.train
    trainer = Counted(model, arguments, collator(), rows, curriculum=one.curriculum)
    parts = {"held_out": text_held_out(), "validation": data.validation}
    watch = Watch(lambda model: {name: nats_per_token(model, rows) for name, rows in parts.items()})
    return trainer, watch, data.is_spoiled


def _digit_trainer(one: Run, scratch: str) -> tuple[Counted, Watch, numpy.ndarray]:
    data, test = digit_rows(one.seed, one.noise)
    arguments = _arguments(
        scratch,
        **_of_recipe(one, DIGITS),
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=5e-4,
        max_grad_norm=0.0,
    )
    set_seed(one.seed)
    optimizer = (torch.optim.SGD, {"lr": DIGITS["rate"], "momentum": 0.9})
    trainer = Counted(
        SmallResNet(DIGITS["width"]),
        arguments,
        train_dataset=data.train,
        curriculum=one.curriculum,
        optimizer_cls_and_kwargs=optimizer,
    )
    parts = {"held_out": test, "validation": data.validation}
    return trainer, Watch(lambda model: {n: percent_right(model, rows) for n, rows in parts.items()}), data.is_spoiled


def _of_recipe(one: Run, recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": one.seed,
        "num_train_epochs": one.budget * recipe["epochs"],
        "per_device_train_batch_size": recipe["batch"],
        "learning_rate": recipe["rate"],
    }


def _arguments(scratch: str, **changes: Any) -> TrainingArguments:
    quiet_run = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(scratch, **quiet_run, logging_steps=100_000, **changes)


def _suspects(trainer: SCUTrainer, is_spoiled: numpy.ndarray) -> dict[str, float]:
    """Compare the rows that the run would leave out next with the spoiled ones; {} if it never suspects rows."""
    if trainer.curriculum is None or "noise_guard" not in trainer.curriculum.settings.methods:
        return {}
    suspects = trainer.curriculum.sampler.suspects()
    hits = int(is_spoiled[suspects].sum())
    return {
        "suspects": len(suspects),
        "precision": hits / len(suspects) if len(suspects) else None,
        "recall": hits / int(is_spoiled.sum()) if is_spoiled.any() else None,
    }
