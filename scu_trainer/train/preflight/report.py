"""All checks by id, for the documentation and for their number; printing the findings, and ending a run with errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scu_trainer.errors import PreflightError
from scu_trainer.figures import count_text
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

MODULES = (optimization, pitfalls, length, surroundings, columns, counts, rows, classes, weights, room, plan)
CHECKS = {check.id: check for module in MODULES for check in vars(module).values() if isinstance(check, Check)}
MISTAKE_COUNT = sum(check.level != "note" for check in CHECKS.values())

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


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
