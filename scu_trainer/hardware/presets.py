"""The machine that a plan is for: this one, or another one by name, with figures from ``presets/*.yaml``; and the peak
operations per second of GPUs."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import yaml

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.hardware.precision import DeviceFacts, choose_precision, device_facts
from scu_trainer.hardware.probe import probe
from scu_trainer.settings.memory import size_in_gib

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent / "presets"

_NO_DIFFERENCE = {"nvidia", "geforce", "tesla", "rtx", "gpu", "laptop", "card", "sxm", "sxm4", "sxm5", "hbm3", "only"}
"""Words in the names of GPUs that do not distinguish the presets."""

USABLE_SHARE = 0.95
"""Share of a GPU's memory as sold that a process can use; the driver and the screen take the rest."""

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


@dataclass(frozen=True)
class Preset:
    """A kind of machine.

    Fields:
        name: such as "RTX 3050 4GB".
        device: "cuda" or "cpu".
        memory_bytes: memory of the GPU as sold, before the driver takes its part; 0 without a GPU.
        compute_capability: such as "8.6"; None without a GPU.
        bf16, fp16: whether it trains in this format at full speed.
        tflops: 1e12 operations per second on dense matrices, by precision; "fp32" on the ordinary cores.
        ram_bytes: main memory that such a machine usually has.
        source: where the figures come from.
        driver_name: pattern for the driver's name of the GPU; None without a GPU.
    """

    name: str
    device: str
    memory_bytes: int
    compute_capability: Optional[str]
    bf16: bool
    fp16: bool
    tflops: dict[str, float]
    ram_bytes: int
    source: str
    driver_name: Optional[str] = None

    def is_called(self, device_name: str) -> bool:
        """Return whether ``device_name`` is the driver's name of this GPU."""
        return self.driver_name is not None and re.search(self.driver_name, device_name) is not None


@functools.cache
def presets() -> tuple[Preset, ...]:
    """Return all presets, ordered by their memory."""
    found = [_read(path) for path in FOLDER.glob("*.yaml")]
    return tuple(sorted(found, key=lambda preset: (preset.memory_bytes, preset.name)))


def find(text: str) -> Preset:
    """Return the preset that ``text`` names, such as "rtx3050", "a100-80", or the driver's name of the GPU. Raises
    SettingsError if it names none, or several."""
    by_driver = [preset for preset in presets() if preset.is_called(text.strip())]
    wanted = _key_words(text)
    matching = by_driver or [preset for preset in presets() if wanted and _matches(wanted, _key_words(preset.name))]
    if len(matching) == 1:
        return matching[0]
    names = [preset.name for preset in presets()]
    if matching:
        several = " or ".join(preset.name for preset in matching)
        raise SettingsError(f"machine {text!r} can be {several}; name one of them")
    raise SettingsError(
        f"no machine is called {text!r}; known: {', '.join(names)}{did_you_mean(text, names)}; for another GPU, name "
        "the most similar one, and give the free memory of yours as --limit"
    )


def parse_bytes(text: Union[str, float], name: str = "size") -> int:
    """Return the bytes of "16GB", "16GiB" or "16" (GiB) of the setting ``name``. Raises SettingsError otherwise."""
    return round(size_in_gib(name, str(text)) * 2**30)


def _read(path: Path) -> Preset:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    memory, ram = content.pop("memory"), content.pop("ram")
    memory_bytes = 0 if memory is None else parse_bytes(memory)
    return Preset(**content, memory_bytes=memory_bytes, ram_bytes=parse_bytes(ram))


def _key_words(text: str) -> set[str]:
    """Return the words that distinguish machines: {"3050", "4gb"} for "NVIDIA GeForce RTX-3050 4 GiB"."""
    plain = re.sub(r"(?<=\d)\s*gi?b?\b", "gb", text.lower()).replace("rtx", " ")
    return set(re.findall(r"[a-z0-9]+", plain)) - _NO_DIFFERENCE


def _matches(wanted: set[str], known: set[str]) -> bool:
    """Return whether all ``wanted`` words are in ``known``; a size may lack its unit, as in a100-80."""
    return all(word in known or f"{word}gb" in known for word in wanted)


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU, or the type of any other device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known_tflops(device_name: str, precision: str) -> Optional[float]:
    """Return the vendor's peak TFLOP/s for ``precision`` (bf16, fp16, tf32, fp32); None for unknown GPUs and MIG."""
    known = [preset.tflops for preset in presets() if preset.is_called(device_name)]
    known += [peaks for pattern, peaks in OTHER_CARDS.items() if re.search(pattern, device_name)]
    return known[0].get(precision) if known and "MIG" not in device_name else None


@dataclass(frozen=True)
class PlanTarget:
    """A machine to plan for: one process can use ``limit_bytes`` of its device; ``ram_bytes`` of main memory are
    free."""

    name: str
    facts: DeviceFacts
    limit_bytes: int
    ram_bytes: int
    is_here: bool

    @property
    def device(self) -> str:
        return self.facts.kind

    @property
    def half(self) -> Optional[str]:
        """The half precision in which the device trains by default; None if it has none that is worthwhile."""
        name = choose_precision("auto", False, False, None, self.facts).name
        return None if name == "no" else name

    def limited(self, limit_bytes: Optional[int]) -> PlanTarget:
        return self if limit_bytes is None else replace(self, limit_bytes=limit_bytes)


def here(use_cpu: bool) -> PlanTarget:
    """Return this machine with its current free memory, that of the first GPU or else main memory."""
    facts, machine = device_facts(use_cpu), probe()
    available = int(machine.ram_available_bytes)
    if facts.kind != "cuda":
        name = "this machine's CPU" if facts.kind == "cpu" else "this machine"
        return PlanTarget(name, facts, available, available, True)
    gpu = machine.accelerators[0]
    return PlanTarget(f"this machine's {gpu.name}", facts, gpu.free_bytes, available, True)


def named(gpu: Optional[str], ram: Optional[str]) -> PlanTarget:
    """Return a machine by GPU ("RTX 3050 4GB", "cpu-only") and main memory ("16GB"). Raises SettingsError."""
    preset = find(gpu or "cpu-only")
    ram_bytes = preset.ram_bytes if ram is None else parse_bytes(ram, "ram")
    limit_bytes = ram_bytes if preset.device == "cpu" else int(preset.memory_bytes * USABLE_SHARE)
    return PlanTarget(preset.name, _facts(preset), limit_bytes, ram_bytes, False)


def _facts(preset: Preset) -> DeviceFacts:
    if preset.device == "cpu":
        return DeviceFacts("cpu", preset.bf16, None, preset.name)
    major, minor = (int(part) for part in str(preset.compute_capability).split("."))
    return DeviceFacts("cuda", preset.bf16, (major, minor), preset.name)
