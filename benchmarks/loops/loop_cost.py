"""The cost of the regularization loop. On and off alternate step by step, so that drift affects both equally.

    python benchmarks/loops/loop_cost.py [--steps 200]

Prints the ratio of the median step time with the loop to that without it, for LoRA and for full tuning of the embedded
model with the batch of the recipe. The loop measures and decays at every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

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
    write_result,
)
from scu_trainer import SCUTrainer
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.run_directory.logs import run_log

WARM_UP_STEPS = 20


class Alternate(TrainerCallback):
    """Turns the loop off in every second step, and records the time of each step."""

    def __init__(self, trainer: SCUTrainer) -> None:
        self.trainer = trainer
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._loop = trainer.loop("regularization")
        self._begun_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._begun_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        was_on = state.global_step % 2 == 1
        if state.global_step > WARM_UP_STEPS:
            self.seconds[was_on].append(time.perf_counter() - self._begun_s)
        self._switch(on=not was_on)

    def _switch(self, on: bool) -> None:
        handler = self.trainer.callback_handler
        handler.callbacks = [c for c in handler.callbacks if c is not self._loop] + ([self._loop] if on else [])

    def on_train_end(self, args, state, control, **kwargs):
        self._switch(on=True)


def measure(tuning: str, steps: int, batch_rows: int) -> dict[str, float]:
    data = embedded_data(0, dataset="stdlib_docstrings", dataset_size=80, block_size=256, validation_split_percentage=0)
    settings = RegularizationSettings(target_s=0.001, lambda_min=0.1)  # lambda_min makes every step decay
    with scratch_arguments(max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=batch_rows) as arguments:
        trainer = SCUTrainer(
            model=embedded_model(0, tuning=tuning),
            args=arguments,
            data_collator=collator(),
            train_dataset=data.train,
            regularization=settings,
            regularization_tokens=data.statistics.supervised_tokens,
        )
        clock = Alternate(trainer)
        trainer.add_callback(clock)
        quiet(trainer).train()
    on, off = median(clock.seconds[True]), median(clock.seconds[False])
    pairs = sorted(a / b for a, b in zip(clock.seconds[True], clock.seconds[False], strict=False))
    return {
        "tuning": tuning,
        "step_ms_off": off * 1e3,
        "step_ms_on": on * 1e3,
        "ratio_of_medians": on / off,
        "median_of_paired_ratios": median(pairs),
        "direct_fraction": trainer.loop("regularization").seconds / sum(clock.seconds[True]),
        "pairs": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_rows", type=int, default=8, help="rows of 256 tokens per optimizer step")
    options = parser.parse_args()
    with run_log():
        results = [measure(tuning, options.steps, options.batch_rows) for tuning in ("lora", "full")]
    heads = ("tuning", "step off, ms", "step on, ms", "ratio of medians", "median of paired ratios", "time in the loop")
    table = Table(*heads, title="cost of the regularization loop, measuring and decaying at every step")
    for r in results:
        table.add_row(
            r["tuning"],
            f"{r['step_ms_off']:.1f}",
            f"{r['step_ms_on']:.1f}",
            f"{r['ratio_of_medians']:.4f}",
            f"{r['median_of_paired_ratios']:.4f}",
            f"{r['direct_fraction']:.3%}",
        )
    Console(width=110).print(table)
    write_result("loop_cost", {"results": results})


if __name__ == "__main__":
    main()
