"""In which number format a training computes: what was asked for, if the device can; else the fastest safe one.

``choose_precision`` and ``tf32_default`` are rules on facts; ``device_facts`` gathers the facts and alone needs torch.

Measured on a CPU core, LoRA, forward and backward of 8 x 256 tokens, autocast to bf16 against float32: with
avx512_bf16 1.6 times as fast (Granite hybrid, 1.2M weights) and 2.0 times (Llama, 20M); held to instructions without
it 0.7 times, and 0.2 times on plain AVX2. So the instructions decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from scu_trainer.errors import RequirementError, SettingsError

CPU_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
TENSOR_CORES = (7, 0)
"""Capability from which CUDA cards multiply fp16 faster than float32."""
AMPERE = (8, 0)
_ALLOWED = ("no", "bf16", "fp16")
DEFAULT_OF_ACCELERATE = (
    "; the launcher's mixed_precision: no is not followed, because accelerate sets it by default: set "
    "mixed_precision: no in the job to turn half precision off"
)


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a training.

    kind: "cpu", "cuda" or "mps". bf16: it multiplies bf16 itself instead of emulating that.
    capability: of an NVIDIA card; None for all else. detail: what gives bf16, in words; "" if nothing does.
    """

    kind: str
    bf16: bool = False
    capability: Optional[tuple[int, int]] = None
    detail: str = ""

    @property
    def tf32(self) -> bool:
        return self.kind == "cuda" and self.capability is not None and self.capability >= AMPERE


@dataclass(frozen=True)
class PrecisionChoice:
    """``name``: no, bf16 or fp16. ``reason``: one line for the user, "bf16 autocast (this GPU has it)"."""

    name: str
    reason: str


def choose_precision(
    wanted: str, bf16: bool, fp16: bool, launcher: Optional[str], device: DeviceFacts
) -> PrecisionChoice:
    """What is asked for wins; if nobody asks, the fastest safe format of the device.

    Args:
        wanted: ``mixed_precision``: auto, no, bf16 or fp16.
        bf16, fp16: the stock switches.
        launcher: ``ACCELERATE_MIXED_PRECISION``; None without a launcher. "no" counts as nothing said, because
            accelerate writes it also when nobody was asked.
    Raises SettingsError for requests that contradict each other, RequirementError for what the device cannot do.
    """
    asked = _asked(wanted, bf16, fp16, launcher)
    names = set(asked.values())
    if len(names) > 1:
        raise SettingsError(f"{' and '.join(asked)} contradict each other; keep one of them")
    if not names:
        choice = _fastest(device)
        if choice.name == "no" or launcher is None:
            return choice
        return replace(choice, reason=f"{choice.reason.removesuffix(')')}{DEFAULT_OF_ACCELERATE})")
    name, who = names.pop(), next(iter(asked))
    _require_possible(name, device, who)
    is_slow = name == "bf16" and device.kind == "cpu" and not device.bf16
    warning = "; this CPU has no instructions for it: slower than float32" if is_slow else ""
    words = "arithmetic in the type of the weights" if name == "no" else f"{name} autocast"
    return PrecisionChoice(name, f"{words} ({who}{warning})")


def _asked(wanted: str, bf16: bool, fp16: bool, launcher: Optional[str]) -> dict[str, str]:
    """Who asks -> for what."""
    if launcher is not None and launcher not in _ALLOWED:
        raise SettingsError(f"the launcher asks for mixed_precision: {launcher}; allowed: {', '.join(_ALLOWED)}")
    requests = {
        f"mixed_precision: {wanted}": None if wanted == "auto" else wanted,
        "bf16: true": "bf16" if bf16 else None,
        "fp16: true": "fp16" if fp16 else None,
        f"the launcher's mixed_precision: {launcher}": None if launcher == "no" else launcher,
    }
    return {who: name for who, name in requests.items() if name is not None}


def _require_possible(name: str, device: DeviceFacts, who: str) -> None:
    if name == "bf16" and device.kind == "cuda" and not device.bf16:
        raise RequirementError(f"{who}, but this GPU has no bf16; use mixed_precision: fp16, or auto")
    if name == "fp16" and device.kind == "cpu":
        raise RequirementError(
            f"{who}, but there is no fp16 training on a CPU (it would silently run in float32); "
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
    here = {"cuda": "this GPU has neither bf16 nor fast fp16", "cpu": "this CPU has no bf16 instructions"}
    return PrecisionChoice("no", f"float32 ({here.get(device.kind, f'nothing is known about {device.kind}')})")


def tf32_default(device: DeviceFacts, wanted: Optional[bool] = None) -> Optional[bool]:
    """The value of ``tf32``: what is wanted, else true from Ampere on, None where there is nothing to set.

    Raises RequirementError if it is wanted where there is none.
    """
    if wanted and not device.tf32:
        raise RequirementError("tf32: true needs a CUDA card of the Ampere generation or newer; leave tf32 out")
    return wanted if wanted is not None else (True if device.tf32 else None)


def device_facts(use_cpu: bool) -> DeviceFacts:
    """Facts of the device that a training here uses: the first GPU, unless ``use_cpu``, or accelerate's --cpu."""
    import torch
    from accelerate.utils import parse_flag_from_env

    use_cpu = use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")  # as TrainingArguments has it
    if not use_cpu and torch.cuda.is_available():
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        capability = None if torch.version.cuda is None else torch.cuda.get_device_capability()  # ROCm counts otherwise
        return DeviceFacts("cuda", bf16, capability, "this GPU has it" if bf16 else "")
    if not use_cpu and torch.backends.mps.is_available():
        return DeviceFacts("mps")
    return cpu_facts(torch.cpu.get_capabilities())


def cpu_facts(capabilities: dict) -> DeviceFacts:
    """``capabilities``: of ``torch.cpu.get_capabilities()``, instruction sets by name."""
    found = [name for name in CPU_BF16_INSTRUCTIONS if capabilities.get(name)]
    return DeviceFacts("cpu", bool(found), None, f"this CPU has {found[0]}" if found else "")
