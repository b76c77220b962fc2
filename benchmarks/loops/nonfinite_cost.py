"""The cost of the search for non-finite values: the step guard and the divergence watch, on and off in alternate steps.

    python benchmarks/loops/nonfinite_cost.py [--steps 200]

Each line is one training, with LoRA or full tuning of the embedded model, with the batch of the recipe. The guard is on
in odd steps and off in even ones, so that drift affects both equally. Printed are the median CPU milliseconds of a
step, the median of the paired ratios, and from the same steps the CPU time of the guard relative to the whole step.
"control" is the same training without the guard on either side: its difference from 1 is noise of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from benchmarks.lib.common import (
    Stopwatch,
    collator,
    embedded_data,
    embedded_model,
    quiet,
    scratch_arguments,
    write_result,
)
from scu_trainer import SCUTrainer
from scu_trainer.settings import SafetySettings
from scu_trainer.train.loops.nonfinite_guard import NonFiniteGuard
from scu_trainer.train.run_directory.logs import run_log

TARGET_RATIO = 1.01
WARM_UP_STEPS = 20
BATCH_ROWS = 8
INSIDE = (
    *((NonFiniteGuard, name) for name in ("on_window", "on_step_begin", "on_loss", "on_grad_norm")),
    *((NonFiniteGuard, name) for name in ("on_optimizer_step", "on_step_end", "on_log")),
)


class Begin(TrainerCallback):
    """Starts the clock before any other callback of the step."""

    begun_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun_s = time.process_time()


class Alternate(TrainerCallback):
    """Turns the guard off in every second step, or in all, and records the CPU time of each step."""

    def __init__(self, trainer: SCUTrainer, measured: bool, inside: Stopwatch) -> None:
        self.trainer, self.guard, self.measured = trainer, trainer.nonfinite_guard, measured
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.inside = inside
        self._begin = Begin()
        self._others = [callback for callback in trainer.callback_handler.callbacks if callback is not self.guard]

    def on_train_begin(self, args, state, control, **kwargs):
        self._switch(on=True)

    def on_step_end(self, args, state, control, **kwargs):
        was_odd = state.global_step % 2 == 1
        if state.global_step > WARM_UP_STEPS:
            self.seconds[was_odd].append(time.process_time() - self._begin.begun_s)
        else:
            self.inside.seconds = 0.0
        self._switch(on=not was_odd)

    def _switch(self, on: bool) -> None:
        """Turn the guard on or off for the next step. When it is off, none of its code runs."""
        on = on and self.measured
        self.trainer.nonfinite_guard = self.guard if on else None
        own = [self.guard] if on else []
        self.trainer.callback_handler.callbacks = [self._begin, *own, *self._others, self]


def measure(tuning: str, steps: int, measured: bool = True) -> dict[str, Any]:
    data = embedded_data(0, dataset="stdlib_docstrings", dataset_size=80, block_size=256, validation_split_percentage=0)
    with contextlib.ExitStack() as stack:
        arguments = stack.enter_context(
            scratch_arguments(max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=BATCH_ROWS)
        )
        trainer = SCUTrainer(
            model=embedded_model(0, tuning=tuning),
            args=arguments,
            data_collator=collator(),
            train_dataset=data.train,
            safety=SafetySettings(),
        )
        trainer.args.logging_nan_inf_filter = False  # as the command line sets it
        quiet(trainer)
        inside = Stopwatch()
        clock = Alternate(trainer, measured, inside)
        trainer.add_callback(clock)
        stack.enter_context(inside.on(*INSIDE))
        trainer.train()
    on, off = clock.seconds[True], clock.seconds[False]
    return {
        "tuning": tuning,
        "measured": measured,
        "step_ms_off": median(off) * 1e3,
        "step_ms_on": median(on) * 1e3,
        "ratio_of_medians": median(on) / median(off),
        "median_of_paired_ratios": median(a / b for a, b in zip(on, off, strict=False)),
        "direct_fraction": inside.seconds / sum(on),
        "pairs": min(len(on), len(off)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with run_log():
        results = [measure(*case) for case in (("lora", options.steps), ("full", options.steps))]
        results.append(measure("full", options.steps, measured=False))
    heads = ("tuning", "step off, ms", "step on, ms", "ratio of medians", "paired ratios", "time in the guard")
    table = Table(*heads, title="cost of the search for non-finite values in every step")
    for r in results:
        table.add_row(
            r["tuning"] if r["measured"] else f"{r['tuning']}, control",
            f"{r['step_ms_off']:.1f}",
            f"{r['step_ms_on']:.1f}",
            f"{r['ratio_of_medians']:.4f}",
            f"{r['median_of_paired_ratios']:.4f}",
            f"{r['direct_fraction']:.3%}",
        )
    Console(width=110).print(table, f"target: a ratio of at most {TARGET_RATIO}")
    write_result("nonfinite_cost", {"target_ratio": TARGET_RATIO, "results": results})


if __name__ == "__main__":
    main()
