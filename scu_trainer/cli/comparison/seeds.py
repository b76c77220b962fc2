"""``seeds: [0, 1, 2]``: trains the same job once per seed, one after the other, and reports mean and spread. It is a
comparison with one arm, so it writes the same files and resumes in the same way after a kill."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, Optional

from rich.table import Table

from scu_trainer.cli.comparison import screen as screens
from scu_trainer.cli.comparison.plan import refuse_push, resolved_settings, with_threads_and_devices
from scu_trainer.cli.comparison.runs import CONFIDENCE, ComparisonSession, exit_code
from scu_trainer.cli.main import figures_table, plain_console
from scu_trainer.report.comparison.report import NOTHING_HELD_OUT
from scu_trainer.report.comparison.statistics import FEW_SEEDS, t_interval, t_quantile
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_arms import Arm
from scu_trainer.runs.studies.comparison_plan import SHARED_DATA, ComparisonPlan

JOB = Arm("job", "job", "the job as it is configured", {})


def train_seeds(config: Optional[str], flags: Sequence[str], seeds: Sequence[int]) -> int:
    """Train the job of a file and flags with each seed. Returns 1 if a run failed."""
    words = ["--seed", str(seeds[0]), "--resume_from_checkpoint", "auto"]
    settings, text = resolved_settings(config, [*flags, *words])
    refuse_push(settings.get("push_to_hub"), "seed")
    typed = shlex.join([*(["--config", config] if config else []), *flags])
    folder, command = Path(settings["output_dir"]), f"scu-trainer train {typed}"
    plan = ComparisonPlan(folder, command, config, (JOB,), tuple(seeds), 1, {JOB.name: settings}, {JOB.name: text})
    plan, devices = with_threads_and_devices(plan, 1)
    return Seeds(plan, JOB.name, devices, plain_console(), comparison.ComparisonBackend()).run()


class Seeds(ComparisonSession):
    """Runs of one job with several seeds, with a table of seeds instead of a table of arms."""

    what = "seeds"

    def _end(self, record: Mapping[str, Any]) -> int:
        self.console.print(_table(record["runs"]))
        fixed = any(self.plan.resolved[JOB.name].get(name) is not None for name in SHARED_DATA)
        is_scored = any(run["metrics"].get("held_out_documents", 0) != 0 for run in record["runs"])
        notes = different_rows_note(record["runs"]) if is_scored and not fixed else []
        for line in [*seed_spread_lines(record["runs"]), *notes, f"written: {self.plan.folder / 'comparison.json'}"]:
            screens.print_wrapped(self.console, line)
        return exit_code(record, ignored=f"left out: {NOTHING_HELD_OUT}")


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    rows, is_classifier = [], any(run["metrics"].get("held_out_accuracy") is not None for run in runs)
    for run in runs:
        metrics = run["metrics"]
        names = ("held_out_bpt_before", "held_out_bpt", "best_held_out_bpt")
        figures = ["-" if metrics.get(name) is None else f"{metrics[name]:.3f}" for name in names]
        end = run["folder"] if run["status"] == "finished" else f"{run['status']}: {run['error']}"
        if is_classifier:
            accuracy = metrics.get("held_out_accuracy")
            figures[2] = "-" if accuracy is None else f"{accuracy:.1%}"
        rows.append([str(run["seed"]), *figures, str(metrics.get("steps", "-")), end])
    last_title = "accuracy after" if is_classifier else "best during training"
    titles = ("seed", "held-out bits before", "after", last_title, "steps", "run")
    return figures_table(titles, rows, left=["run"], framed=False, overflow="fold")


def seed_spread_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on mean, standard deviation and interval over the finished seeds, and on how reliable they are."""
    finished = [run["metrics"] for run in runs if run["status"] == "finished"]
    values = [metrics["held_out_bpt"] for metrics in finished if metrics.get("held_out_bpt") is not None]
    if len(values) < 2:
        return [f"{len(values)} of {len(runs)} seeds with a held-out figure: too few for a spread"]
    shares = [metrics["held_out_accuracy"] for metrics in finished if metrics.get("held_out_accuracy") is not None]
    lines = [_spread_line("held-out accuracy", shares, ".1%")] if len(shares) > 1 else []
    lines.append(_spread_line("held-out bits", values, ".3f"))
    if len(values) < FEW_SEEDS:
        half_width = t_quantile(CONFIDENCE, len(values) - 1)
        lines.append(f"{len(values)} seeds are few: the interval reaches {half_width:.1f} standard errors to each side")
    return lines


def _spread_line(quantity: str, values: Sequence[float], style: str) -> str:
    interval = t_interval(values, CONFIDENCE)
    mean, low, high = (f"{value:{style}}" for value in (interval.value, interval.low, interval.high))
    return (
        f"{quantity} over {len(values)} seeds: mean {mean}, standard deviation {stdev(values):{style}}, "
        f"{CONFIDENCE:.0%} t interval of the mean {low} to {high}"
    )


def different_rows_note(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if the finished runs may not have held out the same rows."""
    data = {run["metrics"].get("data_fingerprint") for run in runs if run["status"] == "finished"}
    if len(data) < 2 and None not in data:
        return []
    return [
        "each seed holds out its own share of the data, unless they come with held-out rows, so the spread includes "
        "the choice of rows; set data_seed (or eval_dataset) to hold out the same ones"
    ]
