"""Draw the picture of a run from its files: python docs/draw_run.py RUN_DIRECTORY OUTPUT.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scu_trainer.run_files import read_rows

# Okabe and Ito's colours: told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


def draw(run: Path, output: Path) -> None:
    rows = [row for row in read_rows(run / "scu_history.json") if row["s_ema"] is not None]
    steps = [row["step"] for row in rows]
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2, 3), constrained_layout=True
    )
    _ratio(top, steps, rows)
    middle.plot(steps, [row["lambda"] for row in rows], color=ORANGE)
    middle.set_ylabel("lambda\n(shrink / learning rate)")
    middle.set_title("what it takes: strength of the pull toward the start", loc="left", fontsize=10)
    _losses(bottom, steps, rows, run)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0 if axes is not bottom else None)
    figure.savefig(output, dpi=130)


def _ratio(axes, steps: list[int], rows: list[dict]) -> None:
    target = rows[-1]["s_target"]
    axes.plot(steps, [row["s"] for row in rows], color=BLUE, alpha=0.3, linewidth=1, label="S of each step")
    axes.plot(steps, [row["s_ema"] for row in rows], color=BLUE, label="S, averaged")
    if target is not None:
        axes.axhline(target, color=GREY, linestyle="--", label=f"target {target:g}")
        axes.axhspan(0.9 * target, 1.1 * target, color=GREY, alpha=0.12, label="within 10 %")
    axes.set_ylabel("information ratio S")
    axes.set_title("S reaches its target and is held there", loc="left", fontsize=10)
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _losses(axes, steps: list[int], rows: list[dict], run: Path) -> None:
    axes.plot(steps, [row["data_bpt"] for row in rows], color=GREEN, alpha=0.6, linewidth=1, label="training batches")
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    evaluations = [(entry["step"], entry["eval_bpt"]) for entry in history if "eval_bpt" in entry]
    metrics = json.loads((run / "scu_metrics.json").read_text())
    before = metrics.get("held_out_bpt_before")
    points = [(0, before["value"]), *evaluations] if before else evaluations
    if points:
        axes.plot(*zip(*points, strict=True), color=ORANGE, marker="o", label="held-out documents")
    axes.set_ylabel("bits per token")
    axes.set_xlabel("optimizer step")
    axes.set_title("loss", loc="left", fontsize=10)
    axes.legend(loc="upper right", frameon=False, fontsize=9)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
