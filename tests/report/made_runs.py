"""Run directories and a comparison as training and comparing write them, made without training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scu_trainer.report.drawing import Plot
from scu_trainer.run_files import History, write_json

GIB = 2**30
CONFIGURATION = {
    "task": "text-generation",
    "model_name_or_path": None,
    "dataset": "stdlib_docstrings",
    "scu": True,
    "memory_control": True,
    "curriculum": "noise_guard",
    "learning_rate": 0.004,
    "max_steps": 60,
    "seed": 0,
    "output_dir": "runs/made",
}


def interval(value: float, half: float = 0.1) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half, "confidence": 0.95}


def make_run(folder: Path, steps: int = 60, status: str = "finished", best: float = 6.8, **settings: Any) -> Path:
    """``settings``: of the configuration, instead of those above; with ``scu`` or ``memory_control`` False the files of
    that loop are not written."""
    folder.mkdir(parents=True)
    configuration = {**CONFIGURATION, **settings}
    write_json(folder / "run.json", _status(status, steps))
    write_json(folder / "training_config.json", _description(configuration))
    _write(folder / "log_history.json", _logs(steps, best, configuration["memory_control"]))
    if configuration["scu"]:
        _write(folder / "scu_history.json", _control(steps))
    if configuration["memory_control"]:
        _write(folder / "memory_history.json", _memory())
    _write(folder / "curriculum.json", _epochs())
    (folder / "suspects.jsonl").write_text('{"sample_index": 3}\n{"sample_index": 9}\n')
    if status == "finished":
        write_json(folder / "scu_metrics.json", _metrics(best, configuration["scu"]))
    return folder


DRAWN: dict[tuple[str, str, Any], Any] = {}
"""By what draws, all that a plot says, and its width or theme."""


@contextlib.contextmanager
def drawn_once() -> Iterator[None]:
    """The drawings of a run take two seconds. Those of the same plot are the same, as the tests of the report say."""
    from scu_trainer.cli.publishing import report
    from scu_trainer.report import page

    def kept(draw: Callable[[Plot, Any], Any]) -> Callable[[Plot, Any], Any]:
        def drawn(plot: Plot, how: Any) -> Any:
            key = (draw.__name__, repr(plot), how)
            if key not in DRAWN:
                DRAWN[key] = draw(plot, how)
            return DRAWN[key]

        return drawn

    with patch.object(page, "svg", kept(page.svg)), patch.object(report, "png", kept(report.png)):
        yield


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with History(path) as history:
        history.append_many(rows)


def _status(status: str, steps: int) -> dict[str, Any]:
    moment = "2020-01-02T03:04:05.000+00:00"
    return {
        "status": status, "pid": 2**22 + 1, "step": steps, "max_steps": 60, "loss": 4.7, "eta_s": None,
        "started": moment, "updated": moment, "error": "disk on fire" if status == "failed" else None,
        "notices": ["S was measured late"],
    }  # fmt: skip


def _description(configuration: dict[str, Any]) -> dict[str, Any]:
    return {
        "configuration": configuration,
        "versions": {"python": "3.11.2", "platform": "Linux", "torch": "2.13.0", "peft": None},
        "git_commit": "0123456789abcdef",
        "seed": configuration["seed"],
        "world_size": 1,
        "data": {"fingerprint": "f00d", "blocks": 258},
        "hardware": {"device": "cpu", "cpu": "A CPU", "cores": 2, "threads": 2, "ram_bytes": 8 * GIB, "gpus": []},
        "changed_from": {"learning_rate": 5e-5, "max_steps": -1, "output_dir": "runs/run"},
        "preflight": [
            {"level": "warning", "check": "few-steps", "what": "only 60 steps", "where": "", "fix": "raise max_steps"},
            {"level": "note", "check": "plan-of-steps", "what": "60 steps of 8 rows", "where": "", "fix": ""},
        ],
    }


def _logs(steps: int, best: float, has_memory: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(5, steps + 1, 5):
        row = {
            "step": step, "epoch": step / 30, "loss": 5.3 - step / 100, "grad_norm": 0.4, "learning_rate": 0.004,
            "throughput/tokens_per_second": 3000.0 + step, "throughput/samples_per_second": 12.0, "skipped_steps": 1,
        }  # fmt: skip
        memory = {"chunks": 2, "tokens_per_chunk": 1024, "used_bytes": 2 * GIB, "peak_bytes": 3 * GIB + step * 2**20,
                  "limit_bytes": 4 * GIB}  # fmt: skip
        rows.append(row | ({f"memory/{name}": value for name, value in memory.items()} if has_memory else {}))
        if step % 20 == 0:
            rows.append({"step": step, "epoch": step / 30, "eval_bpt": best + 0.6 * math.exp(-step / 20)})
    return rows


def _control(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step, "tokens": 2048 * step, "loss": 5.3 - step / 100, "data_bpt": 7.6 - step / 60,
            "s": 0.1 * (1 - math.exp(-step / 12)) + 0.003 * math.sin(step), "s_ema": 0.1 * (1 - math.exp(-step / 12)),
            "s_target": 0.1, "lambda": max(0.0, (step - 15) / 15), "saturated": "",
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


def _memory() -> list[dict[str, Any]]:
    size = {"used_bytes": 2 * GIB, "peak_bytes": 4 * GIB, "limit_bytes": 4 * GIB}
    return [
        {"step": 7, "rows_per_chunk": 4, "tokens_per_chunk": 1024, **size, "pressure": "critical",
         "reason": "out of memory at 8 rows x 256; retrying as 2 x 4 rows x 256"},
        {"step": 9, "rows_per_chunk": 2, "tokens_per_chunk": 512, **size, "pressure": "critical",
         "reason": "out of memory at 4 rows x 256; retrying as 2 x 2 rows x 256"},
        {"step": 30, "rows_per_chunk": 4, "tokens_per_chunk": 1024, **size, "pressure": "low", "reason": "room again"},
    ]  # fmt: skip


def _epochs() -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch, "step": 30 * epoch, "steps": 30, "complete": True, "curriculum": "noise_guard",
            "rows": 258 - 4 * epoch, "real_tokens": 66000, "padded_tokens": 67000, "cut_tokens": 0, "samples": 258,
            "seen": 258, "skipped": {"suspected": 4 * epoch}, "readmitted": 0, "repeated": 0, "suspects": 4 * epoch,
            "weights": None, "unseen": 0, "stale": 0, "quarantined": 0, "notes": [],
            "difficulty": {f"p{share}": 4.0 + share / 50 - epoch / 5 for share in (0, 10, 25, 50, 75, 90, 100)},
        }
        for epoch in (1, 2)
    ]  # fmt: skip


def _metrics(best: float, has_scu: bool) -> dict[str, Any]:
    control = {
        "law": "model", "final_s": 0.0993, "final_lambda": 3.0, "target_s": 0.1, "verdict": "on target",
        "overhead_fraction": 0.004, "settling_step": 28, "notices": [],
    }  # fmt: skip
    return {
        "steps": 60, "train_s": 70.3, "unit": "token", "item": "document",
        "held_out_bpt_before": interval(7.48), "held_out_bpt_after": interval(best),
        "held_out_bpt_change": interval(best - 7.48), "best_held_out": {"step": 40, "bpt": best - 0.02},
        "costs": {"device": "cpu", "peak_bytes": 3 * GIB}, "memory": {"out_of_memory": 2},
        "bad_numbers": {"skipped_steps": 1, "skipped": [{"step": 12, "place": "lm_head", "rows": [3]}]},
        **({"regularization": control} if has_scu else {}),
    }  # fmt: skip


# -- a comparison ------------------------------------------------------------------------------------------------------

ARMS = {
    "none": 6.86,
    "fixed-1": 6.83,
    "weight_decay-10": 6.81,
    "original": None,
    "model": 6.79,
    "schedule-cosine": None,
}
"""Mean held-out bits; None: an arm without a finished run."""


def make_comparison(folder: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """One arm has failed, one has not begun."""
    runs = [_run_of(folder, arm, seed) for arm in ARMS for seed in seeds]
    content = {
        "format": 1, "created": "2026-01-02T03:04:05+00:00", "updated": "2026-01-02T04:04:05+00:00",
        "command": "scu-trainer compare --config recipes/compare.yaml", "config": "recipes/compare.yaml",
        "seeds": list(seeds), "reference": "none", "confidence": 0.95, "budget": {"steps": 60, "tokens": 122880},
        "arms": [{"name": arm, "label": arm, "what": f"what {arm} does", "settings": {"scu": arm == "model"}}
                 for arm in ARMS],
        "runs": runs, "table": [_table_row(arm, len(seeds)) for arm in ARMS],
        "verdict": "model is lower than none by 0.070 (0.050 to 0.090); 5 comparisons were made.",
        "notes": ["3 seeds are few: the intervals are wide."],
    }  # fmt: skip
    write_json(folder / "comparison.json", content)
    return folder


def _run_of(folder: Path, arm: str, seed: int) -> dict[str, Any]:
    mean, name = ARMS[arm], f"runs/{arm}-seed{seed}"
    common = {"arm": arm, "seed": seed, "folder": name, "error": None, "metrics": {}}
    if mean is None:
        is_failed = arm == "original"
        error = "error: the penalty cannot act" if is_failed else None
        return {**common, "status": "failed" if is_failed else "missing", "error": error}
    make_run(folder / name, best=mean + 0.01 * seed, seed=seed, scu=arm == "model")
    return {**common, "status": "finished", "metrics": {"held_out_bpt": mean + 0.01 * seed, "final_s": 0.1}}


def _table_row(arm: str, asked: int) -> dict[str, Any]:
    mean = ARMS[arm]
    nothing = "held_out_bpt best_held_out_bpt difference tracking_error settling_step settled overhead_fraction".split()
    row = {"arm": arm, "finished": 0, "asked": asked, **dict.fromkeys(nothing), "verdict": "no run finished"}
    if mean is None:
        return row
    change = None if arm == "none" else interval(mean - 6.86, 0.02)
    return {**row, "finished": asked, "held_out_bpt": interval(mean + 0.01, 0.025), "difference": change,
            "overhead_fraction": 0.004, "verdict": "lower than none" if change else "the reference"}  # fmt: skip


def make_two_and_a_study(folder: Path) -> None:
    """``one``, ``off`` (without its loops) and the comparison ``study``."""
    make_run(folder / "one")
    make_run(folder / "off", scu=False, memory_control=False, best=6.9, learning_rate=0.002)
    make_comparison(folder / "study")
