"""Parts of the retention study: texts, bases trained on one of them, and the usual methods against forgetting."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from benchmarks.lib.common import collator, embedded_data, quiet, scratch_arguments
from scu_trainer import SCUTrainer
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.data.embedded import read_embedded
from scu_trainer.data.store import build_once, digest_of
from scu_trainer.data.text.anchor import Anchor, read_anchor, round_robin_rows
from scu_trainer.models.loading.load import load_model, prepare_for_tuning
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.loop import Loop
from scu_trainer.train.retention.replay import Replay
from scu_trainer.train.retention.sampled import sampled_text

ROWS = {"block_size": 64, "validation_split_percentage": 20.0, "packing": False}
MOST_MEASURED, MOST_JUDGED = 96, 64
"""Rows that the loop measures, and rows that each score of a point uses."""

SAMPLED_DOCUMENTS = 300
"""Number of documents, of one row each, that the model generates for replay."""

TEXTS: dict[str, dict[str, Any]] = {
    "docs": {"dataset": "python_docs", "dataset_size": 300},
    "source": {"dataset": "stdlib_source", "dataset_size": 100},
    "sums": {"dataset": "sums", "dataset_size": 400},
    "rot13": {"dataset": "rot13", "dataset_size": 200},
}

PAIRS = {
    "docs > source": ("docs", "source"),
    "docs > sums": ("docs", "sums"),
    "source > docs": ("source", "docs"),
    "source > rot13": ("source", "rot13"),
}
"""The text of the base and the new text: code and prose in both directions, generated sums, and docstrings in rot13,
which share only punctuation with the text of the base."""

SIZES = {
    "small": {"hidden_size": 64, "layers": 3, "rate": 6e-3, "steps": 600},
    "large": {"hidden_size": 128, "layers": 4, "rate": 4e-3, "steps": 300},
}
"""0.28 and 1.05 million weights. ``rate`` and ``steps`` of pre-training."""

BASE_ROWS, BASE_BLOCK = 8, 128
FORMAT = 1
"""Increase this when a change in this file changes the bases."""


# -- texts -------------------------------------------------------------------------------------------------------------


def sums(count: int) -> Iterator[str]:
    """Yield documents of correct sums."""
    chance = random.Random(0)
    for _ in range(count):
        pairs = [(chance.randint(1, 99), chance.randint(1, 99)) for _ in range(12)]
        yield " ".join(f"{a} plus {b} is {a + b}." for a, b in pairs)


def rot13(count: int) -> Iterator[str]:
    """Docstrings of as many modules."""
    for number, record in enumerate(read_embedded("stdlib_docstrings", default_cache_dir(None), "text")):
        if number == count:
            return
        yield codecs.encode(record.value["text"], "rot13")


MADE: dict[str, Callable[[int], Iterator[str]]] = {"sums": sums, "rot13": rot13}


def text_settings(name: str, **changes: Any) -> DataSettings:
    return DataSettings(**{**ROWS, **_source(name), **changes})


def _source(name: str) -> dict[str, Any]:
    given = dict(TEXTS[name])
    if given["dataset"] in MADE:
        given["dataset"] = str(_file(given["dataset"], given["dataset_size"]))
    return given


def _file(name: str, count: int) -> Path:
    def write(folder: Path) -> None:
        lines = [json.dumps({"text": text}) + "\n" for text in MADE[name](count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))

    folder = default_cache_dir(None) / "study" / f"{name}-{count}-{FORMAT}"
    return build_once(folder, write) / f"{name}.jsonl"


def anchor_of(known: str, new: str, seed: int, sampled: Optional[nn.Module] = None) -> Anchor:
    """Return the anchor of the text ``known``, without documents that ``new`` contains, or of text that the model
    ``sampled`` writes."""
    cache = default_cache_dir(None)
    how = {"tokenizer": embedded_tokenizer(cache), "seed": seed, "cache_dir": cache, "model_name": known}
    choose: Callable[[int], tuple[bool, str]] = lambda rows: (True, f"{rows} rows")  # noqa: E731
    name, count = TEXTS[known]["dataset"], TEXTS[known]["dataset_size"]
    if sampled is not None:
        of_text = {"documents": SAMPLED_DOCUMENTS, "tokens": ROWS["block_size"], "seed": seed}
        name, count = str(sampled_text(sampled, how["tokenizer"], cache, **of_text)), SAMPLED_DOCUMENTS
    anchor = read_anchor(text_settings(new), name, count, choose=choose, **how)
    few = {"measured": some(anchor.measured, MOST_MEASURED), "unseen": some(anchor.unseen, MOST_JUDGED)}
    return replace(anchor, **few)


def some(rows: Any, count: int) -> Any:
    """Return at most ``count`` rows, from as many documents as possible."""
    return rows.select(numpy.sort(round_robin_rows(numpy.asarray(rows["document"]))[:count]))


# -- bases -------------------------------------------------------------------------------------------------------------


def base(text: str, size: str) -> Path:
    """Return the folder of a Llama pre-trained on ``text``, which is trained at the first call."""
    shape, cache = SIZES[size], default_cache_dir(None)
    recipe = [FORMAT, shape, TEXTS[text], BASE_ROWS, BASE_BLOCK, torch.__version__]
    return build_once(
        cache / "study" / f"{text}-{size}-{digest_of(recipe)[:12]}", lambda new: _pretrain(new, text, size)
    )


def _pretrain(new: Path, text: str, size: str) -> None:
    set_seed(1)
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    model = LlamaForCausalLM(_shape(tokenizer, SIZES[size]["hidden_size"], SIZES[size]["layers"]))
    data = embedded_data(
        1, **_source(text), block_size=BASE_BLOCK, validation_split_percentage=0.0, isolate_documents=False
    )
    changes = {
        "max_steps": SIZES[size]["steps"],
        "learning_rate": SIZES[size]["rate"],
        "per_device_train_batch_size": BASE_ROWS,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "weight_decay": 0.1,
    }
    with scratch_arguments(**changes) as arguments:
        trainer = quiet(SCUTrainer(model, arguments, train_dataset=data.train, data_collator=collator()))
        trainer.train()
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)


def _shape(tokenizer: Any, hidden_size: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tuned(text: str, size: str, seed: int, rank: Optional[int] = 8) -> nn.Module:
    """Return a base with new adapters, or for full tuning if ``rank`` is None."""
    if rank is None:
        return prepare_for_tuning(untuned(text, size), ModelSettings(tuning="full"))
    settings = ModelSettings(tuning="lora", lora_r=rank, lora_alpha=2 * rank)
    model = untuned(text, size)
    set_seed(seed)
    return prepare_for_tuning(model, settings)


def untuned(text: str, size: str) -> nn.Module:
    return load_model(ModelSettings(model_name_or_path=str(base(text, size))))


# -- what people do ----------------------------------------------------------------------------------------------------


class FixedReplay(Loop):
    """Replays a fixed number of anchor rows in every batch, and measures nothing."""

    name = "fixed_replay"

    def __init__(self, rows: Any, share: float, seed: int) -> None:
        self.share, self.replay = share, Replay(rows, collator(), seed)

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        return (self.replay.add_to_batch(inputs, self.trainer._train_batch_size, self.share) for inputs in batches)


def fisher(text: str, size: str, rows: Any) -> dict[str, torch.Tensor]:
    """Return the diagonal of the empirical Fisher information of each matrix of the base, per token of ``rows``, from
    the squared gradients of the summed loss of each row."""
    model = untuned(text, size)
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    found, tokens, collate = {name: torch.zeros_like(weight) for name, weight in weights.items()}, 0, collator()
    for row in rows:
        model.zero_grad()
        batch = collate([row])
        labels = batch["labels"][:, 1:]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        tokens += int((labels != -100).sum())
        for name, weight in weights.items():
            found[name] += weight.grad**2
    return {name: total / tokens for name, total in found.items()}


class Ewc(Loop):
    """Elastic weight consolidation (Kirkpatrick et al. 2017): adds strength / 2 * sum of F (W - W0)^2 to the loss, with
    the Fisher information F of the anchor and the product of the adapter as W - W0. With strength 1 the loss of the
    anchor, as approximated by F, has the same weight as the loss of the new text."""

    name = "ewc"

    def __init__(self, information: dict[str, torch.Tensor], strength: float) -> None:
        self.information, self.strength = information, strength

    def on_gradients(self, loss_scale: float) -> None:
        terms = []
        for name, module in self.trainer.model.named_modules():
            for adapter, down in getattr(module, "lora_A", {}).items():
                update = module.scaling[adapter] * module.lora_B[adapter].weight @ down.weight
                terms.append((self.information[f"{name.removeprefix('base_model.model.')}.weight"] * update**2).sum())
        (loss_scale * self.strength / 2 * torch.stack(terms).sum()).backward()


def dft_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss with each token weighted by its probability (arXiv:2508.05629)."""
    nats, counted, _ = _of_tokens(outputs, labels)
    return _mean(torch.exp(-nats.detach()) * nats, counted, num_items_in_batch)


EAFT_WORDS = 20


def eaft_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss with each token weighted by the entropy of the EAFT_WORDS likeliest words, relative to the
    largest possible value (arXiv:2601.02151)."""
    nats, counted, logits = _of_tokens(outputs, labels)
    likeliest = torch.log_softmax(logits.detach().topk(EAFT_WORDS, dim=-1).values, dim=-1)
    entropy = -(likeliest.exp() * likeliest).sum(-1) / torch.log(torch.tensor(float(EAFT_WORDS)))
    return _mean(entropy * nats, counted, num_items_in_batch)


def _of_tokens(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the nats of each token, whether it counts, both of shape (rows, time - 1), and logits with another
    dimension for words."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    nats = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return nats, targets != -100, logits


def _mean(weighted: torch.Tensor, counted: torch.Tensor, num_items: Any) -> torch.Tensor:
    return (weighted * counted).sum() / (counted.sum() if num_items is None else num_items)


LOSSES = {"dft": dft_loss, "eaft": eaft_loss}


class Points(TrainerCallback):
    """Records what is forgotten and learned after ``steps``, as with early stopping there."""

    def __init__(self, point: Callable[[nn.Module], dict[str, float]], steps: tuple[int, ...]) -> None:
        self.point, self.steps, self.found = point, steps, []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step in self.steps:
            self.found.append({"step": state.global_step, **self.point(kwargs["model"])})
