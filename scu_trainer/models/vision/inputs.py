"""Process pixels between the batch and the model: normalize them always, and augment them at random in training.

Batches hold uint8, a quarter of the bytes of float32. The rest happens on the model's device, in a forward pre-hook
that is not a module, so a saved model is a stock one; float batches pass unchanged. Augmentation uses torch's random
numbers, which the training step seeds for every micro-batch: a micro-batch that runs again, after running out of memory
or in a resumed run, sees the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy
import torch
from torch import nn

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    import PIL.Image
    from transformers import BaseImageProcessor

RESIZED_CROP_FROM = 96
"""Least pixels per side for random resized crops, as is usual for photographs; smaller images are only shifted."""

SIDE_OF_PROBES = 64
"""Pixels per side of the images with which a processor is probed."""

STEPS_OF_A_BYTE = 1.01
"""Largest difference, in steps of a byte, that rounding to bytes before normalizing can make; 0.01 is for float32."""


class PixelInputs:
    """Forward pre-hook that turns uint8 ``pixel_values`` into what the model's image processor would make of them.

    It takes (rows, channels, height, width) and returns the dtype of the model's weights. ``augmentation`` acts on
    values from 0 to 1, which are then normalized with ``mean`` and ``deviation`` of each channel.
    """

    def __init__(
        self, mean: Sequence[float], deviation: Sequence[float], augmentation: Optional[nn.Module] = None
    ) -> None:
        self.mean, self.deviation, self.augmentation = list(mean), list(deviation), augmentation

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Optional[tuple[tuple, dict]]:
        pixels = args[0] if args else kwargs.get("pixel_values")
        if pixels is None or pixels.dtype != torch.uint8:
            return None
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        ready = self.ready(pixels, model.training, dtype)
        return ((ready, *args[1:]), kwargs) if args else (args, {**kwargs, "pixel_values": ready})

    @torch.compiler.disable  # random parameters are drawn on the CPU, so compiling gains nothing
    @torch.no_grad()
    def ready(self, pixels: torch.Tensor, training: bool, dtype: torch.dtype) -> torch.Tensor:
        """Return normalized uint8 ``pixels`` in ``dtype``, augmented if ``training``."""
        with torch.autocast(pixels.device.type, enabled=False):  # coordinates in bfloat16 would be off by pixels
            if training and self.augmentation is not None:
                values = self.augmentation(pixels.float() / 255)
            else:
                values = pixels.float() * (1 / 255)
            mean, deviation = (
                torch.tensor(numbers, device=pixels.device).view(-1, 1, 1) for numbers in (self.mean, self.deviation)
            )
            return ((values - mean) / deviation).to(dtype)


def pixel_inputs(processor: BaseImageProcessor, channels: int, augmentation: Optional[nn.Module] = None) -> PixelInputs:
    """Return the hook that normalizes like ``processor``, by processing a black and a white image: families differ in
    more than ``image_mean`` and ``image_std``. Raises ModelError if both images give the same values."""
    black, white = (_processed_color(processor, channels, value) for value in (0, 255))
    contrast = white - black
    if not contrast.all():
        raise ModelError(f"the image processor {type(processor).__name__} gives black and white the same values")
    return PixelInputs((-black / contrast).tolist(), (1 / contrast).tolist(), augmentation)


def _processed_color(processor: BaseImageProcessor, channels: int, value: int) -> numpy.ndarray:
    """Process an image of one color and return float64 (channels,) from its middle, where there is no padding."""
    import PIL.Image

    image = PIL.Image.new("RGB" if channels == 3 else "L", (SIDE_OF_PROBES, SIDE_OF_PROBES), (value,) * channels)
    processed = numpy.asarray(processor(image)["pixel_values"][0], dtype=numpy.float64)
    return processed[:, processed.shape[1] // 2, processed.shape[2] // 2]


def require_stock_pixels(
    processor: BaseImageProcessor, channels: int, bytes_of: Callable[[PIL.Image.Image], numpy.ndarray]
) -> None:
    """Raise ModelError if our processing of a random image differs from ``processor`` by more than one step of a byte.
    ``bytes_of`` turns an image into uint8 (channels, height, width), which our hook then normalizes."""
    import PIL.Image

    shape = (SIDE_OF_PROBES, SIDE_OF_PROBES) + ((3,) if channels == 3 else ())
    image = PIL.Image.fromarray(numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8))
    # Copied to float32 in C order, because torch rejects reversed views such as MobileViT's, which has blue first.
    wanted = torch.from_numpy(numpy.array(processor(image)["pixel_values"][0], dtype=numpy.float32, order="C"))
    inputs = pixel_inputs(processor, channels)
    found = inputs.ready(torch.from_numpy(bytes_of(image))[None], False, torch.float32)[0]
    step = 1 / 255 / torch.tensor(inputs.deviation).abs().view(-1, 1, 1)
    if found.shape != wanted.shape or bool(((found - wanted).abs() > STEPS_OF_A_BYTE * step).any()):
        raise ModelError(
            f"the image processor {type(processor).__name__} does more to pixels than scale each channel, which "
            f"cannot be repeated on the device; give the model another processor, for instance ViTImageProcessor"
        )


def attached(model: nn.Module) -> Optional[PixelInputs]:
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, PixelInputs)), None)


def process_images_for(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` with bytes processed as by ``model``, with augmentation drawn once for several models."""
    hook = attached(model)
    processed = None if hook is None else hook(model, (), dict(inputs))
    return dict(inputs) if processed is None else processed[1]


def attach(model: nn.Module, inputs: PixelInputs) -> None:
    """Register the hook ``inputs`` on ``model``, replacing any earlier one."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PixelInputs):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    model.register_forward_pre_hook(inputs, with_kwargs=True)


def augmentation(name: str, size: tuple[int, int]) -> Optional[nn.Module]:
    """Return the augmentation ``name`` of float images (rows, channels, *size), by kornia; None for "none". Each row
    draws its own changes. ``light`` never mirrors, because a mirrored 2 is not a digit."""
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
    # Slicing is exact here; interpolation would only copy the same pixels, at twice the cost.
    return kornia.RandomCrop(size, padding=max(1, min(size) // 8), cropping_mode="slice")
