"""Random trainings for exactness.py: model families, losses and data. Each is determined by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB, CLASSES = 48, 4
CLASS_WEIGHTS = torch.tensor([1.0, 0.2, 3.0, 7.0])
TOKEN_WEIGHTS = torch.linspace(0.2, 4.0, VOCAB)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass
class Case:
    """One random training. ``splits``: whether the loss is a sum or a (weighted) mean over rows, tokens or classes, so
    that it can be split exactly. ``compute_loss``: the override in a subclass of the Trainer, as a function (model,
    inputs, outputs) -> loss."""

    seed: int
    family: str
    loss: str
    splits: bool
    make: Callable[[], nn.Module]
    rows: list[dict[str, Any]]
    accumulation: int
    batch: int
    cut: dict[str, Any]
    loss_function: Optional[Callable] = None
    compute_loss: Optional[Callable] = None
    arguments: dict[str, Any] = field(default_factory=dict)
    has_statistics: bool = False

    @property
    def name(self) -> str:
        return f"{self.family} x {self.loss}"


# -- models ------------------------------------------------------------------------------------------------------------


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


def _bert(kind: type, **changes: Any) -> Callable[[], nn.Module]:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _seeded(lambda: kind(BertConfig(vocab_size=VOCAB, max_position_embeddings=64, **SIZES, **rates, **changes)))


def _llama(kind: type = LlamaForCausalLM, config: type = LlamaConfig, **changes: Any) -> Callable[[], nn.Module]:
    more = {"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    return _seeded(lambda: kind(config(vocab_size=VOCAB, **SIZES, **more, **changes)))


def _gpt2() -> nn.Module:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=64, **rates))


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **sizes))


def _vit() -> nn.Module:
    config = ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=CLASSES)
    return ViTForImageClassification(config)


def _resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=CLASSES)
    )


class Plain(nn.Module):
    """A user's module that computes its own loss. ``late_from``: the call from which the loss has another term."""

    def __init__(self, loss: Callable, late_from: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 12)
        self.inner, self.out = nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.loss, self.late_from = loss, late_from
        self.register_buffer("late", torch.zeros(()))

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1).to(self.out.weight.dtype)
        states = self.inner(self.table(input_ids)).tanh() * mask
        pooled = states.sum(dim=1) / mask.sum(dim=1)
        logits = self.out(pooled)
        found = {"logits": logits}
        return found if labels is None else {"loss": self.loss(self, pooled, logits, labels), **found}


class Speech(nn.Module):
    """CTC over frames, with targets of different lengths."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.table, self.out, self.reduction = nn.Embedding(VOCAB, 12), nn.Linear(12, CLASSES + 1), reduction

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.out(self.table(input_ids))
        shares = functional.log_softmax(logits, dim=-1).transpose(0, 1)
        lengths = (labels >= 0).sum(dim=1)
        targets = labels.clamp(min=0) + 1
        loss = functional.ctc_loss(
            shares, targets, attention_mask.sum(dim=1), lengths, blank=0, reduction=self.reduction, zero_infinity=True
        )
        return {"loss": loss, "logits": logits}


# -- losses of strangers -----------------------------------------------------------------------------------------------


def _hand_weighted(logits, labels):
    weights = CLASS_WEIGHTS.to(logits)[labels]
    return (weights * functional.cross_entropy(logits, labels, reduction="none")).sum() / weights.sum()


def _contrast(pooled):
    shares = functional.normalize(pooled) @ functional.normalize(pooled).T
    return functional.cross_entropy(shares * 5, torch.arange(len(shares)))


def _hardest(logits, labels):
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return losses.topk(max(1, int(0.7 * len(losses)))).values.mean()


def _balance(logits):
    return 0.1 * (logits.softmax(-1).mean(dim=0) - 1 / CLASSES).square().sum()


PLAIN = {
    # name: (splits, loss(module, pooled, logits, labels))
    "mean": (True, lambda m, p, o, y: functional.cross_entropy(o, y)),
    "sum": (True, lambda m, p, o, y: functional.cross_entropy(o, y, reduction="sum")),
    "weighted": (True, lambda m, p, o, y: functional.cross_entropy(o, y, weight=CLASS_WEIGHTS)),
    "weighted, smoothed": (
        True,
        lambda m, p, o, y: functional.cross_entropy(o, y, weight=CLASS_WEIGHTS, label_smoothing=0.1),
    ),
    "likelihood, weighted": (True, lambda m, p, o, y: functional.nll_loss(o.log_softmax(-1), y, weight=CLASS_WEIGHTS)),
    "several yes or no": (
        True,
        lambda m, p, o, y: functional.binary_cross_entropy_with_logits(o, functional.one_hot(y, CLASSES).float()),
    ),
    "squares": (True, lambda m, p, o, y: (o - functional.one_hot(y, CLASSES)).square().mean()),
    "focal": (
        True,
        lambda m, p, o, y: (
            (1 - o.softmax(-1).gather(1, y[:, None])[:, 0]).square() * functional.cross_entropy(o, y, reduction="none")
        ).mean(),
    ),
    "weighted by hand": (False, lambda m, p, o, y: _hand_weighted(o, y)),
    "hardest": (False, lambda m, p, o, y: _hardest(o, y)),
    "contrastive": (False, lambda m, p, o, y: _contrast(p)),
    "contrastive in training only": (
        False,
        lambda m, p, o, y: functional.cross_entropy(o, y) + (0.3 * _contrast(p) if m.training else 0.0),
    ),
    "balance in training only": (
        False,
        lambda m, p, o, y: functional.cross_entropy(o, y) + (_balance(o) if m.training else 0.0),
    ),
    "contrastive for many rows": (
        False,
        lambda m, p, o, y: functional.cross_entropy(o, y) + (0.3 * _contrast(p) if len(o) > 4 else 0.0),
    ),
    "mixed rows": (False, lambda m, p, o, y: functional.cross_entropy(m.out(p - p.mean(dim=0)), y)),
    "with a constant part": (
        True,
        lambda m, p, o, y: functional.cross_entropy(o, y) + 0.01 * m.out.weight.square().sum(),
    ),
}

BY_FUNCTION = {
    # compute_loss_func(outputs, labels, num_items_in_batch) of models with (rows, time, words) logits
    "own mean": (True, lambda o, y, n: _tokens(o, y, reduction="mean")),
    "own count": (True, lambda o, y, n: _tokens(o, y, reduction="sum") / n),
    "own weights": (True, lambda o, y, n: _tokens(o, y, weight=TOKEN_WEIGHTS)),
    "own smoothing": (True, lambda o, y, n: _tokens(o, y, label_smoothing=0.1)),
    "per sequence": (True, lambda o, y, n: _per_sequence(o, y).mean()),
    "per sequence, hardest": (False, lambda o, y, n: 1.0 * _per_sequence(o, y).max()),
    "weights by hand": (False, lambda o, y, n: _weights_by_hand(o, y)),
    "squared mean": (False, lambda o, y, n: _tokens(o, y, reduction="mean").square()),
}


def _tokens(outputs, labels, **how):
    logits = outputs["logits"][:, :-1]
    return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), **how)


def _each_token(outputs, labels):
    return functional.cross_entropy(outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def _per_sequence(outputs, labels):
    return _each_token(outputs, labels).sum(dim=1) / labels[:, 1:].ne(-100).sum(dim=1).clamp(min=1)


def _weights_by_hand(outputs, labels):
    weights = TOKEN_WEIGHTS[labels[:, 1:].clamp(min=0)] * labels[:, 1:].ne(-100)
    return (weights * _each_token(outputs, labels)).sum() / weights.sum()


OVERRIDES = {
    # compute_loss(model, inputs, outputs) of a subclass, for models with (rows, classes) logits
    "overridden, weighted": (
        True,
        lambda model, inputs, outputs: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)(outputs["logits"], inputs["labels"]),
    ),
    "overridden, plain": (
        True,
        lambda model, inputs, outputs: functional.cross_entropy(outputs["logits"], inputs["labels"]),
    ),
    "overridden, contrastive": (
        False,
        lambda model, inputs, outputs: (
            functional.cross_entropy(outputs["logits"], inputs["labels"]) + 0.3 * _contrast(outputs["logits"])
        ),
    ),
}


# -- data --------------------------------------------------------------------------------------------------------------


def _lengths(draw: random.Random, count: int) -> list[int]:
    if draw.random() < 0.3:
        return [12] * count
    return [draw.randint(5, 20) for _ in range(count)]


def _tokens_of(draw: random.Random, length: int) -> list[int]:
    return [draw.randint(2, VOCAB - 1) for _ in range(length)]


def _text(draw: random.Random, count: int, prompts: bool) -> list[dict[str, Any]]:
    rows = []
    for length in _lengths(draw, count):
        ids = _tokens_of(draw, length)
        hidden = draw.randint(0, length // 2) if prompts else 0
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return rows


def _classes(draw: random.Random, count: int) -> list[int]:
    """Draw unbalanced classes, sometimes sorted, so that some batches have one class only."""
    labels = draw.choices(range(CLASSES), weights=draw.choice([(1, 1, 1, 1), (20, 3, 1, 1), (30, 1, 0, 0)]), k=count)
    return sorted(labels) if draw.random() < 0.4 else labels


def _classified(draw: random.Random, count: int) -> list[dict[str, Any]]:
    labels = _classes(draw, count)
    return [
        {"input_ids": _tokens_of(draw, length), "labels": label}
        for length, label in zip(_lengths(draw, count), labels, strict=True)
    ]


def _spoken(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {"input_ids": _tokens_of(draw, length), "labels": draw.choices(range(CLASSES), k=draw.randint(1, 3))}
        for length in _lengths(draw, count)
    ]


def _pairs(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {"input_ids": _tokens_of(draw, length), "labels": _tokens_of(draw, draw.randint(2, 9))}
        for length in _lengths(draw, count)
    ]


def _spans(draw: random.Random, count: int) -> list[dict[str, Any]]:
    rows = []
    for length in _lengths(draw, count):
        start = draw.randint(0, length - 2)
        rows.append(
            {
                "input_ids": _tokens_of(draw, length),
                "start_positions": start,
                "end_positions": draw.randint(start, length - 1),
            }
        )
    return rows


def _tagged(draw: random.Random, count: int) -> list[dict[str, Any]]:
    rows = []
    for length in _lengths(draw, count):
        tags = [draw.choice([-100, *_classes(draw, 1)]) for _ in range(length)]
        tags[0] = draw.randrange(CLASSES)
        rows.append({"input_ids": _tokens_of(draw, length), "labels": tags})
    return rows


def _pictures(draw: random.Random, count: int) -> list[dict[str, Any]]:
    labels = _classes(draw, count)
    return [
        {"pixel_values": torch.tensor([draw.random() for _ in range(192)]).view(3, 8, 8), "labels": label}
        for label in labels
    ]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows on the right. Labels per token are padded with -100. Images of rows with text are joined."""
    if "input_ids" not in rows[0]:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
            **_index(rows),
        }
    made = {"input_ids": _padded([row["input_ids"] for row in rows], 0)}
    made["attention_mask"] = _padded([[1] * len(row["input_ids"]) for row in rows], 0)
    for name in ("labels", "start_positions", "end_positions"):
        if name in rows[0]:
            values = [row[name] for row in rows]
            made[name] = _padded(values, -100) if isinstance(values[0], list) else torch.tensor(values)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in rows[0]:
            made[name] = _padded([row[name] for row in rows], 0)
    for name in ("pixel_values", "image_grid_thw"):
        if parts := [row[name] for row in rows if name in row]:
            made[name] = torch.cat(parts)
    return {**made, **_index(rows)}


def _index(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"sample_index": torch.tensor([row["sample_index"] for row in rows])} if "sample_index" in rows[0] else {}


def _padded(lists: list[list[int]], fill: int) -> torch.Tensor:
    width = max(map(len, lists))
    return torch.tensor([[*values, *[fill] * (width - len(values))] for values in lists])


# -- cases -------------------------------------------------------------------------------------------------------------


def _plain_module(name: str) -> dict[str, Any]:
    splits, loss = PLAIN[name]
    return {"loss": name, "splits": splits, "make": _seeded(lambda: Plain(loss))}


def _late_module(draw: random.Random) -> dict[str, Any]:
    """Make a loss with a term that mixes rows only from some step on, which no analysis before training can detect."""
    begins = draw.randint(1, 3)

    def loss(module, pooled, logits, labels):
        plain = functional.cross_entropy(logits, labels)
        return plain + 0.3 * _contrast(pooled) if module.training and int(module.late) >= begins else plain

    return {"loss": "contrastive later", "splits": False, "make": _seeded(lambda: Plain(loss, late_from=begins))}


def _of_model(make: Callable[[], nn.Module], splits: bool = True) -> Callable[[random.Random], dict[str, Any]]:
    return lambda draw: {"loss": "own", "splits": splits, "make": make}


def _with_function(make: Callable[[], nn.Module]) -> Callable[[random.Random], dict[str, Any]]:
    def made(draw: random.Random) -> dict[str, Any]:
        name = draw.choice(list(BY_FUNCTION))
        splits, function = BY_FUNCTION[name]
        given = lambda outputs, labels, num_items_in_batch=None: function(outputs, labels, num_items_in_batch)  # noqa: E731
        return {"loss": name, "splits": splits, "make": make, "loss_function": given}

    return made


def _with_override(make: Callable[[], nn.Module]) -> Callable[[random.Random], dict[str, Any]]:
    def made(draw: random.Random) -> dict[str, Any]:
        name = draw.choice(list(OVERRIDES))
        splits, function = OVERRIDES[name]
        return {"loss": name, "splits": splits, "make": make, "compute_loss": function}

    return made


def _smoothed(make: Callable[[], nn.Module]) -> Callable[[random.Random], dict[str, Any]]:
    smoothing = {"label_smoothing_factor": 0.1}
    return lambda draw: {"loss": "label_smoothing_factor", "splits": True, "make": make, "arguments": smoothing}


def _learned_words(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return _text(draw, count, prompts=draw.random() < 0.6)


CLASSIFIER = _bert(BertForSequenceClassification, num_labels=CLASSES)
FAMILIES: dict[str, tuple[float, Callable, Callable[[random.Random], dict[str, Any]]]] = {
    # name: (how often, data, case)
    "llama": (2, _learned_words, _of_model(_llama())),
    "gpt2": (1, _learned_words, _of_model(_seeded(_gpt2))),
    "llama, compute_loss_func": (5, _learned_words, _with_function(_llama())),
    "llama, smoothed": (1, _learned_words, _smoothed(_llama())),
    "mixtral with router loss": (
        1,
        _learned_words,
        _of_model(
            _llama(MixtralForCausalLM, MixtralConfig, output_router_logits=True, num_local_experts=2), splits=False
        ),
    ),
    "bert, masked words": (1, _learned_words, _of_model(_bert(BertForMaskedLM))),
    "bert, masked words, smoothed": (1, _learned_words, _smoothed(_bert(BertForMaskedLM))),
    "bert, classes": (2, _classified, _of_model(CLASSIFIER)),
    "bert, classes, overridden": (3, _classified, _with_override(CLASSIFIER)),
    "bert, classes, smoothed": (1, _classified, _smoothed(CLASSIFIER)),
    "bert, tags": (1, _tagged, _of_model(_bert(BertForTokenClassification, num_labels=CLASSES))),
    "bert, spans": (1, _spans, _of_model(_bert(BertForQuestionAnswering))),
    "llama, classes": (1, _classified, _of_model(_llama(LlamaForSequenceClassification, num_labels=CLASSES))),
    "t5": (2, _pairs, _of_model(_seeded(_t5))),
    "vit": (1, _pictures, _of_model(_seeded(_vit))),
    "vit, overridden": (1, _pictures, _with_override(_seeded(_vit))),
    "resnet": (1, _pictures, _of_model(_seeded(_resnet), splits=False)),
    "speech": (
        2,
        _spoken,
        lambda draw: {
            "loss": (how := draw.choice(["mean", "sum"])),
            "splits": True,
            "make": _seeded(lambda: Speech(how)),
        },
    ),
    "module": (10, _classified, lambda draw: _plain_module(draw.choice(list(PLAIN)))),
    "module that changes": (2, _classified, _late_module),
}

STEPS = 4


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    family = draw.choices(list(FAMILIES), weights=[often for often, _, _ in FAMILIES.values()])[0]
    _, data, make = FAMILIES[family]
    batch, accumulation = draw.randint(3, 8), draw.randint(1, 3)
    cut = draw.choice(
        [{"max_batch_size": draw.randint(1, 2)}, {"token_cap": draw.randint(20, 60)}, {"token_cap": "auto"}]
    )
    rows = data(draw, batch * accumulation * STEPS)
    return Case(
        seed=seed,
        family=family,
        rows=rows,
        accumulation=accumulation,
        batch=batch,
        cut=cut,
        has_statistics=draw.random() < 0.3,
        **make(draw),
    )
