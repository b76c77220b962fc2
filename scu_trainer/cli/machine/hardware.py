"""``scu-trainer hardware``: ``profile`` describes this machine, ``check`` checks requirements, ``monitor`` shows memory
live, ``optimize`` removes our own leftovers. ``recommend`` and ``plan`` are other names of ``scu-trainer plan``;
``config`` also writes the settings to a file."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Optional

from scu_trainer.cli.fields import check_known
from scu_trainer.cli.machine.optimize import optimize
from scu_trainer.cli.main import facts_table, figures_table, guarded, plain_console
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.planning import OPTIMAL
from scu_trainer.errors import RequirementError, SettingsError
from scu_trainer.figures import count_text
from scu_trainer.hardware.probe import Accelerator, accelerators, installed_version
from scu_trainer.hardware.profile import HardwareProfile, profile
from scu_trainer.hardware.watching.monitor import CsvLog, MonitorReading, RunReading, device_name, find_target, readings
from scu_trainer.run_files import format_gib
from scu_trainer.shipped import recipe

PLANS = ("recommend", "plan")


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer hardware")
    names = "profile|check|recommend|config|monitor|optimize"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names, parser_class=Parser)
    profile = actions.add_parser("profile", help="GPUs and the processes that use them, CPU, memory, disks, versions")
    profile.add_argument("--json", action="store_true", help="as one JSON object")
    profile.add_argument("--no_disk_speed", action="store_true", help="do not measure disks, which writes a file")
    check = actions.add_parser(
        "check", help="versions, devices, memory, disk; with --config and flags, also what that job needs"
    )
    check.add_argument(
        "--gpu", action="store_true", help="check only for a GPU that torch can use; exit code 2 if there is none"
    )
    check.add_argument("--config", type=recipe, help="YAML or JSON file of a job, and any flag of scu-trainer train")
    actions.add_parser(PLANS[0], help="the same as scu-trainer plan: find settings with which a job fits a machine")
    actions.add_parser("config", help="the same, written to optimal_config.yaml (--output FILE) for --config to read")
    monitor = actions.add_parser("monitor", help="memory of the machine and its GPUs, live, and of one run")
    monitor.add_argument("run", nargs="?", metavar="RUN_OR_PID", help="directory of a run, or a process id")
    monitor.add_argument("--duration", type=float, help="seconds; default: until Ctrl-C or the end of the run")
    monitor.add_argument("--interval", type=float, default=1.0, help="seconds between readings; default: 1")
    monitor.add_argument("--csv", metavar="FILE", help="also append each reading to FILE; - prints only the rows")
    optimize = actions.add_parser("optimize", help="remove caches and leftovers of scu-trainer that nothing uses")
    optimize.add_argument("--runs", default="runs", help="folder whose runs are checked; default: runs")
    optimize.add_argument("--cache_dir", help="default: SCU_TRAINER_CACHE, or ~/.cache/scu_trainer")
    optimize.add_argument("--keep_caches", action="store_true", help="only remove leftovers of runs that ended")
    optimize.add_argument("--dry_run", action="store_true", help="list leftovers without removing them")
    optimize.add_argument("--yes", action="store_true", help="do not ask")
    return parser


@guarded
def main(argv: list[str]) -> int:
    if argv and argv[0] in (*PLANS, "config"):
        return _plan(*argv)
    parser = _parser()
    options, flags = parser.parse_known_args(argv)
    if options.action == "check" and not options.gpu:
        check_known(flags, parser.parser_of_action("check")._option_string_actions)
    elif flags:
        parser.parser_of_action(options.action).error(f"unrecognized arguments: {' '.join(flags)}")
    if options.action == "profile":
        return _profile(options)
    if options.action == "monitor":
        return _monitor(options)
    if options.action == "optimize":
        return optimize(options)
    if options.gpu:
        return _check_gpu()
    from scu_trainer.cli.machine.check import check_recipe

    return check_recipe(options.config, flags)


def _plan(action: str, *words: str) -> int:
    from scu_trainer.cli.planning.plan import main as plan

    is_named = action != "config" or any(word.partition("=")[0] == "--output" for word in words)
    return plan([*words, *(() if is_named else ("--output", OPTIMAL))])


# -- profile -----------------------------------------------------------------------------------------------------------


def _profile(options: argparse.Namespace) -> int:
    from scu_trainer.data import default_cache_dir

    machine = profile((Path("runs"), default_cache_dir(None)), measure_disks=not options.no_disk_speed)
    if options.json:
        print(json.dumps(asdict(machine), indent=2))
    else:
        plain_console().print(facts_table(profile_facts(machine)))
    return 0


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


# -- check -------------------------------------------------------------------------------------------------------------


def _check_gpu() -> int:
    gpus = accelerators()
    if not gpus:
        on_cpu = "scu-trainer train --use_cpu true"
        raise RequirementError(f"no GPU that torch can use: {_reason_for_no_gpu()}. Training on the CPU: {on_cpu}")
    for item in gpus:
        print(
            f"{device_name(item)}: {format_gib(item.free_bytes)} free of {format_gib(item.total_bytes)}; "
            f"{_abilities(item)}"
        )
    return 0


def _reason_for_no_gpu() -> str:
    version = installed_version("torch")
    if version is None:
        return "torch is not installed (pip install torch)"
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build; if this machine has a GPU, pip install a CUDA build of torch"
    return f"torch {torch.__version__} is built for GPUs but sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES"


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


def _monitor(options: argparse.Namespace) -> int:
    from rich.live import Live

    if options.interval <= 0 or (options.duration is not None and options.duration <= 0):
        raise SettingsError("interval and duration are seconds above 0, for instance --interval 1 --duration 60")
    only_rows = options.csv == "-"
    console = plain_console(stderr=only_rows)
    target = None if options.run is None else find_target(options.run)
    log = None if options.csv is None else CsvLog(options.csv)
    last: Optional[MonitorReading] = None
    shows = console.is_terminal and not only_rows
    try:
        with Live(console=console, transient=True) if shows else contextlib.nullcontext() as live:
            for last in readings(options.duration, options.interval, target):
                if log is not None:
                    log.append(last)
                if live is not None:
                    live.update(screen(last))
                elif not only_rows:  # a pipe or a log: one line for each reading
                    console.print(reading_line(last), soft_wrap=True)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the usual way to leave a monitor
    if shows and last is not None:
        console.print(screen(last))
    if target is not None and not target.is_alive:
        console.print(target.ending(), soft_wrap=True)
    return 0


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
