"""Check the requirements of a training: for each one what was found, what is wanted, and what to do about it.

The lower bounds come from setup.cfg by way of the installed package's metadata, so they are defined only once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import RequirementError, StorageError
from scu_trainer.hardware.needs import RecipeNeeds
from scu_trainer.hardware.optimizers import check_optimizer
from scu_trainer.hardware.probe import Accelerator, Machine, installed_version, probe
from scu_trainer.run_files import format_bytes, require_writable

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "scu-trainer"
OLDEST_PYTHON = (3, 11)
NEEDED_RAM_BYTES = 2 * 2**30
NEEDED_DISK_BYTES = 2 * 2**30
OPTIONAL_EXTRAS = "qlora optimizers deepspeed images liger report board gguf onnx serve lm-eval wandb sweep dev".split()
INSTALL_ALL = "make deps, or pip install -e '.[all]' -c constraints.txt"

# the rest cannot be checked or printed without these
_OWN_TOOLS = ("packaging", "psutil", "rich")


@dataclass(frozen=True)
class RequirementStatus:
    """One line of the report: ``fix`` if it is not ``ok``, and ``required`` if training cannot start without it."""

    name: str
    ok: bool
    found: str
    wanted: str
    fix: str
    required: bool = True


def check(
    output_dir: Path,
    cache_dir: Path,
    needs: Optional[RecipeNeeds] = None,
    machine: Optional[Machine] = None,
    declared: Optional[Sequence[str]] = None,
) -> list[RequirementStatus]:
    """Compare this machine with what training needs.

    Args:
        output_dir, cache_dir: where a run writes; they need not exist and are not created.
        needs: what a recipe needs in addition, which counts as required. Default: nothing.
        machine: the machine to check; default: this one.
        declared: requirement lines such as "torch>=2.11"; default: those of the installed scu-trainer.
    """
    needs = needs or RecipeNeeds()
    missing_tools = [name for name in _OWN_TOOLS if importlib.util.find_spec(name) is None]
    if missing_tools:
        return [RequirementStatus(name, False, "missing", "any version", INSTALL_ALL) for name in missing_tools]
    if declared is None and installed_version(PROJECT) is None:
        return [RequirementStatus(PROJECT, False, "not installed", "installed in this Python", INSTALL_ALL)]
    base, by_extra = _parse(importlib.metadata.requires(PROJECT) or [] if declared is None else declared)
    names = [requirement.name for group in (base, *by_extra.values()) for requirement in group]
    paths = (output_dir, cache_dir, *needs.folders.values())
    machine = machine or probe(paths=paths, packages=[*names, *needs.packages])
    return [
        _python(machine),
        *(_package(requirement, machine) for requirement in base),
        _device(machine.accelerators, needs),
        _ram(machine),
        _disk("output disk", "output_dir", output_dir, machine),
        _disk("cache disk", "cache_dir", cache_dir, machine),
        _writable("output_dir", output_dir),
        _writable("cache_dir", cache_dir),
        *_recipe_requirements(needs, machine),
        *(_extra(name, group, machine, needs.extras.get(name)) for name, group in by_extra.items()),
    ]


def _recipe_requirements(needs: RecipeNeeds, machine: Machine) -> Iterator[RequirementStatus]:
    for setting, path in needs.folders.items():
        yield _disk(f"{setting} disk", setting, path, machine)
        yield _writable(setting, path)
    for name, why in needs.packages.items():
        version = machine.packages.get(name)
        yield RequirementStatus(
            name, version is not None, version or "missing", f"needed by {why}", f"pip install {name}"
        )
    if needs.optim is not None:
        yield _optimizer(needs.optim, needs, machine)


def all_required_met(findings: Iterable[RequirementStatus]) -> bool:
    """Return whether training can start: all findings are ok, except optional ones."""
    return all(finding.ok or not finding.required for finding in findings)


def _parse(lines: Iterable[str]) -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Return the base requirements, and those that each optional extra adds."""
    from packaging.requirements import Requirement

    requirements = [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT]
    base = [requirement for requirement in requirements if _applies(requirement, "")]
    by_extra = {
        extra: [requirement for requirement in requirements if requirement not in base and _applies(requirement, extra)]
        for extra in OPTIONAL_EXTRAS
    }
    return base, {extra: group for extra, group in by_extra.items() if group}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _python(machine: Machine) -> RequirementStatus:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    found = ".".join(map(str, machine.python))
    return RequirementStatus(
        "Python", machine.python >= OLDEST_PYTHON, found, f">={wanted}", f"make deps PYTHON=/path/to/python{wanted}"
    )


def _package(requirement: Requirement, machine: Machine) -> RequirementStatus:
    from packaging.utils import canonicalize_name

    tested = _tested_versions().get(canonicalize_name(requirement.name))
    wanted = f"{requirement.specifier}" + (f" (tested with {tested})" if tested else "")
    return RequirementStatus(
        requirement.name,
        _is_met(requirement, machine),
        machine.packages.get(requirement.name) or "missing",
        wanted,
        f"pip install '{requirement.name}{requirement.specifier}'",
    )


def _is_met(requirement: Requirement, machine: Machine) -> bool:
    version = machine.packages.get(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _extra(name: str, group: list[Requirement], machine: Machine, needed_by: Optional[str]) -> RequirementStatus:
    return RequirementStatus(
        f"[{name}]",
        all(_is_met(requirement, machine) for requirement in group),
        ", ".join(f"{item.name} {machine.packages.get(item.name) or 'missing'}" for item in group),
        "optional" if needed_by is None else f"needed by {needed_by}",
        f"pip install '{PROJECT}[{name}]'",
        required=needed_by is not None,
    )


def _device(accelerators: Sequence[Accelerator], needs: RecipeNeeds) -> RequirementStatus:
    usable = () if needs.use_cpu else accelerators
    lacking = [*needs.cuda] if not any(item.kind == "cuda" for item in usable) else []
    lacking += [] if usable else needs.gpu
    if lacking:
        kind = "a CUDA GPU" if needs.cuda else "a GPU"
        fix = f"drop {'it' if len(lacking) == 1 else 'them'}, or train on a machine that has one"
        found = (
            f"{_devices(accelerators)}, use_cpu is set" if accelerators and needs.use_cpu else _devices(accelerators)
        )
        return RequirementStatus("device", False, found, f"{kind}, for {' and '.join(lacking)}", fix)
    wanted = "any" if accelerators else "any; a CPU is fine for small models"
    return RequirementStatus("device", True, _devices(accelerators), wanted, "")


def _devices(accelerators: Sequence[Accelerator]) -> str:
    if not accelerators:
        return "CPU only"
    return ", ".join(
        f"{item.kind}:{item.index} {item.name} {format_bytes(item.free_bytes)} free of {format_bytes(item.total_bytes)}"
        for item in accelerators
    )


def _optimizer(optim: str, needs: RecipeNeeds, machine: Machine) -> RequirementStatus:
    device = "cpu" if needs.use_cpu or not machine.accelerators else machine.accelerators[0].kind
    try:
        check_optimizer(optim, device)
    except RequirementError as error:
        return RequirementStatus("optim", False, optim, f"one that runs on {device}", str(error))
    return RequirementStatus("optim", True, optim, f"runs on {device}", "")


def _ram(machine: Machine) -> RequirementStatus:
    found = f"{format_bytes(machine.ram_available_bytes)} free of {format_bytes(machine.ram_total_bytes)}"
    if machine.ram_limit_bytes is not None:
        found += " (container limit)"
    ok = machine.ram_available_bytes >= NEEDED_RAM_BYTES
    return RequirementStatus(
        "memory", ok, found, f">={format_bytes(NEEDED_RAM_BYTES)} free", "end other programs or raise the limit"
    )


def _disk(name: str, setting: str, path: Path, machine: Machine) -> RequirementStatus:
    free = machine.disk_free_bytes[path]
    fix = f"free some at {path} or set {setting} to a larger disk"
    return RequirementStatus(
        name, free >= NEEDED_DISK_BYTES, f"{format_bytes(free)} free", f">={format_bytes(NEEDED_DISK_BYTES)} free", fix
    )


def _writable(setting: str, path: Path) -> RequirementStatus:
    try:
        require_writable(path, setting)
    except StorageError as error:
        return RequirementStatus(setting, False, "not writable", "writable", str(error))
    return RequirementStatus(setting, True, str(path), "writable", "")


def _tested_versions() -> dict[str, str]:
    """Return the versions in constraints.txt by canonical name; {} outside of a checkout, which has no such file."""
    constraints = Path(__file__).parents[2] / "constraints.txt"
    if not constraints.is_file():
        return {}
    pins = (line.split("==") for line in constraints.read_text().splitlines() if "==" in line and line[0] != "#")
    return dict(pins)
