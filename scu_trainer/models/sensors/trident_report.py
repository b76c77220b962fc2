"""The report head of TRIDENT: a decoder that writes a short text, word by word, from the fused branches.

This file is saved with each model, so it imports nothing from this project.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .configuration_trident import TridentConfig
from .trident_branches import placed, transformer

BEGIN, END = 2, 3
"""Ids of the words that begin and end every report."""

NOT_LEARNED = -100


class ReportDecoder(nn.Module):
    """Transformer layers that attend to the earlier words and to the fused queries (Vaswani et al. 2017)."""

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        self.words, self.length = tuple(config.report_words), config.report_length
        self.embedding = nn.Embedding(len(self.words), config.hidden_size)
        self.layers = transformer(config, config.num_report_layers)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, len(self.words))

    def forward(self, collected: Tensor, ids: Tensor) -> Tensor:
        """collected: (rows, queries, width), from the fusion. ids: (rows, time), of the words so far. Returns the
        logits of each next word, (rows, time, words)."""
        tokens = placed(self.embedding(ids))
        mask = torch.ones(collected.shape[:2], dtype=torch.bool, device=collected.device)
        for layer in self.layers:
            tokens = layer(tokens, mask, collected, causal=True)
        return self.output(self.norm(tokens))

    def written(self, collected: Tensor) -> list[str]:
        """Return a text per row by greedy decoding, of at most ``length`` words."""
        ids = torch.full((len(collected), 1), BEGIN, device=collected.device)
        for _ in range(self.length):
            ids = torch.cat([ids, self(collected, ids)[:, -1:].argmax(dim=-1)], dim=1)
            if (ids == END).any(dim=1).all():
                break
        return [self._text(row) for row in ids[:, 1:].tolist()]

    def _text(self, ids: list[int]) -> str:
        end = ids.index(END) if END in ids else len(ids)
        return " ".join(self.words[word_id] for word_id in ids[:end])


def report_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (rows, 3), float32: summed loss in nats, number of learned words, and 1 if each has the largest logit;
    zeros if none is learned. logits: (rows, time, words). targets: (rows, time), -100 for words that are not
    learned."""
    learned = targets != NOT_LEARNED
    nats = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    is_right = (logits.argmax(dim=-1) == targets) | ~learned
    is_exact = is_right.all(dim=1) & learned.any(dim=1)
    return torch.stack([nats.view(targets.shape).sum(dim=1), learned.sum(dim=1).float(), is_exact.float()], dim=1)
