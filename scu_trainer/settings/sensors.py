"""Settings of sensor classifiers: recordings, branches, and the size of the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Optional, Union

from scu_trainer.errors import did_you_mean
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
"""Arrays of a recording that each branch reads, in the order of the columns of a branch mask."""

DEFAULT_BRANCHES = ("visible", "infrared", "kinematics")

FUSION = "fusion"
"""Name of the part of the model that joins the branches."""

WITH_TRANSFORMER = ("visible", "kinematics", FUSION)
"""Parts with linear layers that can have adapters or be stored in 4 or 8 bits."""

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
    """The recordings, their branches, and the size of the model."""

    synthetic: bool = option(
        False,
        f"train on generated recordings that need several branches to be classified; the same as dataset: {SYNTHETIC}",
    )
    num_classes: Optional[int] = option(
        None, "number of classes; default: those in the manifest, or 9 for synthetic recordings (a square number)"
    )
    branches: Optional[list[str]] = option(
        None,
        f"branches that the model uses, among {', '.join(BRANCHES)}; default: {', '.join(DEFAULT_BRANCHES)}, or those "
        "of the trained model",
    )
    sensor_samples: int = option(1500, "number of synthetic recordings, before the split")
    sensor_missing_share: float = option(0.1, "synthetic recordings: share of recordings that lack a branch")
    sensor_hidden_size: int = option(64, "width of the transformers")
    sensor_layers: int = option(2, "transformer layers of the visible branch and of the kinematics branch")
    sensor_fusion_layers: int = option(2, "cross-attention layers that join the branches")
    sensor_heads: int = option(4, "attention heads")
    sensor_channels: int = option(16, "channels of the first convolution of a branch that reads frames")
    sensor_patch: int = option(4, "kinematics: time steps per token")
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
        None, "branches (and fusion) with activation checkpointing: their blocks recompute activations in backward"
    )
    frozen_branches: Optional[list[str]] = option(
        None, "tuning: full: branches (and fusion) of a trained model that are frozen"
    )
    quantized_branches: Optional[list[str]] = option(
        None,
        "tuning: qlora: parts with transformer blocks to store in 4 or 8 bits, among "
        f"{', '.join(WITH_TRANSFORMER)}; default: all that the model has",
    )
    branch_devices: Optional[Union[dict, str]] = option(
        None, 'branches to store and compute on a separate device, for instance {"geometry": "cpu"}'
    )
    offload_linears_mb: Optional[float] = option(
        None,
        "tuning: lora: keep frozen linear layers of at least this many MiB in main memory, or in "
        "offload_linears_folder, and load them when they run",
    )
    offload_linears_folder: Optional[str] = option(None, "folder on a fast disk for the offloaded linear layers")

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)
        wanted = DEFAULT_BRANCHES if self.branches is None else self.branches
        object.__setattr__(self, "branches", _in_allowed_order("branches", wanted, tuple(BRANCHES)))
        parts = (*BRANCHES, FUSION)
        allowed = {"checkpoint_branches": parts, "frozen_branches": parts, "quantized_branches": WITH_TRANSFORMER}
        for name, names in allowed.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _in_allowed_order(name, getattr(self, name), names))
        object.__setattr__(self, "branch_devices", _parsed_devices(self.branch_devices))
        if self.branches != list(DEFAULT_BRANCHES):  # with the default, a trained model may have others
            self.check_parts()
        width, heads = self.sensor_hidden_size, self.sensor_heads
        require(
            width % (2 * heads) == 0,
            f"sensor_hidden_size {width} must be a multiple of twice sensor_heads ({heads}); "
            f"for instance {max(1, width // (2 * heads)) * 2 * heads}",
        )
        require(
            self.offload_linears_folder is None or self.offload_linears_mb is not None,
            "offload_linears_folder is the folder for the layers of offload_linears_mb, but that is not set; add "
            "offload_linears_mb, for instance 16",
        )

    def check_parts(self) -> None:
        """Raise SettingsError if a list of parts names a branch that is not in ``branches``."""
        parts = (*(self.branches or ()), FUSION)
        for name in ("checkpoint_branches", "frozen_branches", "quantized_branches", "branch_devices"):
            for part in getattr(self, name) or ():
                require(part in parts, f"{name} has {part!r}, but the model has {', '.join(parts)}; drop {part}")


def _parsed_devices(value: Any) -> Optional[dict[str, str]]:
    """Return the device of each branch, from a mapping in a file or JSON in a flag. Raises SettingsError for others."""
    if value is None:
        return None
    example = 'give something like {"geometry": "cpu"}'
    try:
        values = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        values = value
    require(isinstance(values, dict) and bool(values), f"branch_devices is {value!r}; {example}")
    for branch, device in values.items():
        _in_allowed_order("branch_devices", branch, tuple(BRANCHES))
        require(isinstance(device, str), f"branch_devices has {device!r} for {branch}; {example}")
    return values


def _in_allowed_order(name: str, values: Any, allowed: tuple[str, ...]) -> list[str]:
    """Return ``values`` in the order of ``allowed``. Raises SettingsError for unknown or repeated names."""
    values = [values] if isinstance(values, str) else list(values)
    for item in values:
        require(
            item in allowed, f"{name} has {item!r}; allowed: {', '.join(allowed)}{did_you_mean(str(item), allowed)}"
        )
    require(bool(values), f"{name} is empty; give at least one of {', '.join(allowed)}")
    require(len(set(values)) == len(values), f"{name} names a branch twice: {', '.join(values)}")
    return [item for item in allowed if item in values]


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
"""Named groups of values. ``max_steps`` of -1 trains for the epochs, and ``dataset_size`` None uses all recordings. The
sizes are for a model from scratch; a loaded one keeps its own."""
