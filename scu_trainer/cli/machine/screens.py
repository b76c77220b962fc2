"""Output of ``scu-trainer hardware``: tables for terminals, lines for pipes and logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scu_trainer.cli.main import figures_table
from scu_trainer.figures import count_text
from scu_trainer.hardware.watching.monitor import MonitorReading, RunReading
from scu_trainer.run_files import format_gib

if TYPE_CHECKING:
    from scu_trainer.hardware.profile import HardwareProfile


# -- profile -----------------------------------------------------------------------------------------------------------


def profile_facts(machine: HardwareProfile) -> Iterator[tuple[str, str]]:
    yield "system", f"{machine.system}, Python {machine.python}"
    if not machine.gpus:
        yield "GPU", "none that torch can use"
    for gpu in machine.gpus:
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        yield (
            f"{gpu.kind}:{gpu.index}",
            f"{gpu.name}, {format_gib(gpu.free_bytes)} free of {format_gib(gpu.total_bytes)}{capability}",
        )
        if gpu.kind == "cuda" and gpu.users is None:
            yield "", "unknown whether anything else uses it: nvidia-smi does not report it"
        for user in gpu.users or ():
            used = "memory unknown" if user.used_bytes is None else format_gib(user.used_bytes)
            yield "", f"used by process {user.pid} ({user.name}): {used}"
    cpu, ram = machine.cpu, machine.ram
    cores = "" if cpu.cores is None else f"{cpu.cores} cores, "
    yield "CPU", f"{cpu.name} ({cpu.architecture}), {cores}{cpu.threads} threads, {cpu.usable:g} usable here"
    yield "", "instructions: " + (" ".join(cpu.features) or "none of those that matter are known")
    limit = "" if ram.limit_bytes is None else f", container limit {format_gib(ram.limit_bytes)}"
    yield (
        "RAM",
        f"{format_gib(ram.available_bytes)} available of {format_gib(ram.total_bytes)}{limit}, "
        f"swap {format_gib(ram.swap_bytes)}",
    )
    for disk in machine.disks:
        speed = disk.note if disk.write_bytes_per_s is None else f"writes {disk.write_bytes_per_s / 1e6:,.0f} MB/s"
        yield "disk", f"{disk.path}: {format_gib(disk.free_bytes)} free of {format_gib(disk.total_bytes)}, {speed}"
    installed = [f"{name} {version}" for name, version in machine.packages.items() if version is not None]
    yield "packages", ", ".join(installed)
    yield "", "not installed: " + ", ".join(name for name, version in machine.packages.items() if version is None)


# -- monitor -----------------------------------------------------------------------------------------------------------


def screen(reading: MonitorReading):
    """Return a table of memory for a terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar

    rows = []
    for level in reading.levels:
        bar = ProgressBar(total=level.total_bytes, completed=level.used_bytes, width=18)
        rows.append([level.name, bar, *map(format_gib, (level.used_bytes, level.highest_bytes, level.total_bytes))])
    table = figures_table(["memory", "", "used", "highest", "of"], rows, left=["memory", ""], no_wrap=True)
    return table if reading.run is None else Group(table, *run_lines(reading.run))


def reading_line(reading: MonitorReading) -> str:
    """Return one line on memory for a pipe or a log."""
    levels = [
        f"{level.name} {format_gib(level.used_bytes)} of {format_gib(level.total_bytes)}" for level in reading.levels
    ]
    return "; ".join([*levels, *(run_lines(reading.run) if reading.run is not None else ())])


def run_lines(run: RunReading) -> list[str]:
    """Return lines on the memory of a run, its progress, and its micro-batches."""
    count = count_text(run.processes, "process", "processes")
    memory = (
        f"{count}, {format_gib(run.rss_bytes)} resident"
        if run.pss_bytes is None
        else f"{count}, {format_gib(run.pss_bytes)}"
    )
    lines = [f"run: {memory}" if run.gpu_bytes is None else f"run: {memory}, GPU {format_gib(run.gpu_bytes)}"]
    if run.status is not None:
        step = "before its first step" if run.step is None else f"step {run.step} of {run.max_steps}"
        lines.append(f"{run.status}, {step}")
    if run.tokens_per_chunk is not None:
        limit = "" if run.limit_bytes is None else f", limit {format_gib(run.limit_bytes)}"
        lines.append(f"micro-batches of {run.tokens_per_chunk:,} tokens ({run.rows_per_chunk} rows){limit}")
    return lines
