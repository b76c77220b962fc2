"""``scu-trainer modes``: estimates how long a job takes at each of its sizes, from a few real steps of each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import psutil

from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import figures_table, guarded, plain_console, stdout_to_stderr
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.report.words import duration
from scu_trainer.run_files import format_gib
from scu_trainer.shipped import recipe

DESCRIPTION = """\
Trains a few steps of a job in each of its modes, in fresh processes, and prints what the full run would take. Nothing
is saved. Flags of `scu-trainer train` are accepted as well."""

ALL_MODES = ("tiny", "standard", "extended")


@dataclass(frozen=True)
class ModeMeasurement:
    """The measurement of one mode. ``figures``: the fields of ``train.session.test_run.Estimate``, total_s, and, if the
    mode overrides values of the file, a ``note`` that lists them; None if the mode could not run, for the reason in
    ``error``."""

    mode: str
    figures: Optional[dict[str, Any]]
    error: Optional[str] = None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer modes", description=DESCRIPTION)
    parser.add_argument(
        "--config", type=recipe, help="YAML or JSON file of the job; default: the defaults of scu-trainer train"
    )
    parser.add_argument("--mode", nargs="+", metavar="MODE", help="which: tiny, standard, extended; default: all")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # set in the new process
    return parser


@guarded
def main(argv: list[str]) -> int:
    options, flags = parse_with_fields(_parser(), argv)
    modes = _chosen_modes(options.mode)
    words = [*([] if options.config is None else ["--config", options.config]), *flags]
    if options.measure:
        print(json.dumps(measure_in_this_process(modes[0], options.config, flags)))
        return 0
    return report(modes, lambda mode: measure_in_new_process(mode, words), options.json)


def _chosen_modes(wanted: Optional[Sequence[str]]) -> list[str]:
    for mode in wanted or ():
        if mode not in ALL_MODES:
            raise SettingsError(f"unknown mode {mode!r}{did_you_mean(mode, ALL_MODES)}; modes: {', '.join(ALL_MODES)}")
    return [mode for mode in ALL_MODES if not wanted or mode in wanted]


def measure_in_this_process(mode: str, config: Optional[str], flags: Sequence[str]) -> dict[str, Any]:
    """Run a few steps in this process and return their figures. Raises UserError if the job cannot run here."""
    from scu_trainer.cli.configuration import read_job
    from scu_trainer.train.session.test_run import measure
    from scu_trainer.train.step.distributed.deepspeed_start import leave_process_group

    with stdout_to_stderr():  # the parent process reads the last line of stdout
        job = read_job(config, [*flags, "--mode", mode])
        estimate = measure(job, before_s=time.time() - psutil.Process().create_time())
        leave_process_group(True)
    note = next((note for note in job.notes if note.startswith("mode ")), None)
    return {**asdict(estimate), "total_s": estimate.total_s, **({"note": note} if note else {})}


def measure_in_new_process(mode: str, words: Sequence[str]) -> ModeMeasurement:
    """Measure a mode in a new process, so that its peak memory and start-up time are its own."""
    command = [sys.executable, "-m", "scu_trainer.cli.modes", "--measure", "--mode", mode, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        return ModeMeasurement(mode, None, errors[-1].removeprefix("error: "))
    return ModeMeasurement(mode, json.loads(done.stdout.strip().splitlines()[-1]))


def report(modes: Sequence[str], measure: Callable[[str], ModeMeasurement], as_json: bool) -> int:
    """Measure each mode and print the figures. Returns 2 if one of them cannot run here."""
    console, measured = plain_console(), []
    for mode in modes:
        if as_json:
            measured.append(measure(mode))
            continue
        with console.status(f"{mode} ({len(measured) + 1} of {len(modes)})"):
            measured.append(measure(mode))
    if as_json:
        print(json.dumps({item.mode: item.figures or {"error": item.error} for item in measured}, indent=2))
    else:
        if any(item.figures for item in measured):
            console.print(_table(measured))
        for item in measured:
            if item.figures and "note" in item.figures:
                console.print(item.figures["note"], soft_wrap=True)
        for error in dict.fromkeys(item.error for item in measured if item.error is not None):
            names = ", ".join(item.mode for item in measured if item.error == error)
            console.print(f"{names}: {error}", soft_wrap=True)
    return 2 if any(item.error is not None for item in measured) else 0


def _table(measured: Sequence[ModeMeasurement]):
    titles = ("mode", "rows", "steps", "s/step", "evaluations", "total", "peak memory")
    rows = [[item.mode, *_cells(item.figures)] for item in measured if item.figures is not None]
    return figures_table(titles, rows, left=["mode"], no_wrap=True)


def _cells(figures: dict[str, Any]) -> list[str]:
    rows = "stream" if figures["rows"] is None else f"{figures['rows']:,}"
    return [
        rows,
        f"{figures['steps']:,}",
        f"{figures['seconds_per_step']:.2f}",
        f"{figures['evaluations']} x {figures['evaluation_s']:.1f} s",
        duration(figures["total_s"]),
        format_gib(figures["peak_bytes"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
