"""Preflight: checks that find the user's mistakes before training starts.

    before_loading   checks of settings, environment and disk; cheap
    before_training  checks of the prepared data and the loaded model; under 10 seconds for any size

Mistakes that raise an error elsewhere (unknown keys, settings that contradict each other, a model that does not fit its
tokenizer) are not checked again. ``CHECKS`` are all checks by id, for the documentation and for their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.trainer_utils import has_length

from scu_trainer.data.samples import PreparedSamples
from scu_trainer.errors import PreflightError
from scu_trainer.figures import count_text
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight import (
    classes,
    columns,
    counts,
    length,
    optimization,
    pitfalls,
    plan,
    room,
    rows,
    surroundings,
    weights,
)
from scu_trainer.train.preflight.finding import Check, Finding

__all__ = ["CHECKS", "Check", "Finding", "before_loading", "before_training", "report"]

MODULES = (optimization, pitfalls, length, surroundings, columns, counts, rows, classes, weights, room, plan)
CHECKS = {check.id: check for module in MODULES for check in vars(module).values() if isinstance(check, Check)}
MISTAKE_COUNT = sum(check.level != "note" for check in CHECKS.values())
EARLY = (optimization, pitfalls, length, surroundings, columns, plan)
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def before_loading(job: Job) -> list[Finding]:
    """Return the findings about settings, environment and disk. Raises DataError for an unreadable local dataset."""
    return [finding for module in EARLY for finding in module.before_loading(job)]


def before_training(job: Job, parts: TrainingComponents, output_dir: Path) -> list[Finding]:
    """Return the findings about the prepared data and the loaded model; large ones are sampled, and findings say so.
    ``output_dir``: the folder for checkpoints; it need not exist."""
    if any(getattr(job.training, name) < 1 for name in optimization.SIZES):
        return []  # before_loading has reported this error; without it the number of steps is not defined
    train, training = parts.data.train, job.training
    count = len(train) if has_length(train) else None
    steps = training.max_steps if count is None else job.planned_steps(count)
    findings = [*length.before_training(job, train), *counts.before_training(job, parts)]
    findings += columns.before_training(parts.data.statistics)
    if not isinstance(parts.data, PreparedSamples):
        findings += rows.before_training(job, parts, rows.facts_of(parts))
    findings += classes.before_training(job, parts)
    findings += weights.before_training(job, parts.model)
    findings += room.before_training(job, parts.model, output_dir, steps, count)
    return [*findings, *plan.before_training(job, parts, count, steps)]


def report(findings: Sequence[Finding], console: Console, policy: Literal["stop", "warn", "off"]) -> None:
    """Print the findings, worst first. Raises PreflightError if one is an error and ``policy`` is "stop"."""
    if policy == "off":
        return
    errors, warnings, notes = ([f for f in findings if f.level == level] for level in STYLES)
    if errors or warnings:
        console.print(f"preflight: {count_text(len(errors), 'error')}, {count_text(len(warnings), 'warning')}")
    else:
        console.print(f"preflight: {MISTAKE_COUNT} checks, nothing found")
    if findings:
        console.print(_findings_table([*errors, *warnings, *notes]))
    if errors and policy == "stop":
        raise PreflightError(_error_message(errors))


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, style=STYLES[finding.level]), _finding_text(finding))
    return table


def _finding_text(finding: Finding) -> Text:
    if finding.level == "note":
        return Text(finding.what)
    lines = [f"{finding.check}: {finding.what}"]
    lines += [f"where: {finding.where}"] if finding.where else []
    lines += [f"fix: {finding.fix}"] if finding.fix else []
    return Text("\n".join(lines))


def _error_message(errors: Sequence[Finding]) -> str:
    first = errors[0]
    more = f" ({len(errors) - 1} more above)" if len(errors) > 1 else ""
    return (
        f"preflight found {count_text(len(errors), 'error')}: {first.check}: {first.what}; {first.fix}{more}; "
        "--preflight warn trains anyway"
    )
