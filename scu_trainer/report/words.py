"""Format the figures of a run as text, the same way on every page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

from scu_trainer.figures import NONE, before_and_after, best_evaluation, bits_of, count_text, held_out_size
from scu_trainer.report.files import RunFiles, newest, points
from scu_trainer.report.run_plots import in_bits, number, only_measured, ooms
from scu_trainer.run_files import format_bytes
from scu_trainer.settings.mixture import dataset_label
from scu_trainer.settings.tasks import TEXT


def key_figures(run: RunFiles) -> list[tuple[str, str]]:
    """Return the names and values of the most important figures."""
    control = run.metrics.get("regularization") or {}
    cost, strength = control.get("overhead_fraction"), newest(run.control, "lambda")
    speeds = points(run.logs, "throughput/tokens_per_second")[1]
    return [
        ("status", f"{run.state}: {run.detail}" if run.detail else run.state),
        ("steps", _steps(run)),
        *_held_out_figures(run),
        ("training loss, last logged", _loss(run)),
        ("S", _s_text(run, control)),
        ("lambda, newest", NONE if only_measured(run) else number(control.get("final_lambda", strength))),
        ("cost of measuring and steering S", NONE if cost is None else f"{cost:.2%} of the training time"),
        ("tokens per second, mean", number(sum(speeds) / len(speeds) if speeds else None)),
        ("peak memory", _peak(run)),
        ("out of memory, recovered", _ooms(run)),
        ("training time", duration(run.metrics.get("train_s") or newest(run.logs, "train_runtime"))),
        ("seed", str(run.config.get("seed", NONE))),
        ("model", _model(run)),
        ("data", _data(run)),
    ]


def _model(run: RunFiles) -> str:
    named = run.settings.get("model_name_or_path") or run.settings.get("adapter_name_or_path")
    if named or not run.settings:
        return str(named or NONE)
    if run.settings.get("task", TEXT) == TEXT:
        return "the embedded base model"
    return ", ".join(filter(None, (run.settings.get("architecture"), "from scratch")))


def _loss(run: RunFiles) -> str:
    """Return the last training loss in the unit of its plot. The logs have it in nats."""
    last = next((row["loss"] for row in reversed(run.logs) if "loss" in row), 0.0)
    if last is None or (isinstance(last, float) and not math.isfinite(last)):
        return "not finite"  # our files have null, those of the stock Trainer NaN
    loss = newest(run.logs, "loss")
    if loss is None:
        return NONE
    return f"{bits_of(loss):.3f} bits per {run.unit}" if in_bits(run) else number(loss)


def _steps(run: RunFiles) -> str:
    step, most = run.status.get("step"), run.status.get("max_steps")
    if step is None:
        step = max((row["step"] for row in run.logs if isinstance(row.get("step"), int)), default=None)
    if step is None:
        return "none yet"
    return f"{step:,} of {most:,}" if most else f"{step:,}"


def _held_out_figures(run: RunFiles) -> list[tuple[str, str]]:
    """Return the held-out figures after training, or the last evaluation of a run that has none yet. Another table has
    those before training, and the change."""
    found = [(row.what.strip(), row.after) for row in before_and_after(run.metrics)]
    found += [("held out", held_out_size(run.metrics))] if "held_out_tokens" in run.metrics else []
    if not found:
        newest_bpt = newest(run.logs, "eval_bpt")
        said = NONE if newest_bpt is None else f"{newest_bpt:.3f} at the last evaluation"
        return [(f"held-out bits per {run.unit}", said)]
    best = best_evaluation(run.metrics)
    return found if best is None else [*found, ("best during training", best)]


def _s_text(run: RunFiles, control: Mapping[str, Any]) -> str:
    if run.settings.get("scu") is False:
        return "regularization was off"
    if control.get("verdict") == "not measured":
        return control["verdict"]
    s, target = newest(run.control, "s_ema"), newest(run.control, "s_target")
    if s is None:
        return NONE
    if only_measured(run):
        return f"{s:.4f}, measured, not steered"
    verdict = f": {control['verdict']}" if control.get("verdict") else ""
    return f"{s:.4f}" + ("" if target is None else f" against {target:.4g}") + verdict


def _peak(run: RunFiles) -> str:
    peak = (run.metrics.get("costs") or {}).get("peak_bytes") or (run.metrics.get("memory") or {}).get("peak_bytes")
    if peak:
        return f"{format_bytes(peak)} (this process)"
    logged = points(run.logs, "memory/peak_bytes")[1]
    return f"{format_bytes(max(logged))} (all that counts toward the limit)" if logged else NONE


def _ooms(run: RunFiles) -> str:
    statistics = (run.metrics.get("memory") or {}).get("out_of_memory", newest(run.logs, "memory/out_of_memory"))
    count = len(ooms(run.memory)) or None if statistics is None else statistics
    return NONE if count is None else f"{count:,}"


def _data(run: RunFiles) -> str:
    data = run.config.get("data") or {}
    rows = data.get("blocks", data.get("samples", data.get("rows_read")))
    named = dataset_label(run.settings.get("dataset")) or NONE
    of_pass = " of its last pass" if data.get("streaming") else ""
    is_known = isinstance(rows, int) and (rows or not of_pass)
    return f"{named}, {count_text(rows, 'row')}{of_pass}" if is_known else named


def duration(seconds: Optional[float]) -> str:
    """ "42 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


# -- what a person should know -----------------------------------------------------------------------------------------

MOST_ROWS = 30
"""Largest number of rows of one kind in a list of warnings. The others are only counted."""


def warnings(run: RunFiles) -> list[tuple[str, str]]:
    """Return (source, message) of all errors, warnings and notices of a run."""
    found = [("this report", f"cannot be read: {fault}") for fault in run.faults]
    if run.status.get("error"):
        found.append(("run.json", str(run.status["error"])))
    found += [("run.json", str(text)) for text in run.status.get("notices") or []]
    for part in ("regularization", "curriculum", "throughput"):
        said = (run.metrics.get(part) or {}).get("notices") or []
        found += [
            ("scu_metrics.json", f"{part}: {text}") for text in said if text not in (run.status.get("notices") or [])
        ]
    found += _nonfinite(run) + _preflight(run, ("error", "warning"))
    if run.suspects:
        found.append(("suspects.jsonl", f"rows that look wrong, worst first: {run.suspects:,}"))
    changes = [("memory_history.json", f"step {row.get('step')}: {row.get('reason')}") for row in run.memory]
    if len(changes) > MOST_ROWS:
        changes = [*changes[:MOST_ROWS], ("memory_history.json", f"and {len(changes) - MOST_ROWS:,} more changes")]
    return found + changes


def notes(run: RunFiles) -> list[str]:
    """Return the notes of preflight, which describe the plan of the run."""
    return [text for _, text in _preflight(run, ("note",))]


def _preflight(run: RunFiles, levels: tuple[str, ...]) -> list[tuple[str, str]]:
    said = [item for item in run.config.get("preflight") or [] if item.get("level") in levels]
    return [(f"preflight {item['level']}", _finding(item)) for item in said]


def _finding(item: Mapping[str, Any]) -> str:
    if item.get("level") == "note":
        return str(item.get("what"))
    fix = f"; {item['fix']}" if item.get("fix") else ""
    return f"{item.get('check')}: {item.get('what')}{fix}"


def _nonfinite(run: RunFiles) -> list[tuple[str, str]]:
    statistics = run.metrics.get("bad_numbers") or {}
    count = statistics.get("skipped_steps", newest(run.logs, "skipped_steps")) or 0
    if not count:
        return []
    steps = count_text(count, "step was", "steps were")
    reason = ", or had a spike" if statistics.get("spikes") else ""
    found = [("bad numbers", f"{steps} skipped because the loss or gradient was not finite{reason}")]
    for item in (statistics.get("skipped") or [])[:MOST_ROWS]:
        words = ", ".join(f"{name} {value}" for name, value in item.items() if value not in (None, [], ""))
        found.append(("bad numbers", words))
    return found
