"""Choose the number format of a training: the requested one if the device supports it, else the fastest safe one.

``choose_precision`` and ``tf32_default`` are rules; ``device_facts`` collects their input and is the only part that
needs torch.

Measured on a CPU core with LoRA, forward and backward of 8 x 256 tokens, bf16 autocast relative to float32: with
avx512_bf16 it was 1.6 times as fast (Granite hybrid, 1.2M weights) and 2.0 times (Llama, 20M); restricted to
instructions without it 0.7 times, and on plain AVX2 0.2 times. So the CPU's instructions decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from scu_trainer.errors import RequirementError, SettingsError

CPU_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
TENSOR_CORES = (7, 0)
"""Least compute capability of CUDA GPUs that multiply fp16 faster than float32."""
AMPERE = (8, 0)
_ALLOWED = ("no", "bf16", "fp16")
DEFAULT_OF_ACCELERATE = (
    "; the launcher's mixed_precision: no is not followed, because accelerate sets it by default: set "
    "mixed_precision: no in the job to turn half precision off"
)


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a training. kind: "cpu", "cuda" or "mps". bf16: whether it multiplies bf16 natively, without
    emulation. capability: that of an NVIDIA GPU, else None. detail: what supports bf16, in words, or ""."""

    kind: str
    bf16: bool = False
    capability: Optional[tuple[int, int]] = None
    detail: str = ""

    @property
    def tf32(self) -> bool:
        return self.kind == "cuda" and self.capability is not None and self.capability >= AMPERE


@dataclass(frozen=True)
class PrecisionChoice:
    """``name`` is no, bf16 or fp16, and ``reason`` a line for the user, such as "bf16 autocast (this GPU has it)"."""

    name: str
    reason: str


def choose_precision(
    wanted: str, bf16: bool, fp16: bool, launcher: Optional[str], device: DeviceFacts
) -> PrecisionChoice:
    """Return the requested format, or the fastest safe one of the device if there is no request.

    Args:
        wanted: ``mixed_precision``: auto, no, bf16 or fp16.
        bf16, fp16: the switches of the stock Trainer.
        launcher: ``ACCELERATE_MIXED_PRECISION``; None without a launcher. "no" does not count as a request, because
            accelerate also sets it by default.
    Raises SettingsError for contradicting requests, and RequirementError for a format that the device does not support.
    """
    requests = _requests(wanted, bf16, fp16, launcher)
    names = set(requests.values())
    if len(names) > 1:
        raise SettingsError(f"{' and '.join(requests)} contradict each other; keep one of them")
    if not names:
        choice = _fastest(device)
        if choice.name == "no" or launcher is None:
            return choice
        return replace(choice, reason=f"{choice.reason.removesuffix(')')}{DEFAULT_OF_ACCELERATE})")
    name, setting = names.pop(), next(iter(requests))
    _require_supported(name, device, setting)
    is_slow = name == "bf16" and device.kind == "cpu" and not device.bf16
    warning = "; this CPU has no instructions for it: slower than float32" if is_slow else ""
    words = "arithmetic in the type of the weights" if name == "no" else f"{name} autocast"
    return PrecisionChoice(name, f"{words} ({setting}{warning})")


def _requests(wanted: str, bf16: bool, fp16: bool, launcher: Optional[str]) -> dict[str, str]:
    """Return the requested formats by the setting that asks for them."""
    if launcher is not None and launcher not in _ALLOWED:
        raise SettingsError(f"the launcher asks for mixed_precision: {launcher}; allowed: {', '.join(_ALLOWED)}")
    requests = {
        f"mixed_precision: {wanted}": None if wanted == "auto" else wanted,
        "bf16: true": "bf16" if bf16 else None,
        "fp16: true": "fp16" if fp16 else None,
        f"the launcher's mixed_precision: {launcher}": None if launcher == "no" else launcher,
    }
    return {setting: name for setting, name in requests.items() if name is not None}


def _require_supported(name: str, device: DeviceFacts, setting: str) -> None:
    if name == "bf16" and device.kind == "cuda" and not device.bf16:
        raise RequirementError(f"{setting}, but this GPU has no bf16; use mixed_precision: fp16, or auto")
    if name == "fp16" and device.kind == "cpu":
        raise RequirementError(
            f"{setting}, but there is no fp16 training on a CPU (it would silently run in float32); "
            "use mixed_precision: bf16, or auto"
        )


def _fastest(device: DeviceFacts) -> PrecisionChoice:
    if device.kind == "mps":
        return PrecisionChoice(
            "no", "float32 (autocast was not measured on mps; mixed_precision: bf16 is worth trying)"
        )
    if device.bf16:
        return PrecisionChoice("bf16", f"bf16 autocast ({device.detail})")
    if device.kind == "cuda" and device.capability is not None and device.capability >= TENSOR_CORES:
        return PrecisionChoice("fp16", "fp16 autocast (this GPU has no bf16)")
    reasons = {"cuda": "this GPU has neither bf16 nor fast fp16", "cpu": "this CPU has no bf16 instructions"}
    return PrecisionChoice("no", f"float32 ({reasons.get(device.kind, f'nothing is known about {device.kind}')})")


def tf32_default(device: DeviceFacts, wanted: Optional[bool] = None) -> Optional[bool]:
    """Return the value of ``tf32``: ``wanted`` if set, else True for Ampere or newer and None for other devices. Raises
    RequirementError if it is wanted but the device does not support it."""
    if wanted and not device.tf32:
        raise RequirementError("tf32: true needs a CUDA GPU of the Ampere generation or newer; leave tf32 out")
    return wanted if wanted is not None else (True if device.tf32 else None)


def device_facts(use_cpu: bool) -> DeviceFacts:
    """Return facts about the device of a training here: the first GPU, unless ``use_cpu`` or accelerate's --cpu."""
    import torch
    from accelerate.utils import parse_flag_from_env

    use_cpu = use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")  # as in TrainingArguments
    if not use_cpu and torch.cuda.is_available():
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        # ROCm numbers its capabilities differently.
        capability = None if torch.version.cuda is None else torch.cuda.get_device_capability()
        return DeviceFacts("cuda", bf16, capability, "this GPU has it" if bf16 else "")
    if not use_cpu and torch.backends.mps.is_available():
        return DeviceFacts("mps")
    return cpu_facts(torch.cpu.get_capabilities())


def cpu_facts(capabilities: dict) -> DeviceFacts:
    """Return facts about a CPU with these instruction sets, as ``torch.cpu.get_capabilities()`` returns them."""
    found = [name for name in CPU_BF16_INSTRUCTIONS if capabilities.get(name)]
    return DeviceFacts("cpu", bool(found), None, f"this CPU has {found[0]}" if found else "")
