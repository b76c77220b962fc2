"""``scu-trainer hardware``. ``profile``: what is here; ``check``: is it enough; ``monitor``: its memory, live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import RequirementError, SettingsError
from scu_trainer.hardware import cgroup
from scu_trainer.hardware.probe import Accelerator, accelerators, installed_version, ram_bytes

if TYPE_CHECKING:
    from scu_trainer.hardware.profile import Profile

CUDA_BUILD = "pip install a CUDA build of torch"


def main(argv: Optional[Sequence[str]] = None) -> int:
    return guarded(_main, list(sys.argv[1:] if argv is None else argv))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer hardware")
    actions = parser.add_subparsers(dest="action", required=True, metavar="profile|check|monitor", parser_class=Parser)
    profile = actions.add_parser("profile", help="GPUs and who uses them, CPU, memory, disks, versions")
    profile.add_argument("--json", action="store_true", help="as one JSON object")
    profile.add_argument("--no_disk_speed", "--no-disk-speed", action="store_true", help="write no file to measure")
    check = actions.add_parser("check", help="versions, devices, memory, disk")
    check.add_argument("--gpu", action="store_true", help="only: is there a GPU that torch can use; exit code 2 if not")
    monitor = actions.add_parser("monitor", help="memory of the machine and its GPUs, live")
    monitor.add_argument("--duration", type=float, help="seconds; default: until Ctrl-C")
    monitor.add_argument("--interval", type=float, default=1.0, help="seconds between two readings")
    return parser


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.action == "profile":
        return _profile(options)
    if options.action == "check":
        return _check_gpu() if options.gpu else _check()
    return _monitor(options)


# -- profile -----------------------------------------------------------------------------------------------------------


def _profile(options: argparse.Namespace) -> int:
    from scu_trainer.data import default_cache_dir
    from scu_trainer.hardware.profile import profile

    found = profile((Path("runs"), default_cache_dir(None)), measure_disks=not options.no_disk_speed)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        from rich.console import Console

        Console(highlight=False).print(_table(found))
    return 0


def _table(found: Profile):
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(found):
        table.add_row(name, text)
    return table


def _lines(found: Profile) -> Iterator[tuple[str, str]]:
    yield "system", f"{found.system}, Python {found.python}"
    if not found.gpus:
        yield "GPU", "none that torch can use"
    for gpu in found.gpus:
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        yield (
            f"{gpu.kind}:{gpu.index}",
            f"{gpu.name}, {_gib(gpu.free_bytes)} free of {_gib(gpu.total_bytes)}{capability}",
        )
        if gpu.kind == "cuda" and gpu.users is None:
            yield "", "who else uses it is not known: nvidia-smi does not tell"
        for user in gpu.users or ():
            held = "memory unknown" if user.used_bytes is None else _gib(user.used_bytes)
            yield "", f"used by process {user.pid} ({user.name}): {held}"
    cpu, ram = found.cpu, found.ram
    cores = "" if cpu.cores is None else f"{cpu.cores} cores, "
    yield "CPU", f"{cpu.name} ({cpu.architecture}), {cores}{cpu.threads} threads, {cpu.usable:g} usable here"
    yield "", "instructions: " + (" ".join(cpu.features) or "none of those that matter are known")
    limit = "" if ram.limit_bytes is None else f", container limit {_gib(ram.limit_bytes)}"
    yield "RAM", f"{_gib(ram.available_bytes)} available of {_gib(ram.total_bytes)}{limit}, swap {_gib(ram.swap_bytes)}"
    for disk in found.disks:
        speed = disk.note if disk.write_bytes_per_s is None else f"writes {disk.write_bytes_per_s / 1e6:,.0f} MB/s"
        yield "disk", f"{disk.path}: {_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)}, {speed}"
    here = [f"{name} {version}" for name, version in found.packages.items() if version is not None]
    yield "packages", ", ".join(here)
    yield "", "not installed: " + ", ".join(name for name, version in found.packages.items() if version is None)


# -- check -------------------------------------------------------------------------------------------------------------


def _check() -> int:
    from scu_trainer.data import default_cache_dir
    from scu_trainer.hardware.requirements import all_required_met, check, render

    findings = check(Path("runs"), default_cache_dir(None))
    print(render(findings))
    return 0 if all_required_met(findings) else 2


def _check_gpu() -> int:
    found = accelerators()
    if not found:
        raise RequirementError(f"no GPU that torch can use: {_why_none()}. Training on the CPU: make train-cpu")
    for item in found:
        print(f"{_device(item)}: {_gib(item.free_bytes)} free of {_gib(item.total_bytes)}; {_abilities(item)}")
    return 0


def _why_none() -> str:
    version = installed_version("torch")
    if version is None:
        return "torch is not installed (make deps)"
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build; with a card in this machine, {CUDA_BUILD}"
    return f"torch {torch.__version__} is built for one but sees no card; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _abilities(item: Accelerator) -> str:
    if item.kind != "cuda":
        return "bitsandbytes and flash attention do not run on it"
    import torch
    from transformers.utils import is_flash_attn_2_available

    major, minor = torch.cuda.get_device_capability(item.index)
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    flash = "installed" if is_flash_attn_2_available() else "not installed (sdpa is used)"
    return f"compute capability {major}.{minor}, {half}, flash attention {flash}"


# -- monitor -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One memory: used and total bytes now, and the most that was used while we looked."""

    name: str
    used_bytes: int
    total_bytes: int
    highest_bytes: int


def _monitor(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    if options.interval <= 0 or (options.duration is not None and options.duration <= 0):
        raise SettingsError("interval and duration are seconds above 0, for instance --interval 1 --duration 60")
    console = Console(highlight=False)
    readings = levels(options.duration, options.interval)
    last: Sequence[Level] = ()
    try:
        if console.is_terminal:
            with Live(console=console, transient=True) as live:
                for last in readings:
                    live.update(_screen(last))
        else:  # a pipe or a log: one line for each reading
            for last in readings:
                console.print(_plain(last), soft_wrap=True)
    except KeyboardInterrupt:
        pass  # how one leaves a monitor
    if console.is_terminal and last:
        console.print(_screen(last))
    return 0


def levels(
    duration_s: Optional[float],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Level]]:
    """Memories of this machine every ``interval_s`` seconds, for ``duration_s`` or without end."""
    highest: dict[str, int] = {}
    begun_s = None
    while True:
        found = list(_memories())
        begun_s = clock() if begun_s is None else begun_s  # the first look also imports what it looks with
        for name, used, _ in found:
            highest[name] = max(used, highest.get(name, 0))
        yield [Level(name, used, total, highest[name]) for name, used, total in found]
        if duration_s is not None and clock() - begun_s + interval_s > duration_s:
            return
        sleep(interval_s)


def _memories() -> Iterator[tuple[str, int, int]]:
    total, available = ram_bytes()
    yield "RAM", total - available, total
    limit = cgroup.memory_limit_bytes()
    room = cgroup.memory_available_bytes() if limit is not None else None
    if room is not None:
        yield "container limit", max(limit - room, 0), limit
    for item in accelerators():
        yield _device(item), item.total_bytes - item.free_bytes, item.total_bytes


def _screen(found: Sequence[Level]):
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(pad_edge=False)
    for title in ("memory", "", "used", "highest", "of"):
        table.add_column(title, justify="left" if title in ("memory", "") else "right", no_wrap=True)
    for level in found:
        bar = ProgressBar(total=level.total_bytes, completed=level.used_bytes, width=24)
        table.add_row(level.name, bar, *map(_gib, (level.used_bytes, level.highest_bytes, level.total_bytes)))
    return table


def _plain(found: Sequence[Level]) -> str:
    return "; ".join(f"{level.name} {_gib(level.used_bytes)} of {_gib(level.total_bytes)}" for level in found)


def _device(item: Accelerator) -> str:
    return f"{item.kind}:{item.index} {item.name}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
