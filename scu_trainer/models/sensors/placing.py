"""Put branches of TRIDENT on different devices; accelerate's hooks move their inputs there and their tokens back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from scu_trainer.models.loading.offload_linears import move_rest
from scu_trainer.models.sensors.modeling_trident import TridentForSensorClassification

COMPUTES = ("cpu", "cuda")


def device_refusal(name: str) -> Optional[str]:
    """Return why branches cannot be on the device ``name``; None if they can."""
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        return f"{name!r} is not a device; give cpu, cuda or cuda:1"
    if device.type == "meta":
        return "the meta device holds shapes without values, so nothing can be computed there; give cpu or cuda"
    if device.type not in COMPUTES:
        return f"branches can be on the CPU or on CUDA GPUs, but {name} is neither; give cpu or cuda"
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} GPU{'s are' if count != 1 else ' is'}" if count else "no GPU is"
        return f"{found} here for {name}; give cpu{f', or cuda:0 to cuda:{count - 1}' if count else ''}"
    return None


def place_branches(model: TridentForSensorClassification, devices: Mapping[str, str], main: torch.device) -> str:
    """Put branches on ``devices``, which must pass ``device_refusal``, and the rest on ``main``; return a log line."""
    move_rest(model, main)
    # With such a map the Trainer and accelerate do not move the model. Its values are devices and not names, because
    # "cpu" would mean offloaded weights.
    model.hf_device_map = {"": main}
    for name, device in devices.items():
        hook = AlignDevicesHook(execution_device=torch.device(device), io_same_device=True, place_submodules=True)
        add_hook_to_module(model.trident.branches[name], hook)
        model.hf_device_map[f"trident.branches.{name}"] = torch.device(device)
    return f"branches: {', '.join(f'{name} on {device}' for name, device in devices.items())}; all else on {main}"
