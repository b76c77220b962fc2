"""What happens to pixels between the batch and the model: normalised always, changed at random in training.

Batches carry uint8, a quarter of the bytes; the rest is done where the model is, by a forward pre-hook. It is no
module: a saved model is a stock one, and a batch that is float already passes as it is. In training the random numbers
are torch's, which the training step seeds for every micro-batch: one that runs again after running out of memory, or
in a resumed run, sees the same images.
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
"""Pixels per side from which a random part is enlarged, as is usual for photographs; smaller ones are only shifted."""

SIDE_OF_PROBES = 64
"""Pixels of the images that a processor is asked about."""

STEPS_OF_A_BYTE = 1.01
"""What rounding to bytes before normalising can change, and a little for float32."""


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
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        ready = self.ready(pixels, model.training, dtype)
        return ((ready, *args[1:]), kwargs) if args else (args, {**kwargs, "pixel_values": ready})

    @torch.compiler.disable  # random parameters are drawn on the CPU: nothing to gain from compiling them
    @torch.no_grad()
    def ready(self, pixels: torch.Tensor, training: bool, dtype: torch.dtype) -> torch.Tensor:
        """Of uint8 ``pixels``, in ``dtype``; changed at random if ``training``."""
        with torch.autocast(pixels.device.type, enabled=False):  # coordinates in bfloat16 would be pixels off
            if training and self.augmentation is not None:
                values = self.augmentation(pixels.float() / 255) * (255 * self.scale)
            else:
                values = pixels.float() * self.scale
            mean, deviation = (
                torch.tensor(numbers, device=pixels.device).view(-1, 1, 1) for numbers in (self.mean, self.deviation)
            )
            return ((values - mean) / deviation).to(dtype)


def pixel_inputs(processor: BaseImageProcessor, channels: int, augmentation: Optional[nn.Module] = None) -> PixelInputs:
    """What ``processor`` does to the values of pixels, read off what it makes of a black and of a white image: families
    differ in more than ``image_mean`` and ``image_std``. Raises ModelError where it makes the same of both."""
    black, white = (_made_of(processor, channels, value) for value in (0, 255))
    contrast = white - black
    if not contrast.all():
        raise ModelError(f"the image processor {type(processor).__name__} makes the same of black and white images")
    return PixelInputs((-black / contrast).tolist(), (1 / contrast).tolist(), 1 / 255, augmentation)


def _made_of(processor: BaseImageProcessor, channels: int, value: int) -> numpy.ndarray:
    """Of an image of one colour: float64 (channels,), in its middle, where no padding is."""
    import PIL.Image

    image = PIL.Image.new("RGB" if channels == 3 else "L", (SIDE_OF_PROBES, SIDE_OF_PROBES), (value,) * channels)
    made = numpy.asarray(processor(image)["pixel_values"][0], dtype=numpy.float64)
    return made[:, made.shape[1] // 2, made.shape[2] // 2]


def require_stock_pixels(
    processor: BaseImageProcessor, channels: int, bytes_of: Callable[[PIL.Image.Image], numpy.ndarray]
) -> None:
    """Raise ModelError where a random image by way of ``bytes_of``, uint8 (channels, height, width), is further than
    one step of a byte from what ``processor`` makes of it."""
    import PIL.Image

    shape = (SIDE_OF_PROBES, SIDE_OF_PROBES) + ((3,) if channels == 3 else ())
    image = PIL.Image.fromarray(numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8))
    # Of float32 right away: torch takes no view that is turned around, as MobileViT's is, with blue first.
    wanted = torch.from_numpy(numpy.array(processor(image)["pixel_values"][0], dtype=numpy.float32, order="C"))
    inputs = pixel_inputs(processor, channels)
    found = inputs.ready(torch.from_numpy(bytes_of(image))[None], False, torch.float32)[0]
    step = inputs.scale / torch.tensor(inputs.deviation).abs().view(-1, 1, 1)
    if found.shape != wanted.shape or bool(((found - wanted).abs() > STEPS_OF_A_BYTE * step).any()):
        raise ModelError(
            f"the image processor {type(processor).__name__} does more to pixels than scale each channel, which "
            f"cannot be repeated on the device; give the model with another processor, for instance ViTImageProcessor"
        )


def attached(model: nn.Module) -> Optional[PixelInputs]:
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, PixelInputs)), None)


def as_seen_by(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the images that ``model`` would make of their bytes, drawn once: for several models alike."""
    hook = attached(model)
    made = None if hook is None else hook(model, (), dict(inputs))
    return dict(inputs) if made is None else made[1]


def attach(model: nn.Module, inputs: PixelInputs) -> None:
    """Register ``inputs`` on ``model``, in place of one that it has."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PixelInputs):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    model.register_forward_pre_hook(inputs, with_kwargs=True)


def augmentation(name: str, size: tuple[int, int]) -> Optional[nn.Module]:
    """Random changes of float images (rows, channels, height, width) of ``size``, by kornia; None for "none".

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
