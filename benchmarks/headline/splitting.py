"""Rows of different lengths: how much do splitting and trimming save, and is the gradient the same?

    python benchmarks/headline/splitting.py [--lengths alpaca chat heavy] [--windows 4] [--caps 256 512 1024 2048 4096]

Three measurements, each with all contenders in one run. Lengths are lognormal (alpaca: median 100, sigma .6; chat: 400,
.9; heavy: 250, 1.2), and rows above 2048 tokens are truncated to 2048.

- Processed tokens per token in the rows, for 64 rows per optimizer step as 8 batches of 8, for all distributions: the
  stock Trainer, and ours split for a CPU and for a GPU. Computed from the real micro-batches; nothing is trained.
- CPU seconds per optimizer step of 32 rows, for --lengths: stock with batch 8 x accumulation 4, ours with its defaults
  (``MemorySettings()``), and ours without memory control at each cap of --caps. The trainers take turns step by step
  on the same rows. Medians and medians of the paired ratios are printed, without the windows in which the memory loop
  measures every micro-batch. The same run compares gradients and weights.
- Peak memory above that of the model (weights, optimizer, a first small step), each contender in a fresh process.

Rows are laid end to end in the layers, and the loss is chunked, as MemorySettings does by default with 32,000 words.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback

from benchmarks.lib.common import shown, write_result
from benchmarks.lib.memory_work import (
    DISTRIBUTIONS,
    MIB,
    WARM_UP_TOKENS,
    Lengths,
    Shape,
    TokenRows,
    Turns,
    Witness,
    counted,
    in_fresh_process,
    pad,
    trainer_for,
)
from benchmarks.lib.outcome import Grid
from scu_trainer.settings import MemorySettings
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import read_layout
from scu_trainer.train.step.batches.window import AccumulationWindow
from scu_trainer.train.step.micro_batch_sizer import LEARNING_WINDOWS, MicroBatchSizer

BATCH_ROWS = 8
ACCUMULATION = 4
WINDOW_ROWS = BATCH_ROWS * ACCUMULATION
PADDING_ROWS = 64
SETTLING = LEARNING_WINDOWS
STOCK, AUTO = "stock 8 x 4", "ours, as it comes"
TARGETS = {
    "processed_over_real": 1.15,
    "cpu_over_stock": 0.6,
    "peak_over_stock": 0.35,
    "gradient_difference": 1e-6,
    "over_best_fixed": 1.05,
}


@dataclass(frozen=True)
class SplitPlan:
    """A distribution of lengths, and the model that trains on it."""

    lengths: Lengths
    shape: Shape
    windows: int
    device: str = "cpu"

    def drawn(self, count: int) -> list[int]:
        return self.lengths.draw(count, self.shape.longest_row)


# -- padding -----------------------------------------------------------------------------------------------------------


def padding(lengths: Lengths, longest_row: int, windows: int) -> dict[str, Any]:
    """Return processed tokens per real token with 64 rows per step, for the split on a CPU and on a GPU."""
    rows = TokenRows(lengths.draw(windows * PADDING_ROWS, longest_row), vocab=64)
    batches = [read_layout(pad([rows[i] for i in range(a, a + BATCH_ROWS)])) for a in range(0, len(rows), BATCH_ROWS)]
    settings = MemorySettings(memory_control=False, token_cap="auto")
    loops = {device: MicroBatchSizer(settings, None, torch.device(device)) for device in ("cpu", "cuda")}
    in_window = PADDING_ROWS // BATCH_ROWS
    for a in range(0, len(batches), in_window):
        for loop in loops.values():
            window = AccumulationWindow(batches[a : a + in_window], Reduction("num_items"))
            micro_batches = loop.begin(window, step=a)
            loop.end([(micro_batch, torch.zeros(())) for micro_batch in micro_batches], all_reduce_max=list)
    statistics = {device: loop.statistics for device, loop in loops.items()}
    return {
        "lengths": lengths.name,
        "rows": len(rows),
        "cut_to_longest": sum(length == longest_row for length in rows.lengths),
        "stock": statistics["cpu"].stock_tokens / statistics["cpu"].real_tokens,
        **{device: of.processed_tokens / of.real_tokens for device, of in statistics.items()},
    }


# -- work --------------------------------------------------------------------------------------------------------------


def contenders(caps: list[int]) -> dict[str, Optional[MemorySettings]]:
    fixed = {f"ours, cap {cap}": MemorySettings(memory_control=False, token_cap=cap) for cap in caps}
    return {STOCK: None, AUTO: MemorySettings(), **fixed}


class KeepsGradient(TrainerCallback):
    """Keeps the gradient of the first optimizer step."""

    def __init__(self) -> None:
        self.gradient: Optional[torch.Tensor] = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradient is None:
            self.gradient = flat(parameter.grad for parameter in model.parameters())


def flat(tensors) -> torch.Tensor:
    """Concatenate tensors to one vector on the CPU."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])


def relative(difference: torch.Tensor, whole: torch.Tensor) -> float:
    return float(difference.double().norm() / whole.double().norm())


def work(plan: SplitPlan, caps: list[int]) -> list[dict[str, Any]]:
    """Run all contenders in turn. Gradients are compared in the first window, and times after SETTLING windows."""
    rows = TokenRows(settling(plan) + plan.drawn(plan.windows * WINDOW_ROWS), plan.shape.vocab)
    before = flat(plan.shape.model().parameters())
    with run_log(), contextlib.ExitStack() as stack:
        named = [(name, _trainer(stack, plan, rows, memory)) for name, memory in contenders(caps).items()]
        keepers = [KeepsGradient() for _ in named]
        for (_, trainer), keeper in zip(named, keepers, strict=True):
            trainer.add_callback(keeper)
        seconds = [steps[SETTLING:] for steps in Turns([trainer for _, trainer in named], plan.device).run()]
    stock_weights = flat(named[0][1].model.parameters())
    compared = []
    for (name, trainer), keeper, steps in zip(named, keepers, seconds, strict=True):
        moved = flat(trainer.model.parameters())
        compared.append(
            {
                "contender": name,
                "seconds_per_step": median(steps),
                "steps_s": steps,
                "over_stock": paired(steps, seconds[0]),
                "over_ours": paired(steps, seconds[1]),
                "gradient_difference": relative(keeper.gradient - keepers[0].gradient, keepers[0].gradient),
                "weights_difference": relative(moved - stock_weights, stock_weights - before),
                **statistics(trainer),
            }
        )
    return compared


def settling(plan: SplitPlan) -> list[int]:
    """Return the rows per window before time is measured: one full window, then short ones while the memory loop
    measures every micro-batch."""
    full = plan.lengths.draw(WINDOW_ROWS, plan.shape.longest_row, seed=1)
    return full + [max(1, length // 8) for length in full] * (SETTLING - 1)


def paired(steps: list[float], others: list[float]) -> float:
    """Return the median of the ratios on the same rows."""
    return median(mine / other for mine, other in zip(steps, others, strict=True))


def _trainer(
    stack: contextlib.ExitStack, plan: SplitPlan, rows: TokenRows, memory: Optional[MemorySettings]
) -> Trainer:
    steps = batches(SETTLING + plan.windows)
    return stack.enter_context(trainer_for(plan.device, plan.shape.model(), rows, memory, **steps))


def batches(steps: int) -> dict[str, int]:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH_ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
    }


def statistics(trainer: Trainer) -> dict[str, Any]:
    """Return the counts of the memory loop; {} for the stock trainer."""
    found = counted(trainer)
    if found is None:
        return {}
    return {
        "processed_over_real": found.processed_tokens / found.real_tokens,
        "stock_over_real": found.stock_tokens / found.real_tokens,
        "out_of_memory": found.out_of_memory,
    }


# -- peak --------------------------------------------------------------------------------------------------------------


class StartsWitness(TrainerCallback):
    """Starts to measure the peak after the first, small step, which allocates all memory that stays."""

    def __init__(self, witness: Witness) -> None:
        self.witness, self.base_bytes = witness, 0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.base_bytes = self.witness.start()
        else:
            self.witness.read()


def peak(plan: SplitPlan, memory: Optional[MemorySettings]) -> dict[str, float]:
    """Return the peak of all windows above the level after a first window of tiny rows, in MiB."""
    lengths = [WARM_UP_TOKENS] * WINDOW_ROWS + plan.drawn(plan.windows * WINDOW_ROWS)
    rows, witness = TokenRows(lengths, plan.shape.vocab), Witness(plan.device)
    steps = batches(1 + plan.windows)
    with run_log(), trainer_for(plan.device, plan.shape.model(), rows, memory, witness, **steps) as trainer:
        starts = StartsWitness(witness)
        trainer.add_callback(starts)
        trainer.train()
    return {
        "base_mib": starts.base_bytes / MIB,
        "peak_over_base_mib": (witness.highest_bytes - starts.base_bytes) / MIB,
    }


# -- report ------------------------------------------------------------------------------------------------------------


def measured(plan: SplitPlan, caps: list[int]) -> dict[str, Any]:
    compared = in_fresh_process(work, plan, caps, allocator={})
    for name, memory in {STOCK: None, AUTO: MemorySettings()}.items():
        row = next(row for row in compared if row["contender"] == name)
        row |= in_fresh_process(peak, plan, memory)
    stock, ours = compared[:2]
    best = min(compared[2:], key=lambda row: row["over_ours"], default=None)
    return {
        "lengths": plan.lengths.name,
        "windows": plan.windows,
        "contenders": compared,
        "summary": {
            "cpu_over_stock": ours["over_stock"],
            "peak_over_stock": ours["peak_over_base_mib"] / stock["peak_over_base_mib"],
            "gradient_difference": ours["gradient_difference"],
            **({"over_best_fixed": 1 / best["over_ours"], "best_fixed": best["contender"]} if best else {}),
            "out_of_memory": ours["out_of_memory"],
        },
    }


def padding_table(figures: list[dict[str, Any]]) -> Table:
    aim, rows = f"{TARGETS['processed_over_real']:.2f}", []
    for row in figures:
        ratios = [f"{row[name]:.3f}" for name in ("stock", "cpu", "cuda")]
        rows.append((row["lengths"], str(row["rows"]), str(row["cut_to_longest"]), *ratios, aim))
    grid = Grid(("lengths", "rows", "cut to 2048", "stock", "ours, on a CPU", "ours, on a GPU", "aim"), rows)
    return grid.table(f"tokens processed / tokens in the rows, {PADDING_ROWS} rows per optimizer step")


def work_table(result: dict[str, Any], unit: str = "CPU s") -> Table:
    others = ("/ stock", "/ ours", "processed / real", "peak, MiB", "gradient apart", "weights apart")
    rows = [
        (
            row["contender"],
            f"{row['seconds_per_step']:.2f}",
            f"{row['over_stock']:.3f}",
            f"{row['over_ours']:.3f}",
            shown(row.get("processed_over_real", result["contenders"][1]["stock_over_real"])),
            shown(row.get("peak_over_base_mib"), 0),
            f"{row['gradient_difference']:.1e}",
            f"{row['weights_difference']:.1e}",
        )
        for row in result["contenders"]
    ]
    title = f"{result['lengths']} lengths, {WINDOW_ROWS} rows per optimizer step, {result['windows']} steps"
    return Grid(("contender", f"{unit} per step", *others), rows).table(title)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for name, aim in TARGETS.items():
        if name in summary:
            verdict = "met" if summary[name] <= aim else "MISSED"
            lines.append(f"{name} {summary[name]:.3g} (at most {aim:g}: {verdict})")
    return [*lines, f"out of memory: {summary['out_of_memory']}"]


def options(doc: Optional[str], **defaults: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", nargs="*", default=["alpaca"], choices=list(DISTRIBUTIONS), help="which are trained on")
    add("--windows", type=int, default=defaults.get("windows", 4), help="optimizer steps that are timed")
    add("--caps", nargs="*", type=int, default=[256, 512, 1024, 2048, 4096], help="fixed chunks, in tokens")
    add("--hidden", type=int, default=defaults.get("hidden", 256))
    add("--layers", type=int, default=defaults.get("layers", 4))
    add("--vocab", type=int, default=32_000)
    return parser


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--padding_windows", type=int, default=200, help="steps over which padding is counted")
    given = parser.parse_args()
    shape = Shape(given.vocab, given.hidden, given.layers)
    console = Console(width=130)
    figures = [padding(one, shape.longest_row, given.padding_windows) for one in DISTRIBUTIONS.values()]
    console.print(padding_table(figures))
    results = []
    for name in given.lengths:
        results.append(measured(SplitPlan(DISTRIBUTIONS[name], shape, given.windows), given.caps))
        console.print(work_table(results[-1]), *summary_lines(results[-1]["summary"]), sep="\n")
    write_result("splitting", {"targets": TARGETS, "padding": figures, "work": results})


if __name__ == "__main__":
    main()
