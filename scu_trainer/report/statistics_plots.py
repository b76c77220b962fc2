"""Plots of the curriculum statistics: the rows of each epoch, their difficulty, and the cost of padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scu_trainer.report.drawing import Band, Line, Panel
from scu_trainer.report.files import Row, RunFiles, points


def curriculum_panels(runs: Sequence[RunFiles]) -> list[Panel]:
    """Return the panels: all statistics for one run; rows, median difficulty and padding for several runs."""
    found = [run for run in runs if run.epochs]
    if not found:
        return []
    panels = _panels_of_one_run(found[0].epochs) if len(runs) == 1 else _panels_of_several_runs(runs)
    return [panel for panel in panels if panel.lines]


def _panel(title: str, label: str, lines: Sequence[Line], **more: Any) -> Panel:
    return Panel(title, label, "epoch", [line for line in lines if line.x], whole_x=True, **more)


def _panels_of_one_run(epochs: Sequence[Row]) -> list[Panel]:
    rows = flat(epochs)
    names = [
        "rows",
        *(name for name in ("skipped", "repeated", "suspects", "quarantined") if any(r[name] for r in rows)),
    ]
    lines = [
        Line(
            "rows trained" if name == "rows" else name,
            *points(rows, name, "epoch"),
            color=place,
            dash=place,
            marker="o",
        )
        for place, name in enumerate(names)
    ]
    return [
        _panel(f"Rows of each epoch{_partial_note(epochs)}", "rows", lines, from_zero=True, height=0.9),
        _difficulty(rows),
        _panel("Processed tokens per real token", "ratio", [Line("", *points(rows, "padding", "epoch"), marker="o")],
               height=0.8),
    ]  # fmt: skip


def _partial_note(*statistics: Sequence[Row]) -> str:
    """Return an addition to a title if the last epoch was not trained to its end."""
    is_partial = any(epochs and epochs[-1].get("complete") is False for epochs in statistics)
    return " (the last epoch in part)" if is_partial else ""


def _difficulty(rows: Sequence[Row]) -> Panel:
    median = Line("median", *points(rows, "p50", "epoch"), marker="o")
    bands = []
    for low, high, label in (("p10", "p90", "10 to 90 % of rows"), ("p25", "p75", "25 to 75 %")):
        x, bottom = points(rows, low, "epoch")
        top = points(rows, high, "epoch")[1]
        if x and len(bottom) == len(top):
            bands.append(Band(label, x, bottom, top))
    return _panel("Difficulty: running loss of rows", "nats", [median], bands=bands if len(median.x) > 1 else ())


def _panels_of_several_runs(runs: Sequence[RunFiles]) -> list[Panel]:
    part = _partial_note(*(run.epochs for run in runs))
    shown = (("rows", f"Rows of each epoch{part}", "rows"), ("p50", "Difficulty: median loss of rows", "nats"),
             ("padding", "Processed tokens per real token", "ratio"))  # fmt: skip
    return [
        _panel(
            title,
            label,
            [
                Line(run.name, *points(flat(run.epochs), name, "epoch"), color=place, dash=place, marker="o")
                for place, run in enumerate(runs)
            ],
            height=0.9,
        )
        for name, title, label in shown
    ]


def flat(epochs: Sequence[Row]) -> list[Row]:
    """Return the rows of curriculum.json as flat dicts, with the sums and quantiles that are drawn."""
    return [
        {
            "epoch": row.get("epoch"),
            "rows": row.get("rows"),
            "skipped": sum(filter(None, (row.get("skipped") or {}).values())),
            **{name: row.get(name) or 0 for name in ("repeated", "suspects", "quarantined")},
            **(row.get("difficulty") or {}),
            "padding": _ratio(row.get("padded_tokens"), row.get("real_tokens")),
        }
        for row in epochs
    ]


def _ratio(padded: Any, real: Any) -> float | None:
    return padded / real if padded and real else None
