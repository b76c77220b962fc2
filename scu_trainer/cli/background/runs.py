"""``scu-trainer runs``: trains in the background, shows runs, stops and resumes them. Without arguments: a menu."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from scu_trainer import shipped
from scu_trainer.cli.background import screens
from scu_trainer.cli.background.seeds import SEED_INFIX, configuration_with_seed, runs_of, seeds_of, spread_lines
from scu_trainer.cli.configuration import check_early
from scu_trainer.cli.configuration_file import entries_by_our_names, read_file
from scu_trainer.cli.fields import check_known
from scu_trainer.cli.main import guarded, plain_console
from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.meaning import is_on
from scu_trainer.cli.names.translation import flags_of, name_of, translated
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.planning import OPTIMAL
from scu_trainer.errors import SettingsError
from scu_trainer.runs.control import RunBackend, StartRequest, check, resume, start, stop
from scu_trainer.runs.menu import Menu
from scu_trainer.runs.monitor import follow, log_of, watch
from scu_trainer.runs.progress import last_lines
from scu_trainer.runs.state import report
from scu_trainer.runs.store import ROOT, Options, RunRecord, all_runs, find_run, free_name
from scu_trainer.shipped import recipe

LAUNCHERS = ("python", "accelerate", "deepspeed", "torchrun")
ACTIONS = "start|list|status|monitor|logs|stop|resume"
REPLACED_FLAGS = ("output_dir", "config")

EPILOG = """\
A run is a directory below --root (runs). NAME may also be a path: list, status,
monitor and logs also show runs that were started by hand.
Exit codes: 0 done, 2 you can fix it."""


@guarded
def main(argv: list[str], backend: Optional[RunBackend] = None) -> int:
    return _main(argv, backend or RunBackend())


def _main(argv: list[str], backend: RunBackend) -> int:
    if not argv:
        return _show_menu(backend)
    parser = _parser()
    options, flags = parser.parse_known_args(argv)
    if options.action == "start":
        return _start_runs(options, flags, backend)
    if flags:
        parser.parser_of_action(options.action).error(f"unrecognized arguments: {' '.join(flags)}")
    if options.root.is_file():
        raise SettingsError(f"--root {options.root} is a file; give the directory that holds the runs")
    actions = {"list": _status, "status": _status, "monitor": _monitor, "logs": _logs, "stop": _stop, "resume": _resume}
    return actions[options.action](options, backend)


def _parser() -> Parser:
    parser = Parser(
        prog="scu-trainer runs",
        description="Train in the background. Without arguments: a menu.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)  # also allowed before the action
    actions = parser.add_subparsers(dest="action", required=True, metavar=ACTIONS, parser_class=Parser)
    _add_start(actions)
    action = _add_action(actions, "list", "list all runs, one per line")
    action.add_argument("--json", action="store_true", help="as JSON: an array")
    action.set_defaults(name=None)
    action = _add_action(actions, "status", "show what a run is doing; without a name, all runs", name="?")
    action.add_argument("--json", action="store_true", help="as JSON: one object, or an array without a name")
    action = _add_action(actions, "monitor", "watch a run until it ends; Ctrl-C leaves it running", name=None)
    action.add_argument("--refresh", type=_above_zero, default=5.0, help="seconds between updates (5)")
    action = _add_action(actions, "logs", "print the last lines of a run's output", name=None)
    action.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")
    action.add_argument("-n", "--lines", type=_count, default=50, help="number of lines (50)")
    action = _add_action(actions, "stop", "write a checkpoint and end; a queued run leaves the queue", name="+")
    action.add_argument("--now", action="store_true", help="end all its processes immediately, without a checkpoint")
    action.add_argument("--timeout", type=_above_zero, help="seconds to wait for the end; default: without a limit")
    _add_action(actions, "resume", "run the same command again, from the newest complete checkpoint", name=None)
    return parser


def _add_action(actions, action: str, text: str, name: Optional[str] = "") -> argparse.ArgumentParser:
    """Add the parser of an action. ``name``: how many names it takes (``nargs``); "" for none, and None for one."""
    parser = actions.add_parser(action, help=text, description=text)
    if name != "":
        parser.add_argument("name", metavar="NAME", nargs=name, help="name of the run, or its directory")
    parser.add_argument("--root", type=Path, default=argparse.SUPPRESS, help="directory that holds the runs (runs)")
    return parser


def _add_start(actions) -> None:
    default = Options()
    parser = _add_action(actions, "start", "start a run that outlives this terminal; any flag of train may follow")
    parser.usage = "scu-trainer runs start [--config FILE] [--name NAME] [--FIELD VALUE ...]"
    parser.add_argument("--config", type=recipe, help=f"as for train; default: {OPTIMAL}, which hardware config writes")
    parser.add_argument("--name", help="name of the run and its directory; default: the name of output_dir in the file")
    parser.add_argument("--device", default=default.device, help="auto (shortest queue), cpu, gpu-0, ...")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default=default.launcher, help="what starts the run; python: one process"
    )
    parser.add_argument(
        "--nice", type=int, default=default.nice, help="niceness: 0 like other programs, 19 lowest priority (10)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores but one")
    parser.add_argument(
        "--numa_node", default=default.numa_node,
        help="NUMA node to stay on, if there are several: a number, off, or auto (the GPU's own)",
    )  # fmt: skip
    parser.add_argument(
        "--max_ram_percent", type=float, metavar="N", default=default.max_ram_percent,
        help="wait while more memory than this is used (90)",
    )  # fmt: skip
    parser.add_argument(
        "--max_gpu_percent", type=float, metavar="N", default=default.max_gpu_percent,
        help="wait while more of the GPU's memory than this is used (90)",
    )  # fmt: skip


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


# -- start, stop, resume -----------------------------------------------------------------------------------------------


def _start_runs(options: argparse.Namespace, flags: list[str], backend: RunBackend) -> int:
    started = start_runs(options, flags, backend)
    for name, record in started:
        screens.say(f"{name} has started in the background, process {record.process.pid}")
    if SEED_INFIX in started[-1][0] and "--seed" in started[-1][1].flags:
        screens.say("runs on one device take turns; for mean and spread once they are finished:")
        screens.say(f"  scu-trainer runs status {started[0][0].rpartition(SEED_INFIX)[0]}{_root_flag(options.root)}")
    else:
        _print_next_commands(started[0][0], options.root)
    return 0


def parse_runs_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of ``scu-trainer runs`` that are not flags of training."""
    return _parser().parse_args(words)


def start_runs(options: argparse.Namespace, flags: Sequence[str], backend: RunBackend) -> list[tuple[str, RunRecord]]:
    """Start a run, or one per seed; return names and records. ``flags``: of training, never read as our own options."""
    flags, _ = translated(list(flags), known_names())
    _check_flags(flags)
    check_known(flags, _parser().parser_of_action("start")._option_string_actions)
    options.config = options.config or _default_config(flags)
    file = None if options.config is None else Path(options.config)
    entries, text = ({}, "{}\n") if file is None else (read_file(file), file.read_bytes().decode())
    check_early(options.config, flags)
    name = options.name or _free_name(options, entries)
    settings = Options(
        options.launcher, _device(options, flags), options.nice, options.threads,
        options.max_ram_percent, options.max_gpu_percent, options.numa_node,
    )  # fmt: skip
    seeds = seeds_of(entries, flags)
    requests = [
        StartRequest(f"{name}{SEED_INFIX}{seed}", *configuration_with_seed(entries, text, flags, seed), settings)
        for seed in seeds
    ]
    requests = requests or [StartRequest(name, text, tuple(flags), settings)]
    for request in requests:
        check(request, options.root)
    return [(request.name, start(request, options.root, backend)) for request in requests]


def _default_config(flags: Sequence[str]) -> Optional[str]:
    """Return the configuration that was written for this machine; None if there is none and ``flags`` are the whole
    configuration. Raises SettingsError if there are no flags either."""
    if not Path(OPTIMAL).is_file():
        if flags:
            return None
        raise SettingsError(
            f"there is no --config and no {OPTIMAL} here; give one, or write it: scu-trainer hardware config [--FIELD "
            "VALUE ...]; or give flags of train, such as --model_name_or_path and --dataset"
        )
    screens.say(f"{OPTIMAL} is used, because there is no --config")
    return OPTIMAL


def _check_flags(flags: Sequence[str]) -> None:
    from scu_trainer.cli.train import MODES

    for flag in (word for word in flags if word.startswith("--")):
        name = name_of(flag)
        if name in REPLACED_FLAGS:
            raise SettingsError(f"{flag}: a background run writes to ROOT/NAME; give --root and --name instead")
        if f"--{name}" in MODES:
            raise SettingsError(f"{flag} does not train; use scu-trainer train {flag} --config ...")


def _free_name(options: argparse.Namespace, entries: dict) -> str:
    """Return a free name, made from output_dir or from the name of the file, which may contain spaces."""
    given = Path(str(entries.get("output_dir") or Path(options.config or "run").stem)).name
    wanted = re.sub(r"[^\w.-]+", "-", given).strip("-._")[:48] or "run"
    taken = [path.name for path in options.root.iterdir()] if options.root.is_dir() else []
    taken += [name.rpartition(SEED_INFIX)[0] for name in taken if SEED_INFIX in name]
    return free_name(wanted, taken)


def _device(options: argparse.Namespace, flags: Sequence[str]) -> str:
    """Return the device to wait for. A run that uses no GPU must not wait for one."""
    in_file = {} if options.config is None else entries_by_our_names(options.config, known_names()).entries
    uses_cpu = is_on({**in_file, **dict(flags_of(flags))}.get("use_cpu"))
    return "cpu" if uses_cpu and options.device == "auto" else options.device


def _root_flag(root: Path) -> str:
    return "" if root == ROOT else f" --root {shlex.quote(str(root))}"


def _print_next_commands(name: str, root: Path) -> None:
    for action, text in (("monitor", "watch it"), ("logs -f", "what it prints"), ("stop", "checkpoint, then end")):
        screens.say(f"  scu-trainer runs {action} {name}{_root_flag(root)}".ljust(48) + f"  # {text}")


def _stop(options: argparse.Namespace, backend: RunBackend) -> int:
    runs = [find_run(name, options.root) for name in options.name]
    code = 0
    targets = [(run, report(run, backend.machine)) for run in runs]
    # Queued runs are stopped first, because they would start as soon as the run before them has ended.
    for run, before in sorted(targets, key=lambda pair: pair[1].state.status != "queued"):
        if before.state.status == "unreadable":  # it may be running
            screens.say(f"{run.name} cannot be stopped: {before.state.detail}")
            code = 2
            continue
        if not before.state.is_alive and (not options.now or before.state.status == "copied"):
            screens.say(f"{run.name} is not running: {before.state.status}{_parenthesized(before.state.detail)}")
            continue
        if not options.now and before.state.status in ("running", "stopping"):
            screens.say(
                f"{run.name}: finishing the step and writing a checkpoint{_parenthesized(before.state.detail)} ..."
            )
        after = stop(run, backend, options.timeout, options.now)
        if after.state.is_alive:
            screens.say(f"{run.name} has not ended after {options.timeout:g} s; wait, or runs stop {run.name} --now")
            code = 2
            continue
        checkpoint = after.progress.checkpoint
        kept = f"{checkpoint} is whole" if checkpoint else "there is no checkpoint"
        screens.say(f"{run.name}: {after.state.status}{_parenthesized(after.state.detail)}; {kept}")
    return code


def _parenthesized(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _resume(options: argparse.Namespace, backend: RunBackend) -> int:
    run = find_run(options.name, options.root)
    old_record = run.record()
    record, checkpoint = resume(run, backend)
    if old_record is not None and old_record.cwd != record.cwd:
        screens.say(f"{run.name} was started in {old_record.cwd}, which is gone; paths now start from {record.cwd}")
    begins = f"resumes from {checkpoint}" if checkpoint else "starts over: there is no checkpoint"
    screens.say(f"{run.name} {begins}, process {record.process.pid}")
    _print_next_commands(options.name, options.root)
    return 0


# -- looking -----------------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace, backend: RunBackend) -> int:
    seeds = runs_of(options.name, options.root) if options.name is not None else []
    is_job = bool(seeds) and not (options.root / options.name).exists()
    if options.name is not None and not is_job:
        run_report = report(find_run(options.name, options.root), backend.machine)
        if options.json:
            print(json.dumps(run_report.as_dict(), indent=2))
        else:
            plain_console().print(screens.facts(run_report))
        return 0
    reports = [report(run, backend.machine) for run in (seeds if is_job else all_runs(options.root))]
    if options.json:
        print(json.dumps([item.as_dict() for item in reports], indent=2))
        return 0
    screens.show_table(reports, options.root)
    for line in spread_lines(reports) if is_job else ():
        screens.say(line)
    return 0


def _monitor(options: argparse.Namespace, backend: RunBackend) -> int:
    run = find_run(options.name, options.root)
    screens.show_views(watch(run, options.refresh, backend.machine, backend.sleep))
    return 0


def _logs(options: argparse.Namespace, backend: RunBackend) -> int:
    run = find_run(options.name, options.root)
    if not options.follow:
        if not log_of(run).is_file():
            raise SettingsError(f"{run.name} has no log yet; see runs status {options.name}")
        print("\n".join(last_lines(log_of(run), options.lines)))
        return 0
    try:
        for text in follow(run, options.lines, backend.machine, backend.sleep):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print()  # Ctrl-C is the usual way to leave a log
    return 0


def _show_menu(backend: RunBackend) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError(
            f"{_parser().format_help()}\ngive one of these actions: without a terminal there is no menu"
        )
    return Menu(lambda words: _main(list(words), backend), input, screens.say, ROOT, shipped.here("recipes")).run()
