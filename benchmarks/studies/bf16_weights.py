"""The savings and the cost of bfloat16 weights, with stochastic rounding and with Kahan summation.

    python benchmarks/studies/bf16_weights.py [--seeds 0 1 2] [--rates 1e-3 1e-4]

A Llama of 0.6 million random weights is trained on Python's documentation, with the same number of steps for each arm.
All arms compute with bf16 autocast, so that they differ only in what they store. Reports held-out bits per token, and
the bytes of weights and optimizer state, after the last step.

    float32          weights in float32, as a run has them by default
    bfloat16         weights in bfloat16, rounded to the nearest in each step: the naive way
    stochastic       torchao's 8-bit AdamW with bf16_stochastic_round: rounded up or down at random, unbiased
    Kahan            StableAdamW of torch-optimi (if installed), which keeps the rounding error for the next step

torchao's update runs operation by operation here: compiling it takes longer than these runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import write_result
from benchmarks.studies.distillation import llama
from benchmarks.studies.optimizers import state_bytes
from scu_trainer.cli.configuration import read_job
from scu_trainer.errors import RequirementError
from scu_trainer.hardware.optimizers import check_optimizer
from scu_trainer.train.session.building import build_trainer
from scu_trainer.train.session.training import score

STEPS = 150
FLAGS = (
    "--use_cpu true --report_to none --save_strategy no --eval_strategy no --scu false --memory_control false "
    "--dataset python_docs --tuning full --block_size 128 --per_device_train_batch_size 8 --mixed_precision bf16"
)
STOCHASTIC = "bf16_stochastic_round=True"
ARMS: dict[str, tuple[str, torch.dtype, str]] = {
    "AdamW, float32": ("adamw_torch", torch.float32, ""),
    "AdamW, bfloat16": ("adamw_torch", torch.bfloat16, ""),
    "8-bit AdamW, float32": ("adamw_torch_8bit", torch.float32, ""),
    "8-bit AdamW, bfloat16": ("adamw_torch_8bit", torch.bfloat16, ""),
    "8-bit AdamW, bfloat16, stochastic": ("adamw_torch_8bit", torch.bfloat16, STOCHASTIC),
    "StableAdamW, float32": ("stable_adamw", torch.float32, ""),
    "StableAdamW, bfloat16, Kahan": ("stable_adamw", torch.bfloat16, ""),
}
"""For each arm: ``optim``, the type of the weights, and ``optim_args``."""


def trained(arm: str, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """Train one run, and return its bits and bytes."""
    optim, dtype, optim_args = ARMS[arm]
    words = [*FLAGS.split(), "--model_name_or_path", folder / "start", "--output_dir", folder / "run", "--seed", seed]
    words += ["--learning_rate", rate, "--max_steps", STEPS, "--optim", optim]
    words += ["--optim_args", optim_args] if optim_args else []
    job, console = read_job(None, [str(word) for word in words]), Console(quiet=True)
    parts = job.kind.load(job, console)
    parts.model.to(dtype)
    trainer = build_trainer(job, parts, None, console)
    trainer.train()
    weights = list(parts.model.parameters())
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        "bits": score(job, trainer, parts).bpt,
        "weight_bytes": sum(weight.nbytes for weight in weights),
        "state_bytes": state_bytes(optimizer),
        "weights": sum(weight.numel() for weight in weights),
    }


def summary(runs: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the runs of an arm. ``reference``: the runs of AdamW with float32 weights, seed by seed."""
    behind = [run["bits"] - other["bits"] for run, other in zip(runs, reference, strict=True)]
    return {
        "bits": mean(run["bits"] for run in runs),
        "behind": mean(behind),
        "standard_error": stdev(behind) / len(behind) ** 0.5 if len(behind) > 1 else None,
        "bytes_per_weight": (runs[0]["weight_bytes"] + runs[0]["state_bytes"]) / runs[0]["weights"],
    }


def table(rate: float, found: dict[str, dict[str, Any]]) -> Table:
    shown = Table(f"learning rate {rate:g}", "bits", "behind AdamW, float32", "standard error", "bytes per weight")
    for arm, values in found.items():
        error = values["standard_error"]
        numbers = (f"{values['bits']:.3f}", f"{values['behind']:+.3f}", "" if error is None else f"{error:.3f}")
        shown.add_row(arm, *numbers, f"{values['bytes_per_weight']:.2f}")
    return shown


def runnable(console: Console) -> list[str]:
    found = []
    for arm, (optim, _, _) in ARMS.items():
        try:
            check_optimizer(optim, "cpu")
            found.append(arm)
        except RequirementError as error:
            console.print(f"left out, {arm}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-4])
    options, console, results = parser.parse_args(), Console(), {}
    torch.set_num_threads(1)
    arms = runnable(console)
    with torch.compiler.set_stance("force_eager"):
        for rate in options.rates:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
            for seed in options.seeds:
                for arm in arms:
                    with tempfile.TemporaryDirectory() as folder:
                        llama(Path(folder) / "start", seed, 96, 3)
                        runs[arm].append({"seed": seed, **trained(arm, rate, seed, Path(folder))})
            summaries = {arm: summary(rows, runs[arms[0]]) for arm, rows in runs.items()}
            results[f"{rate:g}"] = {"runs": runs, "summary": summaries}
            console.print(table(rate, summaries))
    write_result("bf16_weights", {"steps": STEPS, "rates": results})


if __name__ == "__main__":
    main()
