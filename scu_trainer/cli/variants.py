"""``scu-trainer variants``: runs memory-efficient paths for a few steps, to show what each costs and that it learns."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import psutil

from scu_trainer.cli.main import figures_table, guarded, plain_console
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import ModelError, SettingsError, did_you_mean
from scu_trainer.hardware.probe import has_cuda, installed_version
from scu_trainer.run_files import write_json
from scu_trainer.runs.launch import require_files
from scu_trainer.runs.studies.budget import Attempt, WeightCounts, first_that_fits
from scu_trainer.runs.studies.variant_table import BASELINE, BY_NAME, LOOPS, VARIANTS, Variant
from scu_trainer.runs.studies.variants import VariantPlan, VariantResult, find_violations, missing, run
from scu_trainer.settings import size_in_gib
from scu_trainer.shipped import recipe

BYTES_PER_VALUE = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
BROKEN_PROMISE = 1
"""Exit code if a path does not keep a promise of the table."""

DESCRIPTION = """\
Trains each path in fresh processes with the real libraries and all three loops, and prints what it cost and what it
learned. Without names: all. With --limit: tries them in order of speed and stops at the first that fits."""

PARTS = ("weights", "gradients", "optimizer", "regularization", "activations", "logits", "exchange", "overhead")
"""Parts of a predicted peak (hardware/estimate.py), without the libraries, which are the same for all variants."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer variants", description=DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help="paths to run; default: all")
    parser.add_argument("--list", action="store_true", help="show what each path does and needs, and stop")
    parser.add_argument("--limit", help="memory of the device that may be used, such as 4GB or 39GiB")
    parser.add_argument("--tuning", choices=("lora", "full"), help="with --limit: what is trained; default: lora")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each path; default: 8")
    parser.add_argument(
        "--config", type=recipe, help="your own job; default: a Llama of 30 million weights on docstrings"
    )
    parser.add_argument("--model_name_or_path", help="train this model instead")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    return parser


@guarded
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    console = plain_console()
    chosen = _chosen_variants(options)
    if options.tuning is not None and (options.names or options.limit is None):
        raise SettingsError(
            "--tuning selects the paths that --limit tries, so it needs --limit and no names of paths; drop it"
            + ("" if options.names else ", or add --limit")
        )
    has_gpu = has_cuda()
    if options.list:
        titles = ("variant", "what it saves or is for", "here")
        rows = [[variant.name, variant.saves, missing(variant, has_gpu) or "can run"] for variant in chosen]
        console.print(figures_table(titles, rows, left=titles, overflow="fold"))  # the user types these names
        return 0
    require_files()
    if options.steps < 2:
        raise SettingsError(f"steps is {options.steps}; it must be 2 or more: the first step is not timed")
    with tempfile.TemporaryDirectory(prefix="scu-variants-") as scratch:
        plan = _plan_of(options, Path(scratch))
        if options.limit is not None:
            return _search(options, chosen, plan, has_gpu, console)
        return _run_all(options, chosen, plan, has_gpu, console, argv)


def _chosen_variants(options: argparse.Namespace) -> list[Variant]:
    for name in options.names:
        if name not in BY_NAME:
            raise SettingsError(f"unknown variant {name!r}{did_you_mean(name, BY_NAME)}; known: {', '.join(BY_NAME)}")
    return [variant for variant in VARIANTS if not options.names or variant.name in options.names]


def _plan_of(options: argparse.Namespace, scratch: Path) -> VariantPlan:
    config = None if options.config is None else Path(options.config)
    if config is not None and not config.is_file():
        raise SettingsError(f"cannot read the configuration {config}: it is not a file; give a YAML or JSON file")
    name = options.model_name_or_path
    extra = () if name is None else ("--model_name_or_path", name)
    model = None
    if config is None:
        model = Path(_last_line_of_module("scu_trainer.train.fixtures.reference_model") if name is None else name)
    return VariantPlan(model, scratch, options.steps, config=config, extra=extra)


def _last_line_of_module(module: str, *arguments: str) -> str:
    """Run a module in a separate process, with its own memory and imports, and return the last line that it prints."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{module} failed")
    return done.stdout.strip().splitlines()[-1]


# -- all of them -------------------------------------------------------------------------------------------------------


def _run_all(options, chosen: Sequence[Variant], plan: VariantPlan, has_gpu: bool, console, argv: list[str]) -> int:
    outcomes = []
    for variant in chosen:
        with console.status(f"{variant.name} ({len(outcomes) + 1} of {len(chosen)})"):
            outcome = run(variant, plan, has_gpu)
        outcomes.append(outcome)
        result = outcome.message if outcome.status == "missing" else outcome.status
        console.print(f"{outcome.name}: {result}", soft_wrap=True)
    console.print(_table(outcomes))
    if any(outcome.parts for outcome in outcomes):
        console.print(_parts_table(outcomes))
    broken = find_violations(outcomes, loops_are_on=plan.config is None)
    for line in broken:
        console.print(f"broken: {line}", soft_wrap=True)
    if options.json:
        write_json(options.json, record(outcomes, plan, argv))
        console.print(f"written: {options.json}", soft_wrap=True)
    return BROKEN_PROMISE if broken else 0


def _table(outcomes: Sequence[VariantResult]):
    titles = ("variant", "peak memory", "step", "held-out bits per token", "loops")
    return figures_table(titles, rows_of(outcomes), left=["variant", "loops"], title="paths")


def _parts_table(outcomes: Sequence[VariantResult]):
    """Return a table of the parts of each peak, as predicted at the start of the run."""
    names = [name for name in PARTS if any(outcome.parts.get(name) for outcome in outcomes)]
    rows = [
        [outcome.name, *(f"{outcome.parts.get(name, 0) / 2**20:,.1f}" for name in names)]
        for outcome in outcomes
        if outcome.parts
    ]
    return figures_table(["variant", *names], rows, left=["variant"], title="predicted peak by part, MiB")


def rows_of(outcomes: Sequence[VariantResult]) -> list[tuple[str, ...]]:
    """Return a row per variant that ran: name, peak in MiB and as ratio, step time as ratio, held-out loss, loops."""
    baseline = next((outcome for outcome in outcomes if outcome.name == BASELINE and outcome.status == "ran"), None)
    return [_row(outcome, baseline) for outcome in outcomes if outcome.status == "ran"]


def _row(outcome: VariantResult, baseline: Optional[VariantResult]) -> tuple[str, ...]:
    peak = "-" if outcome.peak_bytes is None else f"{outcome.peak_bytes / 2**20:.0f} MiB"
    if outcome.peak_bytes and baseline is not None and baseline.peak_bytes:
        peak += f" ({outcome.peak_bytes / baseline.peak_bytes:.2f})"
    ratio = "-" if baseline is None else f"{outcome.step_s / baseline.step_s:.2f}"
    bpt = "-" if outcome.bpt is None else f"{outcome.bpt[0]:.2f} -> {outcome.bpt[1]:.2f}"
    return outcome.name, peak, ratio, bpt, _loops(outcome)


def _loops(outcome: VariantResult) -> str:
    if all(outcome.loops.get(loop) == "acts" for loop in LOOPS):
        return "all act"
    return ", ".join(f"{loop} {state}" for loop, state in outcome.loops.items() if state != "acts")


def record(outcomes: Sequence[VariantResult], plan: VariantPlan, argv: Sequence[str]) -> dict[str, Any]:
    """Return the content of the results file: all outcomes, and the machine and versions that produced them."""
    packages = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "torchao")
    return {
        "benchmark": "variants",
        "command": " ".join(["scu-trainer", "variants", *argv]),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in packages}},
        "steps": plan.steps,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


# -- the first that fits -----------------------------------------------------------------------------------------------


def _search(options, chosen: Sequence[Variant], plan: VariantPlan, has_gpu: bool, console) -> int:
    limit_gb = size_in_gib("limit", options.limit)
    wanted = [
        candidate
        for candidate in chosen
        if options.names or (candidate.tuning == (options.tuning or "lora") and candidate.processes == 1)
    ]
    limited = replace(plan, extra=(*plan.extra, "--memory_limit_gb", f"{limit_gb:.6g}"))
    console.print(f"limit {limit_gb:.2f} GiB, {len(wanted)} paths in order of speed", soft_wrap=True)
    fitting, attempts = first_that_fits(
        wanted,
        int(limit_gb * 2**30),
        _sizes(options, plan),
        lambda variant: run(variant, limited, has_gpu),
        lambda candidate: console.print(f"{candidate.name}: {candidate.verdict}: {candidate.reason}", soft_wrap=True),
    )
    if options.json:
        write_json(options.json, {"limit_gib": limit_gb, "attempts": [asdict(attempt) for attempt in attempts]})
    if fitting is None:
        console.print(_nothing_fits(attempts, limit_gb), soft_wrap=True)
        return 2
    flags = " ".join(BY_NAME[fitting.name].flags)
    console.print(
        f"first that fits: {fitting.name} ({fitting.reason} of {limit_gb:.2f} GiB): add {flags or 'nothing'}",
        soft_wrap=True,
    )
    return 0


def _nothing_fits(attempts: Sequence[Attempt], limit_gb: float) -> str:
    failed = [attempt.name for attempt in attempts if attempt.verdict == "failed"]
    if failed:
        names = ", ".join(failed)
        return f"none of these paths was found to fit {limit_gb:.2f} GiB, but {names} failed for another reason"
    return f"none of these paths fits {limit_gb:.2f} GiB; raise the limit, lower block_size, or take a smaller model"


def _sizes(options: argparse.Namespace, plan: VariantPlan) -> WeightCounts:
    from scu_trainer.cli.configuration_file import read_file

    entries = {} if plan.config is None else read_file(plan.config)
    name = options.model_name_or_path or plan.model or entries.get("model_name_or_path")
    if name is None:
        raise SettingsError(f"{plan.config} names no model_name_or_path; add it, or give --model_name_or_path")
    sizes = json.loads(_last_line_of_module("scu_trainer.models.loading.sizes", str(name)))
    dtype = entries.get("dtype")
    if dtype in BYTES_PER_VALUE:
        sizes |= {"stored_bytes": BYTES_PER_VALUE[dtype], "trained_bytes": BYTES_PER_VALUE[dtype]}
    return WeightCounts(**sizes)
