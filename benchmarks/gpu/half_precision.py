"""How far is training in bf16 from float32, with the stock Trainer and with ours, which sums in another order?

    python benchmarks/gpu/half_precision.py [--seeds 0 1 2] [--steps 24] [--device cpu] [--quick]

The job is that of variable_length.py under bf16 autocast. Gradient: for all rows of one optimizer step, its distance
from the float32 gradient of stock at the same weights, divided by the norm of that; at the first step, and at the
weights that stock has after the last step. Held-out bits: after the last step, for several initial weights. Stock also
runs with its 32 rows split differently (16 x 2, 4 x 8), which shows how far apart two trainings may end by rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from transformers import TrainerCallback

from benchmarks.lib.common import quiet, scratch_arguments
from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.lib.text_job import LOOPS, Job, OurTrainer, StockTrainer, held_out_bits, padded
from scu_trainer.train.run_directory.logs import run_log

STOCK, OURS = "stock", "ours"
CONTENDERS = {STOCK: (StockTrainer, 8), "stock, 16 rows": (StockTrainer, 16), "stock, 4 rows": (StockTrainer, 4)}
CONTENDERS[OURS] = (OurTrainer, 8)
"""The trainer, and the rows of a batch."""
SMALL = Shape(vocab=1_000, hidden=32, layers=1, longest_row=256)
NO_FARTHER = 1.05
"""Ratio of our gradient's distance to that of stock up to which precision counts as equal, because of rounding."""


class KeepsGradient(TrainerCallback):
    """Keeps the gradient of the last optimizer step. ``gradient``: of all weights, flattened, in float64."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([weight.grad.double().flatten().cpu() for weight in model.parameters()])


def trained(contender: str, job: Job, model: torch.nn.Module, *callbacks: TrainerCallback, **changes: Any) -> None:
    """Train ``model`` in place. ``changes``: of TrainingArguments."""
    kind, batch_rows = CONTENDERS[contender]
    job = replace(job, batch_rows=batch_rows, accumulation=job.step_rows // batch_rows)
    loops = LOOPS if contender == OURS else {}
    with scratch_arguments(**job.training() | changes) as args, run_log():
        trainer = kind(model, args, data_collator=padded, train_dataset=job.token_rows(), **loops)
        trainer.step_tokens = []
        for callback in callbacks:
            trainer.add_callback(callback)
        quiet(trainer).train()


def distances(job: Job, model: Callable[[], torch.nn.Module]) -> dict[str, float]:
    """Return how far the gradient of each contender is from float32 stock, relatively, at the weights of ``model``."""

    def gradient(contender: str, one: Job) -> torch.Tensor:
        keeps = KeepsGradient()
        trained(contender, one, model(), keeps, max_steps=1, learning_rate=0.0, max_grad_norm=0.0)
        return keeps.gradient

    exact = gradient(STOCK, replace(job, precision="no"))
    return {name: float((gradient(name, job) - exact).norm() / exact.norm()) for name in CONTENDERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="every path on a tiny model; writes nothing")
    given = parser.parse_args()
    seeds, steps = (given.seeds[:1], 2) if given.quick else (given.seeds, given.steps)
    shape = SMALL if given.quick else Shape()
    job = Job(shape, DISTRIBUTIONS["alpaca"], steps, precision="bf16", device=given.device)

    bits: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for seed in seeds:
        for name, of_seeds in bits.items():
            model = shape.model(seed)
            trained(name, job, model)
            of_seeds.append(held_out_bits(model, job))
            print(f"seed {seed}, {name}: {of_seeds[-1]:.4f} held-out bits", flush=True)
            if name == STOCK and seed == seeds[0]:
                weights = {key: weight.detach().clone() for key, weight in model.state_dict().items()}

    def at_the_end() -> torch.nn.Module:
        model = shape.model(seeds[0])
        model.load_state_dict(weights)
        return model

    first, last = distances(job, lambda: shape.model(seeds[0])), distances(job, at_the_end)
    heads = ["contender", "gradient from float32, first step", f"after {steps} steps"]
    heads += [f"held-out bits, seed {seed}" for seed in seeds]
    rows = [[name, f"{first[name]:.2e}", f"{last[name]:.2e}", *(f"{one:.4f}" for one in bits[name])] for name in bits]
    figures = {
        "gradient's distance from float32, ours / stock, first step": first[OURS] / first[STOCK],
        "gradient's distance from float32, ours / stock, last weights": last[OURS] / last[STOCK],
    }
    apart = Figure(mean(bits[OURS]) - mean(bits[STOCK]), None)
    finish(
        "half_precision",
        f"bf16 beside float32, {job.step_rows} rows per optimizer step, {given.device}",
        Grid(heads, rows),
        {name: Figure(value, "lower", target=NO_FARTHER) for name, value in figures.items()}
        | {"held-out bits, ours minus stock, mean of the seeds": apart},
        quick=given.quick,
        repeats=1,
        distances={"first": first, "last": last},
        held_out_bits=bits,
    )


if __name__ == "__main__":
    main()
