"""The machine that a plan is for: this one, or another one by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from scu_trainer.hardware.precision import DeviceFacts, choose_precision, device_facts
from scu_trainer.hardware.presets import Preset, find, parse_bytes
from scu_trainer.hardware.probe import probe

USABLE_SHARE = 0.95
"""Share of a GPU's memory as sold that a process can use; the driver and the screen take the rest."""


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
