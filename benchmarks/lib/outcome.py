"""The results of a benchmark: a table for people, and named figures that later runs are compared with.

``finish`` prints both and writes results/NAME.json, which docs/benchmarks.md and regressions.py read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Optional

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One number that a benchmark measures, preferably a ratio.

    ``spread``: (highest - lowest) / value over the repeats; None if it does not vary or was measured once. ``better``:
    None for a figure of another project, which is reported but not judged. ``target``: the value to reach, or None.
    ``tolerance``: differences up to this, in the unit of the figure, do not count; for figures near 0.
    """

    value: float
    better: Optional[Literal["higher", "lower"]]
    spread: Optional[float] = None
    target: Optional[float] = None
    tolerance: float = 0.0

    @property
    def is_met(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    @property
    def aim(self) -> str:
        """The target in words."""
        return f"{'at least' if self.better == 'higher' else 'at most'} {self.target:g}"

    def said(self, name: str) -> str:
        text = f"{name}: {self.value:.4g}"
        if self.spread is not None:
            text += f" (repeats {self.spread:.0%} apart)"
        if self.target is None:
            return text
        return f"{text}, {self.aim}: {'met' if self.is_met else 'MISSED'}"


def figure(
    values: Sequence[float], better: Optional[Literal["higher", "lower"]], target: Optional[float] = None
) -> Figure:
    """Return the median of the repeats, with their spread."""
    middle = median(values)
    return Figure(middle, better, (max(values) - min(values)) / middle if len(values) > 1 else None, target)


@dataclass(frozen=True)
class Grid:
    """A table, as text for the terminal and docs/benchmarks.md. The first column is the contender or the subject."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def table(self, title: str) -> Table:
        shown = Table(title=title)
        for number, head in enumerate(self.heads):
            shown.add_column(head, justify="right" if number else "left")
        for row in self.rows:
            shown.add_row(*row)
        return shown


def finish(
    name: str, title: str, grid: Grid, figures: Mapping[str, Figure], *, quick: bool = False, **results: Any
) -> Optional[Path]:
    """Print, and write results/NAME.json. ``results``: the raw numbers behind the grid, ``repeats`` among them.

    ``quick``: sizes too small for any verdict; nothing is written.
    """
    from benchmarks.lib.common import write_result  # imports torch, which figures do not need

    console = Console(width=140)
    console.print(grid.table(title))
    if quick:
        console.print("test run: nothing is written")
        return None
    console.print(*(one.said(key) for key, one in figures.items()), sep="\n", highlight=False)
    record = {
        "title": title,
        "table": {"heads": list(grid.heads), "rows": [list(row) for row in grid.rows]},
        "figures": {key: asdict(one) for key, one in figures.items()},
        **results,
    }
    return write_result(name, record)
