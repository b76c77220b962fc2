"""Print the findings, and end a run that has errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scu_trainer.errors import PreflightError
from scu_trainer.figures import count_text
from scu_trainer.train.preflight.catalogue import MISTAKE_COUNT
from scu_trainer.train.preflight.finding import Finding

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
