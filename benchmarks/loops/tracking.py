"""Does S follow its target? Settling, overshoot, bias, a change of data, and an unreachable target, over several seeds.

    python benchmarks/loops/tracking.py [--seeds 0 1 2] [--steps 300]

Uses recipes/scu_lora.yaml without its evaluations. "settled": the first step after which S stays within 10 % of its
target. "re-settles": the same, counted from the step at which the rows change from docstrings to source code.
"deviation": the largest relative error after that step.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

from datasets import concatenate_datasets
from rich.console import Console
from rich.table import Table

from benchmarks.lib.common import (
    collator,
    embedded_data,
    embedded_model,
    quiet,
    scratch_arguments,
    write_result,
)
from scu_trainer import SCUTrainer
from scu_trainer.cli.configuration_file import read_file
from scu_trainer.control.tracking import assess
from scu_trainer.run_files import read_rows
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.run_directory.logs import run_log

RECIPE = read_file(Path(__file__).parents[2] / "recipes" / "scu_lora.yaml")
UNREACHABLE = 0.9


def run(seed: int, steps: int, target_s: float, change_at: int = 0, **training: Any) -> list[dict[str, Any]]:
    """Return the history of one run. ``change_at``: the step from which rows are source code instead of docstrings."""
    data = embedded_data(
        seed,
        dataset=RECIPE["dataset"],
        dataset_size=RECIPE["dataset_size"],
        block_size=RECIPE["block_size"],
        validation_split_percentage=RECIPE["validation_split_percentage"],
    )
    rows, order = data.train, "random"
    if change_at:
        rows, order = _with_change(data.train, seed, steps, change_at), "sequential"
    settings = RegularizationSettings(target_s=target_s, sigma=RECIPE["scu_sigma"])
    defaults = {
        "max_steps": steps,
        "learning_rate": RECIPE["learning_rate"],
        "per_device_train_batch_size": RECIPE["per_device_train_batch_size"],
        "train_sampling_strategy": order,
        "seed": seed,
    }
    with scratch_arguments(**{**defaults, **training}) as arguments:
        trainer = SCUTrainer(
            model=embedded_model(seed, lora_r=RECIPE["lora_r"], lora_alpha=RECIPE["lora_alpha"]),
            args=arguments,
            data_collator=collator(),
            train_dataset=rows,
            regularization=settings,
            regularization_tokens=data.statistics.supervised_tokens,
        )
        quiet(trainer).train()
        history = read_rows(Path(arguments.output_dir) / "scu_history.json")
    return [{**row, "notices": trainer.regularizer.progress.notices} for row in history]


def _with_change(before, seed: int, steps: int, change_at: int):
    """Return the rows in the order of training: docstrings before step ``change_at``, source code from then on."""
    batch = RECIPE["per_device_train_batch_size"]
    after = embedded_data(seed, dataset="stdlib_source", dataset_size=40, block_size=RECIPE["block_size"]).train
    first, second = change_at * batch, (steps - change_at) * batch
    repeated = [i % len(before) for i in range(first)]
    return concatenate_datasets([before.select(repeated), after.select([i % len(after) for i in range(second)])])


def figures(history: list[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    rows = [row for row in history if row["step"] > start and row["s_ema"] is not None]
    found = asdict(
        assess(
            [r["step"] for r in rows], [r["s_ema"] for r in rows], rows[0]["s_target"], [r["saturated"] for r in rows]
        )
    )
    errors = [abs(r["s_ema"] / r["s_target"] - 1) for r in rows]
    return {**found, "largest_deviation": max(errors), "notices": history[-1]["notices"]}


def campaign(seeds: list[int], steps: int) -> list[dict[str, Any]]:
    target = float(RECIPE["scu_target_s"])
    change = steps // 2
    results = []
    for seed in seeds:
        results.append({"case": "recipe", "seed": seed, **figures(run(seed, steps, target))})
        linear = run(seed, steps, target, lr_scheduler_type="linear")
        results.append({"case": "recipe, rate decays linearly", "seed": seed, **figures(linear)})
        changed = figures(run(seed, steps, target, change_at=change), start=change)
        if changed["settling_step"] is not None:
            changed["settling_step"] -= change
        results.append({"case": f"data change at step {change}", "seed": seed, **changed})
        results.append({"case": f"target {UNREACHABLE}", "seed": seed, **figures(run(seed, steps // 2, UNREACHABLE))})
    return results


def _percent(value: Optional[float]) -> str:
    return "-" if value is None else f"{100 * value:+.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with run_log():
        results = campaign(options.seeds, options.steps)
    heads = ("case", "seed", "settled", "overshoot", "bias", "deviation", "verdict")
    table = Table(*heads, title="tracking of S on the embedded recipe")
    for r in results:
        deviation = r["largest_deviation"] if r["case"].startswith("data change") else None
        cells = [_percent(value) for value in (r["overshoot"], r["bias"], deviation)]
        table.add_row(r["case"], str(r["seed"]), str(r["settling_step"] or "-"), *cells, r["verdict"])
    Console(width=110).print(table)
    for text in sorted({json.dumps(r["notices"]) for r in results if r["notices"]}):
        Console(width=110).print(text)
    write_result("tracking", {"results": results})


if __name__ == "__main__":
    main()
