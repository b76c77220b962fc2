"""Is S a stopping signal that needs no held-out data? Runs without control, with S and the held-out loss measured.

    python benchmarks/loops/early_stop.py [--seeds 0 1] [--steps 300]

For each condition: the held-out bits per token at the step where S first reaches the threshold, minus the lowest of the
run (the best stop that held-out data could have found). This is compared with stopping after a fixed number of passes
over the data, and with running to the end. Each condition differs from the reference in one setting: rank, learning
rate, number of rows, batch, schedule, or scale of the adapters. S is measured on the effective update and also on the
factors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from benchmarks.lib.common import (
    collator,
    embedded_data,
    embedded_model,
    quiet,
    scratch_arguments,
    shown,
    write_result,
)
from scu_trainer import SCUTrainer
from scu_trainer.run_files import read_rows
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.evaluation.scoring import score_documents
from scu_trainer.train.regularization.penalty import Prior, param_bpt
from scu_trainer.train.run_directory.logs import run_log

THRESHOLD = 0.1
SIGMA = 0.1
BLOCK = 128
EVERY = 10
PASSES = 6
HELD_OUT_ROWS = 96
REFERENCE = {"rows": 128, "rank": 8, "alpha": 16.0, "rate": 4e-3, "batch": 8, "schedule": "constant_with_warmup"}
CONDITIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "rank 2": {"rank": 2, "alpha": 4.0},
    "rank 32": {"rank": 32, "alpha": 64.0},
    "rate x 0.4": {"rate": 1.6e-3},
    "rate x 2.5": {"rate": 1e-2},
    "64 rows": {"rows": 64},
    "256 rows": {"rows": 256},
    "batch 16": {"batch": 16},
    "linear decay": {"schedule": "linear"},
    "alpha x 4": {"alpha": 64.0},
    "alpha / 4": {"alpha": 4.0},
}


class Watch(TrainerCallback):
    """Measures the held-out bits per token, and S on the factors, every EVERY steps."""

    def __init__(self, held_out, tokens: float) -> None:
        self.held_out, self.tokens = held_out, tokens
        self.points: list[dict[str, float]] = []

    def attach(self, trainer: SCUTrainer) -> None:
        self.trainer = trainer
        self.factors = Prior(trainer.model, "init", "factors")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            self.note(state.global_step)

    def note(self, step: int) -> None:
        scores = score_documents(self.trainer.model, self.held_out, collator())
        bits = param_bpt(float(self.factors.squared_distance()), SIGMA, self.tokens)
        data_bpt = self.trainer.regularizer.state.data_bpt_ema
        factors_s = 0.0 if data_bpt is None else bits / (bits + data_bpt)
        self.points.append({"step": step, "bpt": scores.bpt, "s_factors": factors_s})


def run(seed: int, steps: int, condition: dict[str, Any]) -> dict[str, Any]:
    setup = {**REFERENCE, **condition}
    data = embedded_data(
        seed, dataset="stdlib_docstrings", block_size=BLOCK, dataset_size=200, validation_split_percentage=20
    )
    held_out = data.eval.select(range(min(HELD_OUT_ROWS, len(data.eval))))
    rows = data.train.select(range(setup["rows"]))
    tokens = float(sum(len(row["labels"]) - 1 for row in rows))
    watch = Watch(held_out, tokens)
    with scratch_arguments(
        max_steps=steps,
        learning_rate=setup["rate"],
        lr_scheduler_type=setup["schedule"],
        per_device_train_batch_size=setup["batch"],
        weight_decay=0.0,
        seed=seed,
    ) as arguments:
        trainer = SCUTrainer(
            model=embedded_model(seed, lora_r=setup["rank"], lora_alpha=setup["alpha"]),
            args=arguments,
            data_collator=collator(),
            train_dataset=rows,
            callbacks=[watch],
            regularization=RegularizationSettings(law="fixed", lambda_init=0.0, sigma=SIGMA),
            regularization_tokens=tokens,
        )
        watch.attach(trainer)
        watch.note(0)
        quiet(trainer).train()
        history = {row["step"]: row["s_ema"] for row in read_rows(Path(arguments.output_dir) / "scu_history.json")}
    for point in watch.points:
        point["s_effective"] = history.get(point["step"], 0.0)
    return {**judge(watch.points, setup), "points": watch.points}


def judge(points: list[dict[str, float]], setup: dict[str, Any]) -> dict[str, Any]:
    """Return, for each stopping rule, how many held-out bits per token more than the best stop it has."""
    best = min(points, key=lambda point: point["bpt"])
    fixed_step = PASSES * setup["rows"] / setup["batch"]
    rules = {
        "effective": _at(points, lambda p: p["s_effective"] >= THRESHOLD),
        "factors": _at(points, lambda p: p["s_factors"] >= THRESHOLD),
        "passes": _at(points, lambda p: p["step"] >= fixed_step),
        "end": points[-1],
    }
    excess = {name: None if point is None else point["bpt"] - best["bpt"] for name, point in rules.items()}
    return {"best_step": best["step"], "best_bpt": best["bpt"], "start_bpt": points[0]["bpt"], "excess": excess}


def _at(points: list[dict[str, float]], reached) -> Optional[dict[str, float]]:
    return next((point for point in points if reached(point)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    results = []
    with run_log():
        for name, condition in CONDITIONS.items():
            for seed in options.seeds:
                results.append({"condition": name, "seed": seed, **run(seed, options.steps, condition)})
                print(name, seed, {k: shown(v) for k, v in results[-1]["excess"].items()}, flush=True)
    _report(results)
    write_result("early_stop", {"threshold": THRESHOLD, "sigma": SIGMA, "results": results})


def _report(results: list[dict[str, Any]]) -> None:
    heads = ("condition", "best step", "S effective", "S factors", f"{PASSES} passes", "to the end")
    title = f"held-out bits per token above the best stop (S threshold {THRESHOLD}, never reached: -)"
    table = Table(*heads, title=title)
    rules = ("effective", "factors", "passes", "end")
    for name in CONDITIONS:
        mine = [r for r in results if r["condition"] == name]
        table.add_row(name, "/".join(str(r["best_step"]) for r in mine), *(_cell(mine, rule) for rule in rules))
    table.add_row("mean (worst)", "", *(_summary(results, rule) for rule in rules))
    Console(width=110).print(table)


def _cell(results: list[dict[str, Any]], rule: str) -> str:
    return " ".join(shown(r["excess"][rule]) for r in results)


def _summary(results: list[dict[str, Any]], rule: str) -> str:
    found = [r["excess"][rule] for r in results if r["excess"][rule] is not None]
    missed = len(results) - len(found)
    text = f"{mean(found):.3f} ({max(found):.3f})" if found else "-"
    return text + (f", {missed} never" if missed else "")


if __name__ == "__main__":
    main()
