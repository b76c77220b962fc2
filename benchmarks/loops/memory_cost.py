"""The cost of memory control when there is enough memory and all rows have the same length.

    python benchmarks/loops/memory_cost.py [--steps 400] [--large_steps 80]

Memory control is switched step by step in one trainer (off on on off ...), so that both sides have the same weights,
the same memory and the same load on the machine. Measured is the CPU time of whole steps, including data loading,
without the windows in which every micro-batch is measured, and without page faults (freed memory stays with the
process). Two subjects: LoRA on the embedded model with the batch of the recipe, 8 x 256 tokens, and a Llama of hidden
size 256 with 32,000 words on 8 x 128.

Prints the ratio of the medians with and without control, and the median of that ratio within each four steps; the ratio
between the off steps at the first and at the last position of each four, which shows the noise of the measurement; and
what can be measured directly: CPU time per step in the code of the control (all of ``training_step`` except the stock
one inside it, also in the first steps), and in the guarded optimizer step compared with the plain one. A few steps
without timing then check whether the weights equal those of the stock Trainer bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback

from benchmarks.lib.common import (
    Stopwatch,
    collator,
    embedded_data,
    embedded_model,
    quiet,
    scratch_arguments,
    write_result,
)
from benchmarks.lib.memory_work import KEPT_MEMORY, Shape, TokenRows, in_fresh_process
from benchmarks.lib.text_job import padded
from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.engine import StockEngine
from scu_trainer.train.step.micro_batch_sizer import LEARNING_WINDOWS

AIM = 1.01
PATTERN = (False, True, True, False)
SETTLING = len(PATTERN) * (2 + LEARNING_WINDOWS // len(PATTERN))
CHECKED_STEPS = 4
ROWS, ROW_TOKENS = 8, 128


def embedded() -> dict[str, Any]:
    data = embedded_data(0, dataset="stdlib_docstrings", dataset_size=80, block_size=256, validation_split_percentage=0)
    return {"model": embedded_model(0, tuning="lora"), "train_dataset": data.train, "data_collator": collator()}


def llama() -> dict[str, Any]:
    shape = Shape()
    rows = [TokenRows([ROW_TOKENS] * 64, shape.vocab)[i] for i in range(64)]
    for row in rows:
        del row["sample_index"]
    return {"model": shape.model(), "train_dataset": rows, "data_collator": _padded}


def _padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded([{**row, "sample_index": 0} for row in rows])


SUBJECTS = {"embedded model, LoRA, 8 x 256": embedded, f"Llama 19M, {ROWS} x {ROW_TOKENS}": llama}


@contextmanager
def trainer_of(parts: dict[str, Any], memory: Optional[MemorySettings], steps: int) -> Iterator[SCUTrainer]:
    arguments = {"max_steps": steps, "per_device_train_batch_size": ROWS, "learning_rate": 1e-3}
    with scratch_arguments(**arguments, train_sampling_strategy="sequential") as given:
        yield quiet(SCUTrainer(args=given, memory=memory, **parts))


class Switch(TrainerCallback):
    """Switches memory control by PATTERN, and records CPU seconds.

    ``steps[on]``: of whole steps, in order; ``optimizer[on]``: of ``optimizer.step``; ``own``: of the code of the
    control in ``training_step``, for the steps with control; ``first``: the same while every micro-batch is measured.
    """

    def __init__(self, trainer: SCUTrainer) -> None:
        self.trainer, self.micro_batches = trainer, trainer.micro_batches
        self._engines = {True: trainer.engine, False: StockEngine(trainer)}
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.optimizer: dict[bool, list[float]] = {True: [], False: []}
        self.own: list[float] = []
        self.first: list[float] = []
        self._inside, self._stock = Stopwatch(), Stopwatch()
        self._ended_s = self._optimizer_s = 0.0
        self.micro_batches.loss = self._inside.around(self.micro_batches.loss)
        trainer.stock_training_step = self._stock.around(trainer.stock_training_step)

    def is_on(self, step: int) -> bool:
        """Whether control is on in ``step``, from 0: while every micro-batch is measured, then by PATTERN."""
        return step < SETTLING or PATTERN[step % len(PATTERN)]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._optimizer_s = time.process_time()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._optimizer_s = time.process_time() - self._optimizer_s

    def on_step_end(self, args, state, control, **kwargs):
        now_s, step = time.process_time(), state.global_step - 1
        if step < LEARNING_WINDOWS:
            self.first.append(self._inside.seconds - self._stock.seconds)
        if step >= SETTLING:
            on = self.is_on(step)
            self.steps[on].append(now_s - self._ended_s)
            self.optimizer[on].append(self._optimizer_s)
            if on:
                self.own.append(self._inside.seconds - self._stock.seconds)
        self._set(self.is_on(step + 1))
        self._inside.seconds = self._stock.seconds = 0.0
        self._ended_s = time.process_time()

    def on_train_end(self, args, state, control, **kwargs):
        self._set(True)  # the control has to be there for the end of training

    def _set(self, on: bool) -> None:
        self.trainer.engine = self._engines[on]
        guard = self.micro_batches._guard
        if guard is not None:
            (guard.attach if on else guard.detach)()


def measure(subject: str, steps: int) -> dict[str, Any]:
    with run_log(), trainer_of(SUBJECTS[subject](), MemorySettings(), SETTLING + steps) as trainer:
        switch = Switch(trainer)
        # Comes before all other callbacks, because the memory callback needs the control at the end of training.
        trainer.callback_handler.callbacks.insert(0, switch)
        trainer.train()
    off_s, on_s = median(switch.steps[False]), median(switch.steps[True])
    guarded_s, plain_s = median(switch.optimizer[True]), median(switch.optimizer[False])
    return {
        "subject": subject,
        "steps": steps,
        "step_ms_off": off_s * 1e3,
        "step_ms_on": on_s * 1e3,
        "on_over_off": on_s / off_s,
        "paired": paired(switch.steps),
        "off_over_off": median(switch.steps[False][1::2]) / median(switch.steps[False][::2]),
        "own_ms": median(switch.own) * 1e3,
        "own_fraction": median(switch.own) / off_s,
        "first_own_ms": [own_s * 1e3 for own_s in switch.first],
        "optimizer_ms": plain_s * 1e3,
        "guard_ms": (guarded_s - plain_s) * 1e3,
        "guard_fraction": (guarded_s - plain_s) / off_s,
        "same_weights": same_weights(subject),
    }


def paired(steps: dict[bool, list[float]]) -> list[float]:
    """Return the quartiles of on / off within each four steps, where slow drift of the machine cancels."""
    fours = zip(steps[True][::2], steps[True][1::2], steps[False][::2], steps[False][1::2], strict=True)
    return quantiles([(on + on_too) / (off + off_too) for on, on_too, off, off_too in fours], n=4)


def same_weights(subject: str) -> bool:
    """Whether a few steps with control give the weights of the stock Trainer, bit for bit."""

    def trained(memory: Optional[MemorySettings]) -> Trainer:
        with run_log(), trainer_of(SUBJECTS[subject](), memory, CHECKED_STEPS) as trainer:
            trainer.train()
        return trainer

    pairs = zip(trained(None).model.parameters(), trained(MemorySettings()).model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table(title=f"memory control without pressure, CPU time per step (aim: at most {AIM:.2f})")
    table.add_column("subject", no_wrap=True)
    names = (
        "off, ms",
        "on, ms",
        "on / off",
        "within fours (quartiles)",
        "off / off",
        "own code",
        "first steps, ms",
        "optimizer guard",
        "weights",
    )
    for name in names:
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r["subject"],
            f"{r['step_ms_off']:.1f}",
            f"{r['step_ms_on']:.1f}",
            f"{r['on_over_off']:.4f}",
            "{1:.4f} ({0:.3f} to {2:.3f})".format(*r["paired"]),
            f"{r['off_over_off']:.4f}",
            f"{r['own_ms']:.2f} ms, {r['own_fraction']:.2%}",
            ", ".join(f"{own_ms:.0f}" for own_ms in r["first_own_ms"]),
            f"{r['guard_ms']:+.2f} ms, {r['guard_fraction']:+.2%}",
            "equal" if r["same_weights"] else "DIFFER",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="timed steps, embedded model")
    parser.add_argument("--large_steps", type=int, default=80, help="timed steps, Llama")
    given = parser.parse_args()
    counts = (given.steps, given.large_steps)
    results = [in_fresh_process(measure, *pair, allocator=KEPT_MEMORY) for pair in zip(SUBJECTS, counts, strict=True)]
    Console(width=150).print(table_of(results))
    write_result("memory_cost", {"aim": AIM, "results": results})


if __name__ == "__main__":
    main()
