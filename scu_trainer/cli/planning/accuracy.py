"""``scu-trainer plan --accuracy``: how far predictions were from what was measured. Reads run files only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from scu_trainer.cli.main import figures_table
from scu_trainer.cli.planning.screen import rendered
from scu_trainer.errors import StorageError
from scu_trainer.figures import counted
from scu_trainer.run_files import read_json, readable

METRICS = "scu_metrics.json"


@dataclass(frozen=True)
class Compared:
    """One run. ``error``: (predicted - measured) / measured."""

    run: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def accuracy(folder: Path, as_json: bool) -> int:
    """Raises StorageError if ``folder`` is none."""
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder; give the one that holds the runs")
    metrics = sorted(folder.glob(f"**/{METRICS}"))  # runs of several seeds, a search or a comparison lie deeper
    found = list(compared(metrics, folder))
    errors = [abs(one.error) for one in found]
    summary = {"runs": len(found), "without_both": len(metrics) - len(found)}
    if errors:
        summary |= {"median_error": median(errors), "largest_error": max(errors)}
    if as_json:
        rows = [{**asdict(one), "error": one.error} for one in found]
        print(json.dumps({**summary, "compared": rows}, indent=2))
        return 0
    print(_table(found) if found else f"no run in {folder} has both a prediction and a measured peak")
    if errors:
        print(f"\n{counted(len(found), 'run')}: median error {median(errors):.1%}, largest {max(errors):.1%}")
    if summary["without_both"]:
        print(f"{summary['without_both']} more without a prediction or without a measured peak")
    return 0


def compared(metrics: list[Path], folder: Path) -> Iterator[Compared]:
    """Runs with both figures."""
    for path in metrics:
        estimate = read_json(path).get("memory_estimate") or {}
        predicted, measured = estimate.get("predicted_peak_bytes"), estimate.get("measured_peak_bytes")
        if predicted and measured:
            place = path.parent.relative_to(folder)
            name = folder.resolve().name if place == Path() else str(place)  # ``folder`` may be the run itself
            yield Compared(name, predicted, measured)


def _table(found: list[Compared]) -> str:
    titles = ("run", "predicted", "measured", "error")
    rows = [
        [one.run, readable(one.predicted_bytes), readable(one.measured_bytes), f"{one.error:+.1%}"]
        for one in sorted(found, key=lambda one: -abs(one.error))
    ]
    return rendered(figures_table(titles, rows, left=["run"], framed=False, overflow="fold"))
