"""``scu-trainer compare``: compares controllers at equal tokens, over several seeds."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.comparison import screen as screens
from scu_trainer.cli.comparison.plan import arms_of, check_words, plan_of, reference_of, with_threads_and_devices
from scu_trainer.cli.comparison.runs import CONFIDENCE, ComparisonSession, exit_code, known_runs
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import guarded, plain_console
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import SettingsError
from scu_trainer.report.comparison.report import COMPARISON_FILE, is_comparison, read_record
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan, read_plan, require_same
from scu_trainer.runs.studies.comparison_state import read_states
from scu_trainer.shipped import recipe
from scu_trainer.train.run_directory.logs import run_log

DESCRIPTION = """\
Trains the same job under several controllers, each over several seeds, with the
same data, order, initial weights and tokens, and reports which differences the
results support. Any field of `scu-trainer train` may follow, for all arms. If it
is killed or stopped, run the same command again: finished runs are kept."""

EPILOG = """\
arms: none, fixed[:LAMBDA], weight_decay[:VALUE], schedule[:linear|cosine],
      original, model[:TARGET]
Without a value, fixed and weight_decay mean three arms each, and schedule two.
Exit codes: 0 all runs are done, 1 a run failed (the table says which and why),
2 you can fix it, 3 stopped by request."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scu-trainer compare",
        usage="%(prog)s --config FILE [options] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=recipe, help="YAML or JSON file of the job")
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="arms, separated by commas or spaces; default: all forms below"
    )
    parser.add_argument("--arm", action="append", default=[], metavar="NAME:FIELD=VALUE,...", help="an arm of your own")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"], metavar="N", help="default: 0 1 2")
    parser.add_argument(
        "--output_dir", "--output", default="runs/compare", metavar="FOLDER", help="default: runs/compare"
    )
    parser.add_argument("--jobs", type=int, help="runs at a time; default: as cores and memory allow, one per GPU")
    parser.add_argument(
        "--reference", default="none", metavar="ARM", help="arm that the others are compared with (none)"
    )
    parser.add_argument("--confidence", type=float, default=CONFIDENCE, help=f"level of the intervals ({CONFIDENCE})")
    parser.add_argument("--retry_failed", action="store_true", help="retry failed runs")
    parser.add_argument("--list", action="store_true", help="show the arms and what each sets, and stop")
    parser.add_argument("--dry_run", action="store_true", help="show what would run, and stop")
    parser.add_argument("--table", metavar="FOLDER", help="print the table of an existing comparison, and stop")
    return parser


@guarded
def main(argv: list[str], backend: Optional[comparison.ComparisonBackend] = None) -> int:
    console = plain_console()
    options, flags = parse_with_fields(_parser(), argv)
    if options.table is not None:
        return _show_table(options.table, argv, console)
    check_words(options, flags)
    with run_log():  # for messages of libraries while the settings are read
        arms = arms_of(options, flags)
        reference = reference_of(options.reference, arms)
        if options.list:
            screens.print_arms(console, arms)
            return 0
        # The recorded command describes the comparison; --retry_failed only concerns this start.
        lasting = [word for word in argv if word not in ("--retry_failed", "--retry-failed")]
        plan = plan_of(options, flags, arms, "scu-trainer compare " + shlex.join(lasting))
    plan, devices = with_threads_and_devices(plan, options.jobs)
    if options.dry_run:
        return _dry_run(plan, devices, console)
    backend = backend or comparison.ComparisonBackend()
    return ComparisonSession(plan, reference, devices, console, backend, options.confidence, options.retry_failed).run()


def _show_table(folder: str, argv: Sequence[str], console: Any) -> int:
    if len(argv) > (1 if f"--table={folder}" in argv else 2):
        raise SettingsError("--table prints an existing comparison and takes no other option")
    if not is_comparison(Path(folder)):
        raise SettingsError(f"{folder} holds no {COMPARISON_FILE}; give the output_dir of a comparison")
    record = read_record(Path(folder))
    screens.print_record(console, record)
    return exit_code(record)


def _dry_run(plan: ComparisonPlan, devices: Sequence[str], console: Any) -> int:
    existing_plan = read_plan(plan.folder)
    if existing_plan is not None:
        require_same(existing_plan, plan)
        plan = existing_plan
    screens.print_arms(console, plan.arms)
    states = read_states(plan, known_runs(plan.folder), retry_failed=False)
    done = sum(state.status == "finished" for state in states.values())
    screens.print_wrapped(console, screens.start_line(plan, devices) + f", {done} done before")
    example = comparison.words(plan, next((key for key in plan.runs if states[key].status != "finished"), plan.runs[0]))
    console.print("such as:", shlex.join(example), soft_wrap=True)
    return 0
