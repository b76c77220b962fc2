"""The branches of TRIDENT: each turns one sensor's recording into tokens of one width, and says which of them count.

This file is copied beside saved models, so it names nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from .configuration_trident import TridentConfig
from .trident_layers import FrameConvolution, HotSpots, TransformerLayer, at_least_one, positions, without_padding


class Branch(nn.Module):
    """Tokens (rows, tokens, width) and bool (rows, tokens), True where a token counts."""

    inputs: tuple[str, ...] = ()
    """What it reads from a batch, each with a mask."""

    def blocks(self) -> Iterator[nn.Module]:
        """Parts whose inside may be computed again in backward."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class VisibleBranch(Branch):
    """Video: a small 3D CNN sees motion, a transformer over frames its course."""

    inputs = ("visible",)

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        first, second = config.stem_channels, 2 * config.stem_channels
        self.stem = nn.ModuleList([FrameConvolution(3, first), FrameConvolution(first, second)])
        self.project = nn.Linear(GRID * GRID * second, config.hidden_size)
        self.layers = transformer(config)

    def blocks(self) -> Iterator[nn.Module]:
        yield from (*self.stem, *self.layers)

    def forward(self, visible: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """visible: (rows, frames, 3, height, width), 0 to 255. mask: bool (rows, frames)."""
        frames = visible.to(self.dtype) / 127.5 - 1
        for convolution in self.stem:
            frames = convolution(frames, mask)
        pooled = functional.adaptive_avg_pool2d(frames.flatten(0, 1), GRID).flatten(1).unflatten(0, mask.shape)
        return attended(self.layers, self.project(pooled), mask), mask


class InfraredBranch(Branch):
    """Thermal video and the curve of cooling: a detection CNN finds hot spots in each frame, an MLP reads the curve."""

    inputs = ("infrared", "cooling_curve")

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        first, second, width = config.stem_channels, 2 * config.stem_channels, config.hidden_size
        self.center, self.scale = config.infrared_center, config.infrared_scale
        self.detector = nn.ModuleList([FrameConvolution(1, first, time=1), FrameConvolution(first, second, time=1)])
        self.spots = HotSpots(second)
        self.project = nn.Linear(self.spots.spots * (second + self.spots.features), width)
        self.curve = CoolingCurve(width)

    def blocks(self) -> Iterator[nn.Module]:
        yield from (*self.detector, self.curve)

    def forward(self, infrared: Tensor, mask: Tensor, curve: Tensor, curve_mask: Tensor) -> tuple[Tensor, Tensor]:
        """infrared: (rows, frames, height, width), curve: (rows, points), both in degrees Celsius."""
        frames = self._normal(infrared)[:, :, None]
        for convolution in self.detector:
            frames = convolution(frames, mask)
        spots = self.project(self.spots(frames.flatten(0, 1)).unflatten(0, mask.shape))
        cooled = self.curve(self._normal(curve), curve_mask)
        tokens = torch.cat([spots + positions(spots.size(1), spots.size(2), spots), cooled[:, None]], dim=1)
        return tokens, torch.cat([mask, curve_mask.any(dim=1, keepdim=True)], dim=1)

    def _normal(self, celsius: Tensor) -> Tensor:
        return (celsius.to(self.dtype) - self.center) / self.scale


class CoolingCurve(nn.Module):
    """MLP of each point (its temperature, its change, its time), the mean over the points that count, another MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.point_up, self.point_down = nn.Linear(3, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, curve: Tensor, mask: Tensor) -> Tensor:
        """curve: (rows, points). mask: bool (rows, points). Returns (rows, width)."""
        curve = without_padding(curve, mask)
        change = functional.pad((curve[:, 1:] - curve[:, :-1]) * mask[:, 1:], (1, 0))
        when = torch.log1p(torch.arange(curve.size(1), device=curve.device)).to(curve.dtype).expand_as(curve)
        points = functional.gelu(self.point_up(torch.stack([curve, change, when], dim=-1)))
        points = without_padding(functional.gelu(self.point_down(points)), mask)
        mean = points.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return self.down(functional.gelu(self.up(mean.to(self.up.weight.dtype))))


class KinematicsBranch(Branch):
    """Time series of accelerations and rates: neighbouring points make a token, a transformer reads the tokens."""

    inputs = ("kinematics",)

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.project = nn.Conv1d(config.kinematics_channels, config.hidden_size, config.patch, stride=config.patch)
        self.layers = transformer(config)

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.layers

    def forward(self, kinematics: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """kinematics: (rows, time, channels). mask: bool (rows, time). The last token may hold fewer points."""
        series = without_padding(kinematics.to(self.dtype), mask)
        missing = -series.size(1) % self.patch
        tokens = self.project(functional.pad(series, (0, 0, 0, missing)).transpose(1, 2)).transpose(1, 2)
        mask = _any_of_patch(functional.pad(mask.to(series.dtype), (0, missing)), self.patch)
        return attended(self.layers, tokens, mask), mask


def _any_of_patch(mask: Tensor, patch: int) -> Tensor:
    """mask: 0 or 1, (rows, time), not bool: inductor writes C++ for the padding of one that does not compile. Returns
    bool (rows, time / patch)."""
    return mask.unflatten(1, (-1, patch)).amax(dim=-1) > 0


GRID = 4
"""A frame is pooled to so many cells each way: where something is stays known."""

BRANCHES: dict[str, type[Branch]] = {
    "visible": VisibleBranch,
    "infrared": InfraredBranch,
    "kinematics": KinematicsBranch,
}


def transformer(config: TridentConfig, layers: int | None = None) -> nn.ModuleList:
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.dropout)
    return nn.ModuleList(TransformerLayer(*sizes) for _ in range(layers or config.num_hidden_layers))


def attended(layers: nn.ModuleList, tokens: Tensor, mask: Tensor) -> Tensor:
    tokens = tokens + positions(tokens.size(1), tokens.size(2), tokens)
    for layer in layers:
        tokens = layer(tokens, at_least_one(mask))
    return tokens
