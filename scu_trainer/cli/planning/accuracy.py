"""``scu-trainer plan --accuracy``: compares predicted with measured peaks. Reads only files of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Optional

from scu_trainer.cli.main import figures_table
from scu_trainer.cli.planning.screen import rendered
from scu_trainer.errors import StorageError
from scu_trainer.figures import count_text
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.report.files import METRICS_FILE
from scu_trainer.run_files import format_bytes, read_object

PEAKS = ("predicted_peak_bytes", "measured_peak_bytes")


@dataclass(frozen=True)
class PeakComparison:
    """Predicted and measured peak of one run. ``error``: (predicted - measured) / measured."""

    run: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def accuracy(folder: Path, as_json: bool) -> int:
    """Print how accurate the predictions of the runs in ``folder`` were. Raises StorageError if it is not a folder."""
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder; give the one that holds the runs")
    metrics = sorted(folder.glob(f"**/{METRICS_FILE}"))  # at any depth, for runs of seeds, sweeps and comparisons
    comparisons = list(compared(metrics, folder))
    errors = [abs(item.error) for item in comparisons]
    summary = {"runs": len(comparisons), "without_both": len(metrics) - len(comparisons)}
    if errors:
        summary |= {"median_error": median(errors), "largest_error": max(errors)}
    if as_json:
        rows = [{**asdict(item), "error": item.error} for item in comparisons]
        print(json.dumps({**summary, "compared": rows}, indent=2))
        return 0
    print(_table(comparisons) if comparisons else f"no run in {folder} has both a prediction and a measured peak")
    if errors:
        print(f"\n{count_text(len(comparisons), 'run')}: median error {median(errors):.1%}, largest {max(errors):.1%}")
    if summary["without_both"]:
        print(f"{summary['without_both']} more without a prediction or without a measured peak")
    return 0


def compared(metrics: list[Path], folder: Path) -> Iterator[PeakComparison]:
    """Yield the runs that have both figures."""
    for path in metrics:
        estimate = read_object(path).get("memory_estimate") or {}
        wrong = misfit(estimate, dict, "memory_estimate") or first_misfit(
            misfit(estimate.get(name), Optional[int], f"memory_estimate.{name}") for name in PEAKS
        )
        if wrong is not None:
            raise StorageError(f"{path}: {wrong}, which no run writes; move it away")
        predicted, measured = (estimate.get(name) for name in PEAKS)
        if predicted and measured:
            run_path = path.parent.relative_to(folder)
            name = folder.resolve().name if run_path == Path() else str(run_path)  # ``folder`` may be a run
            yield PeakComparison(name, predicted, measured)


def _table(comparisons: list[PeakComparison]) -> str:
    titles = ("run", "predicted", "measured", "error")
    rows = [
        [item.run, format_bytes(item.predicted_bytes), format_bytes(item.measured_bytes), f"{item.error:+.1%}"]
        for item in sorted(comparisons, key=lambda item: -abs(item.error))
    ]
    return rendered(figures_table(titles, rows, left=["run"], framed=False, overflow="fold"))
