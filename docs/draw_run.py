"""Draw the picture of a run from its files: python docs/draw_run.py RUN_DIRECTORY OUTPUT.png"""

from __future__ import annotations

import sys
from pathlib import Path

from scu_trainer.report.drawing import Plot
from scu_trainer.report.files import read_run
from scu_trainer.report.render import png
from scu_trainer.report.run_plots import run_plots


def draw(folder: Path, output: Path) -> None:
    """S with its target, lambda, and the held-out loss, below each other: plots of ``scu-trainer report``."""
    found = {plot.key: plot for plot in run_plots([read_run(folder, folder.name)])}
    panels = [*found["s"].panels, found["loss"].panels[-1]]
    output.write_bytes(png(Plot("run", f"The run {folder.name}", panels), "light"))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
