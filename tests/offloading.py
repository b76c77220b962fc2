"""A model whose layers lie partly on disk, loaded as ``train`` loads it, and the same model in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch

from scu_trainer.models.loading.dispatch import FreeMemory, Placement
from scu_trainer.models.loading.load import load_model, plan_placement, prepare_for_tuning
from scu_trainer.settings import MemorySettings, ModelSettings

ENOUGH = FreeMemory((), 2**34)


def saved(model, folder: Path) -> Path:
    """Files of at most 20 KB, as large models come in several."""
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.6f}MiB"


def settings_of(folder: Path, **changes) -> ModelSettings:
    given = {"lora_r": 4, "lora_dropout": 0.1, "device_map": "auto", **changes}
    return ModelSettings(model_name_or_path=str(folder), **given)


def planned(folder: Path, share: float, free: FreeMemory = ENOUGH, **changes) -> Optional[Placement]:
    """``share`` of the weights may lie in main memory."""
    limits = MemorySettings(cpu_mem=mebibytes(share * size_bytes(folder)), offload_folder=str(folder / "offload"))
    return plan_placement(settings_of(folder, **changes), limits, free, device=torch.device("cpu"))


def with_adapters(folder: Path, share: Optional[float], seed: int = 1, name: Optional[Path] = None):
    """``share`` None: all weights in main memory. ``name``: an adapter of the model in ``folder``, to go on with."""
    placement = None if share is None else planned(folder, share)
    settings = settings_of(name or folder)
    model = load_model(settings, placement=placement)
    torch.manual_seed(seed)
    return prepare_for_tuning(model, settings)
