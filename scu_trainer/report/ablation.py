"""Plots of a comparison by ``scu-trainer compare``: held-out bits per arm, paired differences, and curves over steps.

Arms that failed or are missing keep their row, with the reason. All values come from comparison.json; none is estimated
again here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.figures import in_percent, interval
from scu_trainer.report.comparison.report import read_record
from scu_trainer.report.comparison.statistics import percent
from scu_trainer.report.comparison.text import has_accuracy, settled
from scu_trainer.report.drawing import HorizontalLine, Line, Panel, Plot, ValueRange
from scu_trainer.report.files import Row, RunFiles, points, read_run
from scu_trainer.report.run_plots import number

MOST_TARGETS = 3


@dataclass(frozen=True)
class Comparison:
    """A comparison. ``content``: of comparison.json. ``runs``: the files of each existing run, by arm and seed."""

    folder: Path
    content: Row
    runs: dict[tuple[str, int], RunFiles]

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.content["arms"]]

    @property
    def unit(self) -> str:
        return next((run.unit for run in self.runs.values()), "token")

    @property
    def is_alive(self) -> bool:
        """Whether some of its runs have not ended yet."""
        return any(run["status"] in ("running", "missing") for run in self.content["runs"])


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison and its runs. Raises StorageError for a comparison.json that this version cannot read."""
    content = read_record(folder)
    found = {}
    for run in content["runs"]:
        place = _folder_of(folder, run)
        if place is not None:
            found[run["arm"], run["seed"]] = read_run(place, f"{run['arm']}, seed {run['seed']}", run["status"])
    return Comparison(folder, content, found)


def _folder_of(folder: Path, run: Row) -> Optional[Path]:
    """Return the recorded path of a run, or that below ``folder`` if it was moved; None if the run is missing."""
    named = Path(run["folder"] or "")
    places = (folder / named, folder / "runs" / named.name, folder / "runs" / f"{run['arm']}-seed{run['seed']}")
    return next((place for place in places if run["folder"] is not None and place.is_dir()), None)


def comparison_plots(found: Comparison) -> list[Plot]:
    return [_arms_plot(found), _differences_plot(found), _s_plot(found), _curves_plot(found)]


def _held_out_bits(found: Comparison, arm: str) -> list[tuple[int, float]]:
    """Return (seed, held-out bits) of the finished runs of an arm, without those that were left out of the table."""
    runs = [run for run in found.content["runs"] if run["arm"] == arm and run["status"] == "finished"]
    values = [(run["seed"], run["metrics"].get("held_out_bpt")) for run in runs if not run["error"]]
    return [(seed, value) for seed, value in values if value is not None]


def _interval_rows(found: Comparison, figure: str, seeds: dict[str, list[float]]) -> list[ValueRange]:
    rows = {row["arm"]: row for row in found.content["table"]}
    drawn = []
    for place, arm in enumerate(found.arms):
        row = rows.get(arm, {})
        value = row.get(figure) or {}
        missing = (
            "" if row.get("finished") == row.get("asked") else f"{row.get('finished', 0)} of {row.get('asked')} runs"
        )
        drawn.append(
            ValueRange(arm, value.get("value"), value.get("low"), value.get("high"), seeds[arm], missing, place)
        )
    return drawn


def _arms_plot(found: Comparison) -> Plot:
    seeds = {arm: [value for _, value in _held_out_bits(found, arm)] for arm in found.arms}
    rows = _interval_rows(found, "held_out_bpt", seeds)
    title = f"Mean, {_confidence(found)} interval; dots: seeds"
    return _interval_plot("arms", "Held-out bits per arm", title, f"held-out bits per {found.unit}", rows, False)


def _differences_plot(found: Comparison) -> Plot:
    reference = found.content["reference"]
    base = dict(_held_out_bits(found, reference))
    paired = {
        arm: [value - base[seed] for seed, value in _held_out_bits(found, arm) if seed in base] for arm in found.arms
    }
    rows = [row for row in _interval_rows(found, "difference", paired) if row.label != reference]
    title = f"Difference from {reference}, paired by seed: mean and {_confidence(found)} interval"
    label = f"bits per {found.unit}, below 0: lower loss"
    return _interval_plot("differences", "Paired differences", title, label, rows, True)


def _interval_plot(key: str, title: str, panel: str, label: str, rows: Sequence[ValueRange], zero: bool) -> Plot:
    if not rows:
        return Plot(key, title, notes=("there is one arm, and nothing to compare it with",))
    if not any(row.points or row.value is not None for row in rows):
        return Plot(key, title, notes=("no run has finished yet, so there is nothing to draw",))
    said = [
        f"{row.label} {number(row.value)} ({number(row.low)} to {number(row.high)})" if row.value is not None
        else f"{row.label} without a result"
        for row in rows
    ]  # fmt: skip
    drawn = Panel(panel, x_label=label, intervals=rows, zero_line=zero)
    return Plot(key, title, [drawn], f"{panel}. {'; '.join(said)}.")


def _confidence(found: Comparison) -> str:
    return percent(found.content["confidence"])


# -- trajectories ------------------------------------------------------------------------------------------------------


def _s_plot(found: Comparison) -> Plot:
    lines, without = _mean_lines(found, "control", "s_ema")
    levels = _target_levels(found)
    notes = [f"{', '.join(without)}: S was not measured"] if without else []
    return _curve_plot("s-arms", "S of each arm", "Information ratio S, mean of the seeds", "S", lines, notes, levels)


def _target_levels(found: Comparison) -> list[HorizontalLine]:
    """Return a level for each target of S, named after its arm if only one of several has it. Returns none if there are
    more than MOST_TARGETS, which nobody could distinguish."""
    arms: dict[float, list[str]] = {}
    for (arm, _), run in found.runs.items():
        for target in (row["s_target"] for row in run.control[-1:] if row.get("s_target")):
            arms.setdefault(target, [])
            arms[target] += [arm] if arm not in arms[target] else []
    if len(arms) > MOST_TARGETS:
        return []
    names = {target: f" of {', '.join(arms[target])}" if len(arms[target]) == 1 < len(arms) else "" for target in arms}
    return [HorizontalLine(target, f"target {target:g}{names[target]}") for target in sorted(arms)]


def _curves_plot(found: Comparison) -> Plot:
    lines, without = _mean_lines(found, "logs", "eval_bpt")
    notes = [f"{', '.join(without)}: no evaluation during training"] if without else []
    title = f"Held-out bits per {found.unit}, mean of the seeds"
    return _curve_plot("curves", "Held-out bits during training", title, f"bits per {found.unit}", lines, notes)


def _curve_plot(
    key: str, title: str, panel: str, label: str, lines: Sequence[Line], notes: Sequence[str],
    levels: Sequence[HorizontalLine] = (),
) -> Plot:  # fmt: skip
    if not lines:
        return Plot(key, title, notes=notes or ("no run has begun yet",))
    ends = "; ".join(f"{line.label} ends at {number(line.y[-1])}" for line in lines)
    drawn = Panel(panel, label, lines=lines, levels=levels, from_zero=key == "s-arms", height=1.4)
    return Plot(key, title, [drawn], f"{panel}. {ends}.", notes)


def _mean_lines(found: Comparison, part: str, name: str) -> tuple[list[Line], list[str]]:
    """Return a line per arm, the mean over its seeds at their common steps, and the names of the arms without one."""
    lines, without = [], []
    for place, arm in enumerate(found.arms):
        runs = [run for (of_arm, _), run in found.runs.items() if of_arm == arm]
        curves = [dict(zip(*points(getattr(run, part), name), strict=True)) for run in runs]
        curves = [curve for curve in curves if curve]
        steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not steps:
            without.append(arm)
            continue
        mean = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
        marker = "o" if part == "logs" else ""
        lines.append(Line(arm, steps, mean, place, place, marker))
    return lines, without


ACCURACY = (("held_out_accuracy", ".1f"), ("accuracy_difference", "+.1f"))

FIGURES = re.compile(r"(: | by )[+-]?[\d.]+ \([^)]*\)")
"""Matches the difference and its interval in a verdict, which the table shows in another column."""


# -- tables ------------------------------------------------------------------------------------------------------------


def result_rows(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of results, with a row for every arm."""
    of_classes = has_accuracy(found.content)
    minus = f"difference from {found.content['reference']}"
    accuracy = ["held-out accuracy in %", f"{minus}, in points"] if of_classes else []
    head = ["arm", "runs", *accuracy, f"held-out bits per {found.unit}", minus,
            "tracking error", "settled at step", "cost of the loop", "verdict"]  # fmt: skip
    rows = [
        [
            row["arm"],
            f"{row['finished']} of {row['asked']}",
            *([interval(in_percent(row.get(key)), style) for key, style in ACCURACY] if of_classes else []),
            interval(row["held_out_bpt"], ".4f"),
            interval(row["difference"], "+.4f"),
            or_dash(row["tracking_error"], ".1%"),
            settled(row),
            or_dash(row["overhead_fraction"], ".2%"),
            FIGURES.sub("", row["verdict"] or "-"),
        ]
        for row in found.content["table"]
    ]
    return head, rows


def or_dash(value: Any, style: str) -> str:
    return "-" if value is None else f"{value:{style}}"
