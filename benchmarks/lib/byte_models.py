"""Train many small byte-level language models at once: thousands of healthy optimizer steps per minute on a CPU.

Each model has its own seed, row order, learning rate, warm-up and schedule. The first axis of every tensor is the
model. The models are independent, so the gradient of the sum of their losses contains that of each one. Text, AdamW and
clipping are real, so the tails of loss and gradient norm are those of real training, not of an assumed distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

HIDDEN, LAYERS, HEADS, BYTES = 32, 2, 2, 256
PAD = 0
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
WARM_UPS = (0, 10, 100)
SCHEDULES = ("constant", "linear", "cosine", "restarts")


@dataclass(frozen=True)
class Setup:
    """The training settings of one model. ``warm_up``: in steps."""

    rate: float
    warm_up: int
    schedule: str
    seed: int

    def rate_at(self, step: int, steps: int) -> float:
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, steps - self.warm_up)
        if self.schedule == "linear":
            return self.rate * (1 - done)
        if self.schedule == "constant":
            return self.rate
        turns = 1 if self.schedule == "cosine" else 3
        return self.rate * 0.5 * (1 + math.cos(math.pi * (turns * done % 1.0)))


def setups(count: int, seed: int) -> list[Setup]:
    draw = random.Random(seed)
    return [
        Setup(draw.choice(RATES), draw.choice(WARM_UPS), draw.choice(SCHEDULES), 1000 * seed + i) for i in range(count)
    ]


def byte_rows(texts: Sequence[str], length: int, is_even: bool, seed: int) -> torch.Tensor:
    """Return bytes of shape (rows, length), padded with 0. ``is_even``: full rows, else of 8 to ``length`` bytes."""
    data = "\n".join(texts).encode()
    draw, rows, start = random.Random(seed), [], 0
    while start + length < len(data):
        own = length if is_even else min(length, 8 + int(draw.expovariate(3.0 / length)))
        rows.append(list(data[start : start + own]) + [PAD] * (length - own))
        start += own
    return torch.tensor(rows)


def train(
    given: Sequence[Setup],
    rows: torch.Tensor,
    batch: int,
    steps: int,
    see: Callable[[torch.Tensor], None] = lambda row_losses: None,
) -> list[list[tuple[float, float]]]:
    """Train the models, and return for each one the (loss, gradient norm before clipping at 1) of every step. ``see``
    is called in every step with the mean nats per byte of each row, of shape (models, rows)."""
    models = len(given)
    weights = _weights(given, rows.size(1))
    orders = [random.Random(one.seed) for one in given]
    queues: list[list[int]] = [[] for _ in given]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights.values()]
    found: list[list[tuple[float, float]]] = [[] for _ in given]
    for step in range(steps):
        for queue, order in zip(queues, orders, strict=True):
            if len(queue) < batch:
                queue[:] = order.sample(range(len(rows)), len(rows))
        tokens = rows[torch.tensor([[queue.pop() for _ in range(batch)] for queue in queues])]
        sums, counts = _row_losses(weights, tokens)
        see(sums.detach() / counts.clamp(min=1))
        losses = sums.sum(1) / counts.sum(1)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
        norms = torch.stack([g.reshape(models, -1).square().sum(1) for g in gradients]).sum(0).sqrt()
        rates = torch.tensor([one.rate_at(step, steps) for one in given])
        _adamw(list(weights.values()), gradients, moments, rates, torch.clamp(1.0 / (norms + 1e-6), max=1.0), step + 1)
        for series, loss, norm in zip(found, losses.tolist(), norms.tolist(), strict=True):
            series.append((loss, norm))
    return found


def _weights(given: Sequence[Setup], length: int) -> dict[str, torch.Tensor]:
    sizes: dict[str, tuple[int, ...]] = {"bytes": (BYTES, HIDDEN), "places": (length, HIDDEN)}
    for layer in range(LAYERS):
        sizes |= {f"{layer}.qkv": (HIDDEN, 3 * HIDDEN), f"{layer}.out": (HIDDEN, HIDDEN)}
        sizes |= {f"{layer}.up": (HIDDEN, 4 * HIDDEN), f"{layer}.down": (4 * HIDDEN, HIDDEN)}
    drawn: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    for one in given:
        generator = torch.Generator().manual_seed(one.seed)
        for name, size in sizes.items():
            drawn[name].append(torch.randn(size, generator=generator) * (0.1 if len(name) > 5 else size[0] ** -0.5))
    return {name: torch.stack(several).requires_grad_() for name, several in drawn.items()}


def _row_losses(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nats and the bytes of each row, of shape (models, rows). ``tokens``: (models, rows, length)."""
    models, rows, length = tokens.shape
    picked = tokens.reshape(models, -1)
    hidden = torch.stack([table[ids] for table, ids in zip(weights["bytes"], picked, strict=True)])
    hidden = hidden.reshape(models, rows, length, HIDDEN) + weights["places"][:, None]
    for layer in range(LAYERS):
        hidden = hidden + _attended(weights, layer, hidden)
        normed = layer_norm(hidden, (HIDDEN,)).reshape(models, -1, HIDDEN)
        inner = torch.bmm(torch.bmm(normed, weights[f"{layer}.up"]).relu(), weights[f"{layer}.down"])
        hidden = hidden + inner.reshape(hidden.shape)
    seen = layer_norm(hidden[:, :, :-1], (HIDDEN,)).reshape(models, -1, HIDDEN)
    logits = torch.bmm(seen, weights["bytes"].transpose(1, 2))
    targets = tokens[:, :, 1:].reshape(models, -1)
    each = cross_entropy(logits.transpose(1, 2), targets, reduction="none") * (targets != PAD)
    return each.reshape(models, rows, -1).sum(2), (targets != PAD).reshape(models, rows, -1).sum(2)


def _attended(weights: dict[str, torch.Tensor], layer: int, hidden: torch.Tensor) -> torch.Tensor:
    models, rows, length, _ = hidden.shape
    normed = layer_norm(hidden, (HIDDEN,)).reshape(models, -1, HIDDEN)
    qkv = torch.bmm(normed, weights[f"{layer}.qkv"]).reshape(models * rows, length, 3, HEADS, HIDDEN // HEADS)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    return torch.bmm(mixed.reshape(models, rows * length, HIDDEN), weights[f"{layer}.out"]).reshape(hidden.shape)


@torch.no_grad()
def _adamw(weights: Any, gradients: Any, moments: Any, rates: torch.Tensor, factors: torch.Tensor, step: int) -> None:
    """Take one step of torch's AdamW with its defaults, with a learning rate and a clipping factor for each model."""
    for weight, gradient, (first, second) in zip(weights, gradients, moments, strict=True):
        own = (-1, *([1] * (weight.dim() - 1)))
        gradient = gradient * factors.reshape(own)
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
        scale = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        weight.mul_(1 - 0.01 * rates.reshape(own))
        weight.sub_(rates.reshape(own) / (1 - 0.9**step) * first / scale)
