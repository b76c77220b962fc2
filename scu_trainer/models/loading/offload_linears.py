"""Keep large frozen linear layers in main memory or on disk, and fetch each one whenever it runs.

This is for models where ``device_map`` would offload whole blocks, with convolutions and heads that are trained.
accelerate's hooks fetch a layer; ``offloaded.py`` adds adapters to offloaded weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from scu_trainer.models.loading.offload_folder import OffloadFolder
from scu_trainer.run_files import require_room

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Offloaded:
    """``names`` of the offloaded layers, the bytes of their weights, and their ``place`` ("cpu" or "disk")."""

    names: tuple[str, ...]
    weight_bytes: int
    place: str

    def line(self, checkpoints: bool) -> str:
        """Return the log line about them; ``checkpoints`` is whether ``checkpoint_every_layer`` is on."""
        where = "on disk" if self.place == "disk" else "in main memory"
        hint = "" if checkpoints else "; without checkpoint_every_layer: true they are kept from forward to backward"
        return f"offloaded: {len(self.names)} linear layers, {self.weight_bytes / 2**20:,.1f} MiB {where}{hint}"


def offload_linears(
    model: nn.Module,
    names: Iterable[str],
    at_least_bytes: float,
    device: torch.device,
    folder: Optional[str] = None,
) -> Offloaded:
    """Offload those of the layers ``names`` that have ``at_least_bytes`` of weights, and move the rest to ``device``.
    The layers are frozen. With ``folder`` they go to disk, into a private folder that lasts as long as the model;
    otherwise to main memory. Raises StorageError if the disk is too full."""
    modules = dict(model.named_modules())
    chosen = [name for name in names if _bytes_of(modules[name]) >= at_least_bytes]
    weight_bytes = sum(_bytes_of(modules[name]) for name in chosen)
    private_folder = None
    if folder is not None and chosen:
        require_room(folder, weight_bytes, "offload_linears_folder")
        private_folder = OffloadFolder(folder)
    for name in chosen:
        _offload(modules[name], name, device, private_folder)
    move_rest(model, device)
    place = "cpu" if folder is None else "disk"
    if chosen:
        model.offload_folder = private_folder  # keeps the folder until the model is freed
        # With such a map the Trainer and accelerate do not move the model.
        model.hf_device_map = {"": "cpu" if device.type == "cpu" else device, **dict.fromkeys(chosen, place)}
    return Offloaded(tuple(chosen), weight_bytes, place)


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters(recurse=False))


def _offload(linear: nn.Module, name: str, device: torch.device, folder: Optional[OffloadFolder]) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

    linear.requires_grad_(False)
    weights = None
    if folder is not None:
        offload_state_dict(str(folder.path / name), linear.state_dict())
        weights = OffloadedWeightsLoader(save_folder=str(folder.path / name))
    add_hook_to_module(linear, AlignDevicesHook(execution_device=device, offload=True, weights_map=weights))


def move_rest(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that are not on the meta device to ``device``; ``model.to`` would fail on meta tensors."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
