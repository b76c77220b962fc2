"""What happens to pixels between the batch and the model: normalised always, changed at random in training.

Batches carry uint8, a quarter of the bytes; the rest is done where the model is, by a forward pre-hook. It is no
module: a saved model is a stock one, and a batch that is float already passes as it is. In training the random numbers
are torch's, which the training step seeds for every chunk: a chunk that runs again after running out of memory, or in a
resumed run, sees the same pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import nn

RESIZED_CROP_FROM = 96
"""Pixels per side from which a random part is enlarged, as is usual for photographs; smaller ones are only shifted."""


class PixelInputs:
    """Forward pre-hook for models that take ``pixel_values``: uint8 (rows, channels, height, width) becomes what the
    model's image processor makes of it, in the type of the model's weights.

    ``mean``, ``deviation``: per channel, of values ``scale`` times a byte. ``augmentation`` acts on values from 0 to 1.
    """

    def __init__(
        self, mean: Sequence[float], deviation: Sequence[float], scale: float, augmentation: Optional[nn.Module] = None
    ) -> None:
        self.mean, self.deviation, self.scale = list(mean), list(deviation), scale
        self.augmentation = augmentation

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Optional[tuple[tuple, dict]]:
        pixels = args[0] if args else kwargs.get("pixel_values")
        if pixels is None or pixels.dtype != torch.uint8:
            return None
        ready = self._ready(pixels, model.training, _weights_type(model))
        return ((ready, *args[1:]), kwargs) if args else (args, {**kwargs, "pixel_values": ready})

    @torch.compiler.disable  # random parameters are drawn on the CPU: nothing to gain from compiling them
    @torch.no_grad()
    def _ready(self, pixels: torch.Tensor, training: bool, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast(pixels.device.type, enabled=False):  # coordinates in bfloat16 would be pixels off
            if training and self.augmentation is not None:
                values = self.augmentation(pixels.float() / 255) * (255 * self.scale)
            else:
                values = pixels.float() * self.scale
            mean, deviation = (
                torch.tensor(numbers, device=pixels.device).view(-1, 1, 1) for numbers in (self.mean, self.deviation)
            )
            return ((values - mean) / deviation).to(dtype)


def _weights_type(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def attach(model: nn.Module, inputs: PixelInputs) -> None:
    """Register ``inputs`` on ``model``, in place of one that it has."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PixelInputs):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    model.register_forward_pre_hook(inputs, with_kwargs=True)


def augmentation(name: str, size: tuple[int, int]) -> Optional[nn.Module]:
    """Random changes of float pictures (rows, channels, height, width) of ``size``, by kornia; None for "none".

    Each row draws its own. ``light`` never mirrors: a mirrored 2 is no digit.
    """
    if name == "none":
        return None
    import kornia.augmentation as kornia

    if name == "light":
        return nn.Sequential(kornia.RandomAffine(degrees=10.0, translate=(0.1, 0.1), scale=(0.9, 1.1)))
    changes: list[nn.Module] = [_crop(size), kornia.RandomHorizontalFlip()]
    if name == "strong":
        changes += [kornia.ColorJiggle(0.3, 0.3, 0.3, 0.05, p=0.8), kornia.RandomErasing(scale=(0.02, 0.25), p=0.5)]
    return nn.Sequential(*changes)


def _crop(size: tuple[int, int]) -> nn.Module:
    import kornia.augmentation as kornia

    if min(size) >= RESIZED_CROP_FROM:
        return kornia.RandomResizedCrop(size, scale=(0.25, 1.0))
    # Cut out by slicing the interpolation would only copy pixels, at twice the price.
    return kornia.RandomCrop(size, padding=max(1, min(size) // 8), cropping_mode="slice")
