"""The branches of TRIDENT: each turns its inputs into tokens of the same width, and a mask of the tokens that count.

This file is saved with each model, so it imports nothing from this project.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from .configuration_trident import TridentConfig
from .trident_layers import FrameConvolution, HotSpots, TransformerLayer, at_least_one, positions, without_padding


class Branch(nn.Module):
    """Base class: ``forward`` returns tokens (rows, tokens, width) and bool (rows, tokens), True if a token counts."""

    inputs: tuple[str, ...] = ()
    """Names of the inputs in a batch; ``forward`` takes each one followed by its mask."""

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the parts that activation checkpointing may recompute in backward."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class VisibleBranch(Branch):
    """Video: a small 3D CNN for motion between frames, then a transformer over frames."""

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
        return attended(self.layers, self.project(_pooled(frames)), mask), mask


class ThermalBranch(Branch):
    """Base class of branches that read temperatures in degrees Celsius, which it normalizes."""

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        self.center, self.scale = config.infrared_center, config.infrared_scale

    def _normal(self, celsius: Tensor) -> Tensor:
        return (celsius.to(self.dtype) - self.center) / self.scale


class DetectingBranch(ThermalBranch):
    """Base class of branches with a CNN that finds hot spots: one token per frame, which has ``channels`` channels."""

    channels = 1

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        sizes = (self.channels, config.stem_channels, 2 * config.stem_channels)
        self.detector = nn.ModuleList([FrameConvolution(*pair, time=1) for pair in itertools.pairwise(sizes)])
        self.spots = HotSpots(sizes[-1])
        self.project = nn.Linear(self.spots.features, config.hidden_size)

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.detector

    def _detected(self, frames: Tensor, mask: Tensor) -> Tensor:
        """frames: (rows, frames, channels, height, width). Returns (rows, frames, width)."""
        for convolution in self.detector:
            frames = convolution(frames, mask)
        return placed(self.project(self.spots(frames.flatten(0, 1)).unflatten(0, mask.shape)))


class InfraredBranch(DetectingBranch):
    """Thermal video and cooling curve: a detection CNN finds hot spots in each frame, and an MLP reads the curve."""

    inputs = ("infrared", "cooling_curve")

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        self.curve = CoolingCurve(config.hidden_size)

    def blocks(self) -> Iterator[nn.Module]:
        yield from (*self.detector, self.curve)

    def forward(self, infrared: Tensor, mask: Tensor, curve: Tensor, curve_mask: Tensor) -> tuple[Tensor, Tensor]:
        """infrared: (rows, frames, height, width), curve: (rows, points), both in degrees Celsius."""
        spots = self._detected(self._normal(infrared)[:, :, None], mask)
        cooled = self.curve(self._normal(curve), curve_mask)
        return torch.cat([spots, cooled[:, None]], dim=1), torch.cat([mask, curve_mask.any(dim=1, keepdim=True)], dim=1)


class DualVisionBranch(DetectingBranch):
    """Both cameras together: a detection CNN reads visible and infrared frames of the same moment as channels. A frame
    counts if the recording has both."""

    inputs = ("visible", "infrared")
    channels = 4

    def forward(
        self, visible: Tensor, visible_mask: Tensor, infrared: Tensor, infrared_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """visible: (rows, frames, 3, height, width), 0 to 255. infrared: (rows, other frames, other height, other
        width) in degrees Celsius, resized to the visible frames. Returns one token per infrared frame."""
        mask = infrared_mask & visible_mask.any(dim=1, keepdim=True)
        colours = _matching_frames(visible, visible_mask, infrared_mask).to(self.dtype) / 127.5 - 1
        heat = functional.interpolate(self._normal(infrared), colours.shape[-2:], mode="bilinear")
        return self._detected(torch.cat([colours, heat[:, :, None]], dim=2), mask), mask


class PlumeBranch(ThermalBranch):
    """A crop of thermal video around the plume, in full resolution: a deeper CNN over each frame."""

    inputs = ("plume",)

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        channels = (1, config.stem_channels, 2 * config.stem_channels, 2 * config.stem_channels)
        self.stem = nn.ModuleList([FrameConvolution(*sizes, time=1) for sizes in itertools.pairwise(channels)])
        self.project = nn.Linear(GRID * GRID * channels[-1], config.hidden_size)

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.stem

    def forward(self, plume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """plume: (rows, frames, height, width) in degrees Celsius. mask: bool (rows, frames)."""
        frames = self._normal(plume)[:, :, None]
        for convolution in self.stem:
            frames = convolution(frames, mask)
        return placed(self.project(_pooled(frames))), mask


class CoolingBranch(ThermalBranch):
    """The cooling curve only, as one token."""

    inputs = ("cooling_curve",)

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        self.curve = CoolingCurve(config.hidden_size)

    def blocks(self) -> Iterator[nn.Module]:
        yield self.curve

    def forward(self, curve: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """curve: (rows, points) in degrees Celsius. mask: bool (rows, points)."""
        return self.curve(self._normal(curve), mask)[:, None], mask.any(dim=1, keepdim=True)


class CoolingCurve(nn.Module):
    """An MLP on each point (temperature, change, time), the mean over the points that count, and another MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.point_up, self.point_down = nn.Linear(3, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, curve: Tensor, mask: Tensor) -> Tensor:
        """curve: (rows, points). mask: bool (rows, points). Returns (rows, width)."""
        curve = without_padding(curve, mask)
        change = functional.pad((curve[:, 1:] - curve[:, :-1]) * mask[:, 1:], (1, 0))
        log_time = torch.log1p(torch.arange(curve.size(1), device=curve.device)).to(curve.dtype).expand_as(curve)
        points = functional.gelu(self.point_up(torch.stack([curve, change, log_time], dim=-1)))
        points = without_padding(functional.gelu(self.point_down(points)), mask)
        mean = points.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return self.down(functional.gelu(self.up(mean.to(self.up.weight.dtype))))


class KinematicsBranch(Branch):
    """Time series of accelerations and rates: neighbouring points form a token, and a transformer reads the tokens."""

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


class GeometryBranch(Branch):
    """An MLP over a few numbers, such as range, azimuth, elevation and speed: one token per set. The inverse hyperbolic
    sine (Johnson 1949) brings metres and radians to similar scales: linear near zero, logarithmic for large numbers."""

    inputs = ("geometry",)

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.geometry_channels, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def blocks(self) -> Iterator[nn.Module]:
        yield from (self.up, self.down)

    def forward(self, geometry: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """geometry: (rows, sets, numbers), in any units that all recordings share. mask: bool (rows, sets)."""
        numbers = without_padding(geometry, mask).asinh().to(self.dtype)
        return self.down(functional.gelu(self.up(numbers))), mask


def _matching_frames(frames: Tensor, mask: Tensor, other_mask: Tensor) -> Tensor:
    """Return, for each frame of another camera, the one of ``frames`` (rows, frames, ...) at the same moment. Both
    cameras record the same time span, at different frame rates; padding is on the right."""
    counts, other_counts = mask.sum(dim=1, keepdim=True), other_mask.sum(dim=1, keepdim=True).clamp(min=1)
    indices = torch.arange(other_mask.size(1), device=mask.device)[None] * counts // other_counts
    rows = torch.arange(len(frames), device=mask.device)[:, None]
    return frames[rows, indices.clamp(max=frames.size(1) - 1)]


def _pooled(frames: Tensor) -> Tensor:
    """(rows, frames, channels, height, width) -> (rows, frames, GRID * GRID * channels)."""
    return functional.adaptive_avg_pool2d(frames.flatten(0, 1), GRID).flatten(1).unflatten(0, frames.shape[:2])


def placed(tokens: Tensor) -> Tensor:
    """Return ``tokens`` (rows, time, width) with their position encodings added."""
    return tokens + positions(tokens.size(1), tokens.size(2), tokens)


def _any_of_patch(mask: Tensor, patch: int) -> Tensor:
    """Return bool (rows, time / patch): True if any point of a patch counts. mask: 0 or 1, (rows, time). It is not
    bool, because inductor's C++ for padding a bool tensor does not compile."""
    return mask.unflatten(1, (-1, patch)).amax(dim=-1) > 0


GRID = 4
"""Frames are pooled to GRID x GRID cells, which keeps the rough position of objects."""

BRANCHES: dict[str, type[Branch]] = {
    "visible": VisibleBranch,
    "infrared": InfraredBranch,
    "kinematics": KinematicsBranch,
    "dual_vision": DualVisionBranch,
    "plume": PlumeBranch,
    "cooling": CoolingBranch,
    "geometry": GeometryBranch,
}


def transformer(config: TridentConfig, layers: int | None = None) -> nn.ModuleList:
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.dropout)
    return nn.ModuleList(TransformerLayer(*sizes) for _ in range(layers or config.num_hidden_layers))


def attended(layers: nn.ModuleList, tokens: Tensor, mask: Tensor) -> Tensor:
    tokens = placed(tokens)
    for layer in layers:
        tokens = layer(tokens, at_least_one(mask))
    return tokens
