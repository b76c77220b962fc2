"""Draw the picture of README.md and docs/retain.md: python docs/draw_retain.py

Of benchmarks/results/retention_run.json, which ``python benchmarks/studies/retention.py --picture ...`` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scu_trainer.report.drawing import MUTED, HorizontalLine, Line, Panel, Plot
from scu_trainer.report.render import png

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "images" / "retain.png"
NAMES = {"docs": "prose", "source": "code", "sums": "arithmetic", "rot13": "letters moved by 13"}


def plot(record: dict[str, Any]) -> Plot:
    """The new text is learned, the old one is kept, and what that took, below each other."""
    known, new = (NAMES[name] for name in record["pair"].split(" > "))
    budget = record["budget_bits"]
    base = record["base_bits"]["learned"]
    pairs = [("with", f"with retain, budget {budget:g}", 0, 0), ("without", "without", MUTED, 1)]
    panels = [
        Panel(
            f"Learned: loss on held-out {new}, bits per token",
            lines=[Line(label, *_line(record, key, "learned", base, -1.0), color=color, dash=dash)
                   for key, label, color, dash in pairs],
        ),
        Panel(
            f"Kept: what is lost on unseen {known}, bits per token",
            lines=[Line(label, *_line(record, key, "forgotten", 0.0, 1.0), color=color, dash=dash)
                   for key, label, color, dash in pairs],
            levels=[HorizontalLine(budget, f"budget {budget:g}")],
        ),
        Panel(
            f"Steered: rows of {known} in each batch, %",
            lines=[Line("share of replay", *_shares(record), color=0, is_step=True)],
            from_zero=True,
        ),
    ]  # fmt: skip
    return Plot("retain", f"Learn {new}, lose at most {budget:g} bits per token on {known}", panels)


def _line(record: dict[str, Any], key: str, side: str, start: float, sign: float) -> tuple[list[float], list[float]]:
    """The last point is the model that is left, after the scale."""
    run = record[key]
    points = [{"step": 0, "forgotten": 0.0, "learned": 0.0}, *run["points"], {**run["end"], "step": record["steps"]}]
    return [p["step"] for p in points], [start + sign * p[side] for p in points]


def _shares(record: dict[str, Any]) -> tuple[list[float], list[float]]:
    rows = record["with"]["history"]
    return [row["step"] for row in rows], [100 * row["share"] for row in rows]


if __name__ == "__main__":
    found = json.loads((ROOT / "benchmarks" / "results" / "retention_run.json").read_text())
    OUTPUT.write_bytes(png(plot(found), "light"))
    print(f"written: {OUTPUT.relative_to(ROOT)}")
