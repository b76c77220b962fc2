"""The plan of a sweep, which is stored in its folder, with the axes of its search, and the table of its trials."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.main import figures_table
from scu_trainer.errors import SettingsError, StorageError, did_you_mean
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.run_files import read_object, write_json, write_text
from scu_trainer.runs.studies.comparison_plan import differences

PLAN_FILE, BASE, JOURNAL = "sweep.json", "base.yaml", "study.journal"

MOST_COMBINATIONS = 1000
"""Largest number of combinations that are listed. With more, learning from trials pays off, and repeats are rare."""

FORM = "NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=A,B,C"
NOT_SEARCHED = frozenset(
    "seed seeds data_seed output_dir resume_from_checkpoint resume dataset eval_dataset dataset_size "
    "validation_split_percentage max_eval_documents".split()
)
"""Fields that identify a run, or determine what it is scored on. A search must not vary them."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


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
        """Write the plan, unless the folder has it already. Raises SettingsError if the folder holds another sweep, and
        StorageError if its plan is lost or damaged."""
        path = self.folder / PLAN_FILE
        if not path.is_file():
            if (self.folder / JOURNAL).exists():
                raise StorageError(
                    f"{self.folder} holds {JOURNAL}, but not the plan of its trials, {PLAN_FILE}; restore it from a "
                    "copy, or give another --output_dir"
                )
            write_text(self.folder / BASE, self.text)
            write_json(path, self.as_dict())
            return
        stored, current = read_object(path), json.loads(json.dumps(self.as_dict()))
        wrong = first_misfit(misfit(stored.get(key), kind, key) for key, kind in (("command", str), ("resolved", dict)))
        if wrong is not None:
            raise StorageError(
                f"{path} holds what no sweep writes: {wrong}; restore it from a copy, or give another --output_dir"
            )
        changes = [
            f"{key} was {stored.get(key)}, now {current[key]}"
            for key in ("search", "seed")
            if stored.get(key) != current[key]
        ]
        changes += differences(stored["resolved"], current["resolved"])
        if changes:
            raise SettingsError(
                f"{self.folder} holds another sweep: {'; '.join(changes[:3])}; type its command ({stored['command']}), "
                "or give another --output_dir"
            )
        write_text(self.folder / BASE, self.text)  # trials read it, and it may have been changed since


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


# -- what is searched --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A setting that the search varies: among ``values`` if there are any, otherwise from ``low`` to ``high``, as whole
    numbers if both are whole."""

    name: str
    low: Optional[float] = None
    high: Optional[float] = None
    is_log: bool = False
    values: Sequence[str] = ()

    def suggest(self, trial: Any) -> Any:
        """Return the value of this axis for ``trial``, an Optuna trial."""
        if self.values:
            return trial.suggest_categorical(self.name, list(self.values))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.is_log)
        return trial.suggest_float(self.name, float(self.low), float(self.high), log=self.is_log)

    @property
    def ends(self) -> list[Any]:
        """The values to check: if they are valid, so are all others."""
        return list(self.values) or [self.low, self.high]


def parse_axes(words: Sequence[str], known: Collection[str]) -> list[Axis]:
    """Parse the axes of a search. ``known``: the names of all settings. Raises SettingsError for an unknown name, a
    repeated name or an invalid range."""
    found = [_parse_axis(word, known) for word in words]
    names = [axis.name for axis in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"--search varies {twice} twice; give it once")
    if not found:
        raise SettingsError(f"--search is missing: say what to vary, as {FORM}")
    return found


def _parse_axis(word: str, known: Collection[str]) -> Axis:
    name, equals, span = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not equals or not span:
        raise SettingsError(f"--search {word!r} is not a search axis; write {FORM}")
    if name not in known:
        raise SettingsError(f"--search varies {name}, which is not a field{did_you_mean(name, known)}")
    if name in NOT_SEARCHED:
        raise SettingsError(f"--search cannot vary {name}: trials would not be comparable; drop it")
    if ":" in span:
        return _parse_range(name, span)
    values = [value.strip() for value in span.split(",")]
    if len(values) < 2 or not all(values) or len({*values}) < len(values):
        raise SettingsError(f"--search {word!r} needs two or more different values; write {FORM}")
    return Axis(name, values=values)


def _parse_range(name: str, span: str) -> Axis:
    low, high, *rest = span.split(":")
    if rest not in ([], ["log"]) or not (NUMBER.fullmatch(low) and NUMBER.fullmatch(high)):
        raise SettingsError(f"--search {name}={span} is not a range; write {FORM}")
    first, last = _parse_number(low), _parse_number(high)
    if first >= last:
        raise SettingsError(f"--search {name}: {low} is not below {high}; write the smaller one first")
    if rest and first <= 0:
        raise SettingsError(f"--search {name}: a logarithmic range must begin above 0, but this one begins at {low}")
    return Axis(name, first, last, bool(rest))


def _parse_number(text: str) -> float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)
