"""Store images and convolution filters in channels_last layout, which tensor cores and oneDNN read directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


def apply_channels_last(model: nn.Module) -> int:
    """Put the filters of all 2D and 3D convolutions into channels_last layout, and images as they enter the model. The
    layout changes no values: results are equal up to rounding, and names and saved files do not change. Videos get the
    layout from the first convolution that they reach. Returns the number of convolutions; 0 if nothing changed."""
    found = [(module, layout) for module in model.modules() if (layout := _layout(module)) is not None]
    for module, layout in found:
        module.to(memory_format=layout)
        module.register_state_dict_post_hook(_make_contiguous)
    if any(layout is torch.channels_last for _, layout in found):
        model.register_forward_pre_hook(_images_to_channels_last, with_kwargs=True)
    return len(found)


def _layout(module: nn.Module) -> torch.memory_format | None:
    return next((layout for kind, layout in FORMATS.items() if isinstance(module, kind)), None)


def _images_to_channels_last(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tuple(map(_to_channels_last, inputs)), {name: _to_channels_last(value) for name, value in named.items()}


def _to_channels_last(value: Any) -> Any:
    is_image = torch.is_tensor(value) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def _make_contiguous(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State dict hook that makes the weights contiguous, because safetensors can save no other layout."""
    for name in [name for name, _ in module.named_parameters(recurse=False) if prefix + name in state]:
        state[prefix + name] = state[prefix + name].contiguous()
