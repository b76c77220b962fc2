"""Layers of TRIDENT's branches. No layer mixes the rows of a batch, and none reads padding.

This file is saved with each model, so it imports nothing from this project.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention of ``queries`` (rows, q, width) to ``keys`` (rows, k, width). ``mask``: bool (rows, k) or
    (rows, q, k), True if a key counts. At least one key of each query must count."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        attended = functional.scaled_dot_product_attention(
            self._by_head(self.query(queries)),
            self._by_head(self.key(keys)),
            self._by_head(self.value(keys)),
            attn_mask=mask[:, None, None, :] if mask.dim() == 2 else mask[:, None],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(attended.transpose(1, 2).flatten(2))

    def _by_head(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP (Xiong et al. 2020). With ``context``, tokens attend to it and to each other."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, mask: Tensor, context: Tensor | None = None, causal: bool = False) -> Tensor:
        """tokens: (rows, time, width). mask: bool (rows, time), or (rows, time of context) if there is a context.
        causal: no token attends to a later one."""
        queries = keys = self.attention_norm(tokens)
        if context is not None:
            # The tokens are keys too, so that a row with nothing else that counts has something to attend to.
            keys = torch.cat([queries, context], dim=1)
            mask = torch.cat([mask.new_ones(queries.shape[:2]), mask], dim=1)
        if causal:
            time = tokens.size(1)
            earlier = mask.new_ones(time, time).tril()
            mask = torch.cat([earlier.expand(len(mask), -1, -1), mask[:, None, time:].expand(-1, time, -1)], dim=2)
        tokens = tokens + self.dropout(self.attention(queries, keys, mask))
        return tokens + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(tokens)))))


def at_least_one(mask: Tensor) -> Tensor:
    """Return ``mask`` (rows, time) with rows that are all False set to True: attention over no key is not finite. The
    results of such rows must not be used."""
    return mask | ~mask.any(dim=1, keepdim=True)


def without_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` (rows, time, ...) with zeros where ``mask`` (rows, time) is False, even in place of NaN."""
    return values.masked_fill(~mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), 0)


def positions(length: int, width: int, like: Tensor) -> Tensor:
    """Return sinusoidal position encodings (Vaswani et al. 2017), (length, width); they exist for any length."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000.0) / half))
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class FrameConvolution(nn.Module):
    """3D convolution over (time, height, width) that halves height and width, then a norm of each single frame. A norm
    over all frames would read padded ones. ``time`` is the odd number of frames that a filter covers."""

    def __init__(self, inputs: int, outputs: int, time: int = 3) -> None:
        super().__init__()
        self.filter = nn.Conv3d(inputs, outputs, (time, 3, 3), stride=(1, 2, 2), padding=(time // 2, 1, 1), bias=False)
        self.norm = nn.GroupNorm(math.gcd(4, outputs), outputs)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """frames: (rows, time, channels, height, width). Returns frames with half the height and width."""
        filtered = self.filter(without_padding(frames, mask).transpose(1, 2)).transpose(1, 2)
        return functional.gelu(self.norm(filtered.flatten(0, 1))).unflatten(0, frames.shape[:2])


class HotSpots(nn.Module):
    """A detection head on feature maps: the center of each of ``spots`` heat maps, and the features there. Soft-argmax
    (Luvizon et al. 2017) makes the coordinates, from -1 to 1, differentiable."""

    def __init__(self, channels: int, spots: int = 2) -> None:
        super().__init__()
        self.heat = nn.Conv2d(channels, spots, 1)
        self.features = spots * (channels + 2)

    def forward(self, maps: Tensor) -> Tensor:
        """maps: (frames, channels, height, width) -> (frames, spots * (channels + 2))."""
        height, width = maps.shape[-2:]
        heat = self.heat(maps).flatten(2).softmax(dim=-1)
        ys, xs = torch.meshgrid(_axis_coordinates(height, maps), _axis_coordinates(width, maps), indexing="ij")
        coordinates = torch.stack([xs.flatten(), ys.flatten()], dim=-1).to(heat.dtype)
        spots = torch.cat([heat @ maps.flatten(2).transpose(1, 2).to(heat.dtype), heat @ coordinates], dim=-1)
        return spots.flatten(1).to(maps.dtype)


def _axis_coordinates(count: int, like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, count, device=like.device)
