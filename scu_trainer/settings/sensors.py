"""Recordings of several sensors, and the size of the model that classifies them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Optional, Union

from scu_trainer.errors import nearest
from scu_trainer.settings.base import Allowed, check_fields, option, require

BRANCHES = {
    "visible": ("visible",),
    "infrared": ("infrared", "cooling_curve"),
    "kinematics": ("kinematics",),
    "dual_vision": ("visible", "infrared"),
    "plume": ("plume",),
    "cooling": ("cooling_curve",),
    "geometry": ("geometry",),
}
"""Arrays of a recording that each branch reads; in the order of the columns of a branch mask."""

DEFAULT_BRANCHES = ("visible", "infrared", "kinematics")

FUSION = "fusion"
"""Stands beside the branches where parts of the model are named."""

WITH_TRANSFORMER = ("visible", "kinematics", FUSION)
"""Parts whose linear layers adapters go on, and that 4 or 8 bits may hold."""

SYNTHETIC = "synthetic_sensors"

DEFAULTS: dict[str, Any] = {
    "dataset": SYNTHETIC,
    "tuning": "full",
    "validation_split_percentage": 20.0,
    "output_dir": "runs/sensors",
    "keep_freed_memory": True,
}

SIZES = ("hidden_size", "layers", "fusion_layers", "heads", "channels", "patch", "samples")
ALLOWED = {
    "num_classes": Allowed(least=2),
    **dict.fromkeys((f"sensor_{name}" for name in SIZES), Allowed(least=1)),
    "sensor_missing_share": Allowed(below=1),
    "sensor_dropout": Allowed(below=1),
    "report_weight": Allowed(above=0),
}


@dataclass(frozen=True)
class SensorSettings:
    """Which recordings, which of their branches, and how large the model is."""

    synthetic: bool = option(
        False,
        f"train on generated recordings whose class no single branch can determine; the same as dataset: {SYNTHETIC}",
    )
    num_classes: Optional[int] = option(
        None, "number of classes; default: those found in the manifest, 9 for synthetic recordings (a square number)"
    )
    branches: Optional[list[str]] = option(
        None,
        f"the inputs that the model uses, of {', '.join(BRANCHES)}; default: {', '.join(DEFAULT_BRANCHES)}, or "
        "those of the trained model",
    )
    sensor_samples: int = option(1500, "synthetic recordings that are generated, before the split")
    sensor_missing_share: float = option(0.1, "synthetic recordings: share that lacks one of its branches")
    sensor_hidden_size: int = option(64, "width of the transformers")
    sensor_layers: int = option(2, "transformer layers of the visible and of the kinematics branch")
    sensor_fusion_layers: int = option(2, "cross-attention layers that join the branches")
    sensor_heads: int = option(4, "attention heads")
    sensor_channels: int = option(16, "channels of the first convolution of a branch that looks at frames")
    sensor_patch: int = option(4, "kinematics: points in time per token")
    sensor_dropout: float = option(0.0, "dropout inside the transformers")
    report_head: bool = option(
        False, "also learn to write the short report of each recording; a trained model keeps its head"
    )
    report_weight: Optional[float] = option(
        None,
        "weight of the report's loss (nats per word) relative to the loss of the class; default: 1, or "
        "the trained model's",
    )
    checkpoint_branches: Optional[list[str]] = option(
        None, "branches (and fusion) whose blocks keep only their inputs and recompute the rest in the backward pass"
    )
    frozen_branches: Optional[list[str]] = option(
        None, "tuning: full: branches (and fusion) of a trained model that stay as they are"
    )
    quantized_branches: Optional[list[str]] = option(
        None,
        "tuning: qlora: parts whose transformer blocks are stored in 4 or 8 bits, of "
        f"{', '.join(WITH_TRANSFORMER)}; default: all that the model has",
    )
    branch_devices: Optional[Union[dict, str]] = option(
        None, 'branches to store and compute on a separate device, for instance {"geometry": "cpu"}'
    )
    offload_linears_mb: Optional[float] = option(
        None,
        "tuning: lora: keep frozen linear layers of at least this many MiB in main memory, or in "
        "offload_linears_folder, and fetch them when they run",
    )
    offload_linears_folder: Optional[str] = option(None, "folder on a fast disk for the offloaded linear layers")

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)
        wanted = DEFAULT_BRANCHES if self.branches is None else self.branches
        object.__setattr__(self, "branches", _ordered("branches", wanted, tuple(BRANCHES)))
        parts = (*BRANCHES, FUSION)
        allowed = {"checkpoint_branches": parts, "frozen_branches": parts, "quantized_branches": WITH_TRANSFORMER}
        for name, names in allowed.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _ordered(name, getattr(self, name), names))
        object.__setattr__(self, "branch_devices", _devices(self.branch_devices))
        if self.branches != list(DEFAULT_BRANCHES):  # else a trained model may bring its own
            self.check_parts()
        width, heads = self.sensor_hidden_size, self.sensor_heads
        require(
            width % (2 * heads) == 0,
            f"sensor_hidden_size {width} must be a multiple of twice sensor_heads ({heads}); "
            f"for instance {max(1, width // (2 * heads)) * 2 * heads}",
        )
        require(
            self.offload_linears_folder is None or self.offload_linears_mb is not None,
            "offload_linears_folder is where offload_linears_mb puts linear layers, and that is not set; "
            "add offload_linears_mb, for instance 16",
        )

    def check_parts(self) -> None:
        """Raise SettingsError where a list names a branch that is none of ``branches``."""
        there = (*(self.branches or ()), FUSION)
        for name in ("checkpoint_branches", "frozen_branches", "quantized_branches", "branch_devices"):
            for part in getattr(self, name) or ():
                require(part in there, f"{name} has {part!r}, and the model has {', '.join(there)}; drop {part}")


def _devices(given: Any) -> Optional[dict[str, str]]:
    """As a file gives them, or as JSON of a flag."""
    if given is None:
        return None
    example = 'give something like {"geometry": "cpu"}'
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = given
    require(isinstance(found, dict) and bool(found), f"branch_devices is {given!r}; {example}")
    for branch, device in found.items():
        _ordered("branch_devices", branch, tuple(BRANCHES))
        require(isinstance(device, str), f"branch_devices has {device!r} for {branch}; {example}")
    return found


def _ordered(name: str, found: Any, allowed: tuple[str, ...]) -> list[str]:
    """``found`` in the order of ``allowed``, each once."""
    found = [found] if isinstance(found, str) else list(found)
    for item in found:
        require(item in allowed, f"{name} has {item!r}; allowed: {', '.join(allowed)}{nearest(str(item), allowed)}")
    require(bool(found), f"{name} is empty; give at least one of {', '.join(allowed)}")
    require(len(set(found)) == len(found), f"{name} names a branch twice: {', '.join(found)}")
    return [item for item in allowed if item in found]


MODES: dict[str, dict[str, Any]] = {
    "tiny": {
        "sensor_samples": 300,
        "dataset_size": 300,
        "sensor_hidden_size": 32,
        "sensor_layers": 1,
        "sensor_fusion_layers": 1,
        "sensor_channels": 8,
        "num_train_epochs": 1.0,
        "max_steps": -1,
    },
    "standard": {
        "sensor_samples": 1500,
        "dataset_size": None,
        "sensor_hidden_size": 64,
        "sensor_layers": 2,
        "sensor_fusion_layers": 2,
        "sensor_channels": 16,
        "num_train_epochs": 3.0,
        "max_steps": -1,
    },
    "extended": {
        "sensor_samples": 6000,
        "dataset_size": None,
        "sensor_hidden_size": 128,
        "sensor_layers": 4,
        "sensor_fusion_layers": 4,
        "sensor_channels": 32,
        "num_train_epochs": 20.0,
        "max_steps": -1,
    },
}
"""Groups of values under one name; ``max_steps`` of -1 lets the epochs count, ``dataset_size`` None is all recordings.
The sizes are those of a model from scratch: a loaded one keeps its own."""
