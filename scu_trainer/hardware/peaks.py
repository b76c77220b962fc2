"""Peak operations per second of devices, by the number format of their matrix products."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Optional

from scu_trainer.hardware.presets import presets

if TYPE_CHECKING:
    import torch

OTHER_CARDS: dict[str, dict[str, float]] = {
    r"H[12]00 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    r"GH200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    r"H100.*PCIe": {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.2},
    r"A40\b": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    r"A10\b": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    r"\bL4\b": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    r"V100-SXM": {"fp16": 125.0, "fp32": 15.7},
    r"V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
}
"""TFLOP/s of one device by format, for GPUs that have no preset; keys are patterns for the driver's name of the GPU.
From NVIDIA's data sheets of these GPUs (NVL and PCIe boards of H100 and H200, GH200, A40, A10, L4, V100), for dense
matrices; the sheets of Hopper and Ada state twice the figure, with sparsity. fp32 is that of the ordinary cores."""


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU, or the type of any other device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known_tflops(device_name: str, precision: str) -> Optional[float]:
    """Return the vendor's peak TFLOP/s for ``precision`` (bf16, fp16, tf32, fp32); None for unknown GPUs and MIG."""
    known = [preset.tflops for preset in presets() if preset.is_called(device_name)]
    known += [peaks for pattern, peaks in OTHER_CARDS.items() if re.search(pattern, device_name)]
    return known[0].get(precision) if known and "MIG" not in device_name else None
