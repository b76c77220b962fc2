"""What the terminal shows of a comparison: its plan, its progress and its table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from rich.console import Console
from rich.text import Text

from scu_trainer.cli.main import figures_table
from scu_trainer.figures import clock_text, count_text
from scu_trainer.report.comparison import text as words
from scu_trainer.runs.studies.comparison_arms import Arm
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan
from scu_trainer.runs.studies.comparison_state import ArmState, Key, progress_line
from scu_trainer.settings.base import as_typed


class Screen:
    """Prints lines, with a status line below them that changes, if the console is a terminal."""

    def __init__(self, console: Console) -> None:
        self.console, self.status = console, console.status("starting")

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def look(self, plan: ComparisonPlan, states: Mapping[Key, ArmState], left_s: Optional[float]) -> None:
        if not self.console.is_terminal:
            return
        left = "" if left_s is None else f"{clock_text(left_s)} left; "
        text = Text(left + progress_line(plan, states), no_wrap=True, overflow="ellipsis")
        text.truncate(max(20, self.console.width - 4), overflow="ellipsis")
        self.status.update(text)


def print_arms(console: Console, arms: Sequence[Arm]) -> None:
    titles = ("arm", "what it is", "sets")
    rows = [
        [arm.name, arm.what, "\n".join(f"{key} {as_typed(value)}" for key, value in arm.settings.items())]
        for arm in arms
    ]
    console.print(figures_table(titles, rows, left=titles, framed=False, overflow="fold"))


def print_record(console: Console, record: Mapping[str, Any]) -> None:
    console.print(words.budget_line(record), soft_wrap=True)
    rows = [map(Text, row) for row in words.rows(record)]
    table = figures_table(words.heads(record), rows, left=["arm"], framed=False, overflow="fold")
    table.columns[0].max_width = 22
    console.print(table)
    verdicts = [f"{arm}: {verdict}" for arm, verdict in words.verdicts(record)]
    for line in [words.legend(record), *verdicts, "", record["verdict"], "", *record["notes"]]:
        print_wrapped(console, line)
    if (cost := words.cost_line(record)) is not None:
        print_wrapped(console, cost)


def print_wrapped(console: Console, line: str) -> None:
    """Print ``line`` wrapped to the width of the console, with further lines indented. Names of runs and paths are not
    broken, so that they can be copied."""
    options = {"subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}
    console.print("\n".join(textwrap.wrap(line, max(20, console.width), **options)), soft_wrap=True)


def start_line(plan: ComparisonPlan, devices: Sequence[str]) -> str:
    arms, seeds = len(plan.arms), count_text(len(plan.seeds), "seed")
    runs = seeds if arms == 1 else f"{arms} arms x {seeds} = {len(plan.runs)} runs"
    return f"{runs}, {len(devices)} at a time with {count_text(plan.threads, 'thread')} each, in {plan.folder}"
