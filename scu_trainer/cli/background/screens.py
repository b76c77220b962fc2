"""Screens of ``scu-trainer runs``: a table of runs, the facts of one run, and the live view. They fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from scu_trainer.cli.main import facts_table, figures_table, plain_console
from scu_trainer.runs import words
from scu_trainer.runs.monitor import RunView
from scu_trainer.runs.state import Report

BAR_WIDTH = 40


def say(text: str) -> None:
    print(text, flush=True)


def show_table(reports: Sequence[Report], root: Path) -> None:
    if not reports:
        say(f"no runs in {root} yet; scu-trainer runs start --config FILE starts one")
        return
    console = plain_console()
    console.print(_table(reports))
    for report in reports:
        if report.state.detail and (report.state.cause or report.state.is_alive):
            console.print(f"{report.run.name}: {report.state.detail}", soft_wrap=True)


def _table(reports: Sequence[Report]):
    rows = [
        [
            report.run.name,
            words.status_words(report),
            words.devices(report),
            words.steps(report.progress),
            words.bits(report.progress),
            words.number(report.progress.s, 4),
            words.left(report),
        ]
        for report in reports
    ]
    titles = ("run", "status", "device", "step", "loss, bits", "S", "left")
    return figures_table(titles, rows, left=titles[:3], overflow="fold")  # nothing is cut on a narrow screen


def facts(report: Report):
    return facts_table([("run", str(report.run.path)), *words.facts(report)])


def show_views(views: Iterable[RunView]) -> None:
    """Show a run until it ends or Ctrl-C is pressed: on a terminal as a live screen, otherwise as a line per view."""
    from rich.live import Live

    console = plain_console()
    last = None
    try:
        if not console.is_terminal:
            for last in views:
                console.print(words.line(last.report), soft_wrap=True)
            if last is not None and last.report.state.detail:
                console.print(f"{last.report.state.status}: {last.report.state.detail}", soft_wrap=True)
            return
        with Live(console=console, auto_refresh=False) as live:
            for last in views:
                live.update(screen(last), refresh=True)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the usual way to leave a monitor
    if last is not None and last.report.state.is_alive:
        console.print(f"{last.report.run.name} keeps running in the background")


def screen(view: RunView):
    """Return the live screen for one view: progress, facts, the last warning and the end of the log."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    fraction = view.report.progress.fraction
    parts: list = []
    if fraction is not None:
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=1.0, completed=fraction, width=BAR_WIDTH), f"{fraction:.0%}")
        parts.append(row)
    parts.append(facts(view.report))
    if view.warning:
        parts.append(Text(f"last warning: {view.warning}", style="yellow"))
    log = Text("\n".join(view.lines) or "nothing printed yet", overflow="ellipsis", no_wrap=True, style="dim")
    parts += [Panel(log, title="log", title_align="left", padding=(0, 1))]
    return Panel(Group(*parts), title=view.report.run.name, title_align="left")
