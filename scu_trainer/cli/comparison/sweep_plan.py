"""The plan of a sweep, which is stored in its folder, and the table of its trials."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.main import figures_table
from scu_trainer.errors import SettingsError
from scu_trainer.run_files import read_object, write_json, write_text
from scu_trainer.runs.studies.comparison_plan import differences
from scu_trainer.runs.studies.search import Axis

PLAN_FILE = "sweep.json"

MOST_COMBINATIONS = 1000
"""Largest number of combinations that are listed. With more, learning from trials pays off, and repeats are rare."""


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep. ``settings`` and ``text``: those of the job as it is."""

    folder: Path
    command: str
    config: Optional[str]
    flags: Sequence[str]
    axes: Sequence[Axis]
    seed: int
    settings: Mapping[str, Any]
    text: str

    @functools.cached_property
    def combinations(self) -> list[dict[str, str]]:
        """The combinations of the values of all axes, in the order in which they are tried. Empty if an axis is a
        range, or if there are too many."""
        if not 0 < math.prod(len(axis.values) for axis in self.axes) <= MOST_COMBINATIONS:
            return []
        products = itertools.product(*(axis.values for axis in self.axes))
        shuffled = [dict(zip([axis.name for axis in self.axes], values, strict=True)) for values in products]
        random.Random(self.seed).shuffle(shuffled)
        return shuffled

    def as_dict(self) -> dict[str, Any]:
        search = [[axis.name, axis.low, axis.high, axis.is_log, list(axis.values)] for axis in self.axes]
        return {
            "command": self.command, "config": self.config, "search": search, "seed": self.seed,
            "resolved": dict(self.settings),
        }  # fmt: skip

    def take(self) -> None:
        """Write the plan, unless the folder has it already. Raises SettingsError if the folder holds another sweep."""
        path = self.folder / PLAN_FILE
        if not path.is_file():
            write_text(self.folder / "base.yaml", self.text)
            write_json(path, self.as_dict())
            return
        stored, current = read_object(path), json.loads(json.dumps(self.as_dict()))
        changes = [
            f"{key} was {stored.get(key)}, now {current[key]}"
            for key in ("search", "seed")
            if stored.get(key) != current[key]
        ]
        changes += differences(stored.get("resolved", {}), current["resolved"])
        if changes:
            raise SettingsError(
                f"{self.folder} holds another sweep: {'; '.join(changes[:3])}; type its command ({stored['command']}), "
                "or give another --output_dir"
            )


def short_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table_of(rows: Sequence[Mapping[str, Any]], base: Optional[float], names: Sequence[str]) -> Any:
    cells = [["as it is", *("" for _ in names), "-" if base is None else f"{base:.4f}", "runs/base"]]
    for row in sorted(rows, key=lambda row: (row["held_out_bpt"] is None, row["held_out_bpt"] or 0.0)):
        figure = row["state"] if row["held_out_bpt"] is None else f"{row['held_out_bpt']:.4f}"
        values = [short_value(row["values"].get(name, "-")) for name in names]
        cells.append([str(row["trial"]), *values, figure, row["folder"]])
    titles = ["trial", *names, "held-out bits", "run"]
    return figures_table(titles, cells, left=["run"], framed=False, overflow="fold")
