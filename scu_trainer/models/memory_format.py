"""Images and convolution filters with their channels last in memory: the layout that tensor cores and oneDNN read."""

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
    """Give the filters of all convolutions over 2 or 3 dimensions this layout, and images as they enter the model.

    A layout moves no number: results are equal up to rounding, names and saved files are those of before. Videos get
    theirs from the first convolution that meets them. Returns the number of convolutions; 0: nothing was changed.
    """
    found = [(module, layout) for module in model.modules() if (layout := _layout(module)) is not None]
    for module, layout in found:
        module.to(memory_format=layout)
        module.register_state_dict_post_hook(_save_contiguous)
    if any(layout is torch.channels_last for _, layout in found):
        model.register_forward_pre_hook(_images_last, with_kwargs=True)
    return len(found)


def _layout(module: nn.Module) -> torch.memory_format | None:
    return next((layout for kind, layout in FORMATS.items() if isinstance(module, kind)), None)


def _images_last(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tuple(map(_last, inputs)), {name: _last(value) for name, value in named.items()}


def _last(value: Any) -> Any:
    is_image = torch.is_tensor(value) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def _save_contiguous(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """safetensors writes no other layout than the plain one."""
    for name in [name for name, _ in module.named_parameters(recurse=False) if prefix + name in state]:
        state[prefix + name] = state[prefix + name].contiguous()
