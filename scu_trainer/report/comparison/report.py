"""Build the content of comparison.json from the run directories of the arms and seeds. Reads files only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from scu_trainer.errors import StorageError
from scu_trainer.json_types import first_misfit
from scu_trainer.report.comparison import statistics
from scu_trainer.run_files import read_json, read_object, read_rows

COMPARISON_FILE, FORMAT = "comparison.json", 1
NOTHING_HELD_OUT = "nothing was held out"
SAME_BITS = 1e-4
"""Relative difference of the held-out bits before training up to which two runs count as having the same weights."""

Run = dict[str, Any]

NUMBER = (int, float, type(None))
TEXT = (str, type(None))
INTERVAL = {"value": (int, float), "low": NUMBER, "high": NUMBER}
METRICS = {"held_out_bpt": NUMBER}
ADDED = ("unit", "item", "held_out_accuracy", "accuracy_difference")
"""Keys that are missing in files of earlier versions, and in comparisons of rows without classes."""
SHAPE = {
    "command": str, "seeds": [int], "reference": str, "confidence": (int, float), "verdict": str, "notes": [str],
    "budget": {"steps": NUMBER, "tokens": NUMBER}, "unit": TEXT, "item": TEXT,
    "arms": [{"name": str, "what": str, "settings": dict}],
    "runs": [{"arm": str, "seed": int, "status": str, "folder": TEXT, "error": TEXT, "metrics": METRICS}],
    "table": [{"arm": str, "verdict": str, "finished": int, "asked": int, "held_out_bpt": INTERVAL,
               "difference": INTERVAL, "best_held_out_bpt": NUMBER, "tracking_error": NUMBER,
               "settling_step": NUMBER, "settled": NUMBER, "overhead_fraction": NUMBER,
               "held_out_accuracy": INTERVAL, "accuracy_difference": INTERVAL}],
}  # fmt: skip
"""The keys and types that comparison.json must have, which are checked because users may edit the file."""


def find_wrong_type(value: Any, shape: Any = SHAPE, name: str = COMPARISON_FILE) -> Optional[str]:
    """Describe the first value in comparison.json that is missing or has the wrong type; None if there is none."""
    if (shape is INTERVAL and value is None) or (shape is METRICS and value == {}):
        return None
    if not isinstance(value, type(shape) if isinstance(shape, (dict, list)) else shape):
        return f"{name} is {value!r:.60}"
    if isinstance(shape, list):
        return first_misfit(find_wrong_type(item, shape[0], f"{name}[{i}]") for i, item in enumerate(value))
    if not isinstance(shape, dict):
        return None
    inside = {key: key if shape is SHAPE else f"{name}.{key}" for key in shape}
    missing = next((f"{inside[key]} is missing" for key in shape if key not in {*value, *ADDED}), None)
    return missing or first_misfit(find_wrong_type(value.get(key), shape[key], inside[key]) for key in shape)


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARISON_FILE).is_file()


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of comparison.json. Raises StorageError if this version cannot read the file."""
    path = folder / COMPARISON_FILE
    content = read_json(path)
    fix = "move it away, and write it again with scu-trainer compare"
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise StorageError(f"{path} is not a comparison of this version (format {found}, not {FORMAT}); {fix}")
    if (wrong := find_wrong_type(content)) is not None:
        raise StorageError(f"{path} was changed: {wrong}; {fix}")
    return content


def record(plan: Mapping[str, Any], states: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the content of comparison.json, without its dates.

    ``plan``: command, config, seeds, reference, confidence and arms. ``states``: arm, seed, status, folder (below
    ``folder``) and error of every requested run, in order.
    """
    runs = [_run_entry(state, folder) for state in states]
    names, reference = [arm["name"] for arm in plan["arms"]], plan["reference"]
    left_out = unequal_runs(runs, reference, names)
    for run in runs:
        run["error"] = left_out.get((run["arm"], run["seed"]), run["error"])
    counted = {name: _by_seed(runs, name, left_out) for name in names}
    return {
        "format": FORMAT,
        **{key: plan[key] for key in ("command", "config", "seeds", "reference", "confidence")},
        "budget": {"steps": _common_value(runs, "steps"), "tokens": _common_value(runs, "tokens")},
        **{key: _common_value(runs, key) for key in ("unit", "item")},
        "arms": list(plan["arms"]),
        "runs": runs,
        "table": [_table_row(name, plan, runs, counted, left_out) for name in names],
        "verdict": _verdict(plan, runs, counted),
        "notes": [
            *_equality_notes(runs, left_out),
            *statistics.notes(counted, reference, plan["confidence"], len(plan["seeds"])),
        ],
    }


# -- runs --------------------------------------------------------------------------------------------------------------


def _run_entry(state: Mapping[str, Any], folder: Path) -> Run:
    is_finished = state["status"] == "finished"
    metrics = metrics_of(folder / state["folder"]) if is_finished else {}
    return {**{key: state[key] for key in ("arm", "seed", "status", "folder", "error")}, "metrics": metrics}


def metrics_of(run: Path) -> dict[str, Any]:
    """Return the figures of a finished run. A figure that it does not have is None. Raises StorageError."""
    try:
        figures = _figures_of(run)
        for name in {*figures} - {"tracking_verdict", "unit", "item", "data_fingerprint"}:
            if not isinstance(figures[name], NUMBER) or not math.isfinite(figures[name] or 0):
                raise TypeError(f"{name} is {figures[name]!r:.60}")
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{run / 'scu_metrics.json'}, or a file next to it, holds what no run writes ({error}); restore it from a "
            f"copy, or move {run} away and train it again"
        ) from error
    return figures


def _figures_of(run: Path) -> dict[str, Any]:
    found, description = read_object(run / "scu_metrics.json"), read_object(run / "training_config.json")
    control, best = found.get("regularization") or {}, found.get("best_held_out") or {}
    settling_step = control.get("settling_step")
    return {
        "held_out_documents": found.get("held_out_documents"),
        "held_out_bpt": _value(found, "held_out_bpt_after"),
        "held_out_bpt_before": _value(found, "held_out_bpt_before"),
        "held_out_accuracy": _value(found, "held_out_accuracy_after"),
        "best_held_out_bpt": None if "accuracy" in best else best.get("bpt"),  # chosen by accuracy: not the fewest bits
        "tracking_error": None if settling_step is None else _tracking_error(run, control, settling_step),
        "settling_step": settling_step,
        "tracking_verdict": control.get("verdict") if "settling_step" in control else None,
        "overhead_fraction": control.get("overhead_fraction"),
        "steps": found["steps"],
        "unit": found.get("unit", "token"),
        "item": found.get("item", "document"),
        # Real tokens are counted by the curriculum and by the memory loop, if their statistics were on.
        "tokens": (found.get("curriculum") or found.get("memory") or {}).get("real_tokens"),
        "data_fingerprint": (description.get("data") or {}).get("fingerprint"),
        "final_s": control.get("final_s"),
        "final_lambda": control.get("final_lambda"),
        "seconds": found.get("train_s"),
    }


def _value(found: Mapping[str, Any], key: str) -> Optional[float]:
    return (found.get(key) or {}).get("value")


def _tracking_error(run: Path, control: Mapping[str, Any], settling_step: int) -> Optional[float]:
    """Return the mean of |S - target| / target from ``settling_step`` on, where S stays within 10 % of the target."""
    target = control["target_s"]
    rows = [row for row in read_rows(run / "scu_history.json") if row["step"] >= settling_step]
    errors = [abs(row["s_ema"] / target - 1.0) for row in rows if row.get("s_ema") is not None]
    return fmean(errors) if errors else None


def unequal_runs(runs: Sequence[Run], reference: str, arms: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return why finished runs did not train like the reference with their seed, by (arm, seed). They are not compared.
    Where the reference has no run with a seed, the first arm that has one stands in."""
    found = {}
    for seed in {run["seed"]: None for run in runs}:
        group = {run["arm"]: run for run in runs if run["seed"] == seed and run["status"] == "finished"}
        against = next((name for name in (reference, *arms) if name in group), None)
        for name, run in group.items():
            reason = _inequality_reason(run["metrics"], group[against]["metrics"], against)
            if reason is not None:
                found[name, seed] = f"left out: {reason}"
    return found


def _inequality_reason(run: Mapping[str, Any], other: Mapping[str, Any], name: str) -> Optional[str]:
    if run["held_out_bpt"] is None:
        return NOTHING_HELD_OUT if run["held_out_documents"] == 0 else "it has no finite held-out figure"
    for key, what in (("tokens", f"trained {{}} {data_unit(run)}s"), ("steps", "took {} steps")):
        if run[key] != other[key]:
            return f"it {what.format(run[key])}, {name} {other[key]}"
    if run["data_fingerprint"] != other["data_fingerprint"]:
        return f"its data are not those of {name}"
    before, expected = run["held_out_bpt_before"], other["held_out_bpt_before"]
    if before is not None and expected is not None and abs(before - expected) > SAME_BITS * abs(expected):
        return f"it began at {before:.4f} held-out bits, {name} at {expected:.4f}: other weights"
    return None


def data_unit(found: Mapping[str, Any]) -> str:
    """Return the unit in which training data is counted: token or word, or for classifiers the item, such as image."""
    unit = found.get("unit") or "token"
    return str(found.get("item")) if unit == "label" else unit


def _by_seed(
    runs: Sequence[Run], arm: str, left_out: Mapping[tuple[str, int], str], figure: str = "held_out_bpt"
) -> dict[int, float]:
    return {
        run["seed"]: run["metrics"][figure]
        for run in runs
        if run["arm"] == arm and run["status"] == "finished" and (arm, run["seed"]) not in left_out
    }


def _common_value(runs: Sequence[Run], key: str) -> Any:
    """Return the value that all finished runs share, or None if they differ, as they may between seeds."""
    values = {run["metrics"][key] for run in runs if run["status"] == "finished"}
    return values.pop() if len(values) == 1 else None


# -- the table ---------------------------------------------------------------------------------------------------------


def _table_row(name: str, plan: Mapping[str, Any], runs: Sequence[Run], counted, left_out) -> dict[str, Any]:
    reference, confidence = plan["reference"], plan["confidence"]
    own = [run for run in runs if run["arm"] == name]
    metrics = [run["metrics"] for run in own if run["seed"] in counted[name]]
    difference = None
    if name != reference:
        difference = statistics.paired_difference(counted[name], counted[reference], confidence)
    settled = [entry["settling_step"] for entry in metrics if entry["settling_step"] is not None]
    is_controlled = any(entry["tracking_verdict"] is not None for entry in metrics)
    return {
        "arm": name,
        "finished": len(counted[name]),
        "asked": len(own),
        "held_out_bpt": _as_dict(statistics.t_interval(list(counted[name].values()), confidence)),
        "best_held_out_bpt": _mean(metrics, "best_held_out_bpt"),
        "difference": _as_dict(difference),
        **_accuracy_columns(name, reference, confidence, runs, left_out),
        "tracking_error": _mean(metrics, "tracking_error"),
        "settling_step": fmean(settled) if settled else None,
        "settled": len(settled) if is_controlled else None,
        "overhead_fraction": _mean(metrics, "overhead_fraction"),
        "verdict": _arm_verdict(name, reference, difference, counted, own, left_out),
    }


def _accuracy_columns(name: str, reference: str, confidence: float, runs: Sequence[Run], left_out) -> dict[str, Any]:
    """Return the accuracy columns of a row; {} if the runs are not of a classifier."""
    own, other = (_by_seed(runs, arm, left_out, "held_out_accuracy") for arm in (name, reference))
    if not own or None in [*own.values(), *other.values()]:
        return {}
    difference = None if name == reference else statistics.paired_difference(own, other, confidence)
    return {
        "held_out_accuracy": _as_dict(statistics.t_interval(list(own.values()), confidence)),
        "accuracy_difference": _as_dict(difference),
    }


def _as_dict(interval: Optional[statistics.ConfidenceInterval]) -> Optional[dict[str, Any]]:
    return None if interval is None else asdict(interval)


def _mean(metrics: Sequence[Mapping[str, Any]], key: str) -> Optional[float]:
    values = [entry[key] for entry in metrics if entry[key] is not None]
    return fmean(values) if values else None


def _arm_verdict(name: str, reference: str, difference, counted, own: Sequence[Run], left_out) -> str:
    pairs = len(counted[name].keys() & counted[reference].keys())
    said = "the reference" if name == reference else statistics.sentence(difference, pairs, reference)
    troubles = [f"seed {run['seed']} {_trouble(run, left_out)}" for run in own if run["seed"] not in counted[name]]
    return "; ".join([said, *troubles])


def _trouble(run: Run, left_out: Mapping[tuple[str, int], str]) -> str:
    if (run["arm"], run["seed"]) in left_out or run["status"] == "missing":
        return str(run["error"])
    return f"failed: {run['error']}" if run["status"] == "failed" else "is running"


def _verdict(plan: Mapping[str, Any], runs: Sequence[Run], counted) -> str:
    states = Counter(run["status"] for run in runs)
    said = []
    if states["finished"] < len(runs):
        words = {"failed": "failed", "running": "are running", "missing": "are not done"}
        others = ", ".join(f"{states[key]} {text}" for key, text in words.items() if states[key])
        said.append(f"Not complete: {states['finished']} of {len(runs)} runs are finished, {others}.")
    return " ".join([*said, statistics.overall(counted, plan["reference"], plan["confidence"])])


def _equality_notes(runs: Sequence[Run], left_out: Mapping[tuple[str, int], str]) -> list[str]:
    finished = [run for run in runs if run["status"] == "finished"]
    if not finished:
        return []
    found = [f"{arm}, seed {seed}: {reason}." for (arm, seed), reason in left_out.items()]
    what = f"{data_unit(finished[0]['metrics'])}s".capitalize()
    if any(run["metrics"]["tokens"] is None for run in finished):
        return [*found, f"{what} were not counted in these runs; only steps and data were seen to be equal."]
    tokens = {run["seed"]: run["metrics"]["tokens"] for run in finished if (run["arm"], run["seed"]) not in left_out}
    listed = ", ".join(f"{count:,} (seed {seed})" for seed, count in sorted(tokens.items()))
    which = "all other finished runs" if left_out else "all finished runs"
    return [
        *found,
        f"{what} trained: {listed}, the same in {which} of a seed; so are steps, data and held-out bits before "
        "training.",
        *_shared_data_note(finished),
    ]


def _shared_data_note(finished: Sequence[Run]) -> list[str]:
    """Return a note if all seeds share their data, as with data_seed."""
    seeds, data = {run["seed"] for run in finished}, {run["metrics"]["data_fingerprint"] for run in finished}
    if len(seeds) < 2 or len(data) > 1 or None in data:
        return []
    item = f"{finished[0]['metrics']['item']}s"
    return [f"All seeds share their {item}, learned and held out, so intervals say nothing about other {item}."]
