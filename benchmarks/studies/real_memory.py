"""A memory limit that the configured batch exceeds: which contenders finish, and with which training?

    python benchmarks/studies/real_memory.py [--steps 20] [--share 0.6]

The same training (a small Llama with 32,000 words, lognormal lengths of median 40 cut to 160 tokens, batch 8 x
accumulation 4, AdamW) runs in six fresh processes: ours and the stock Trainer without a limit; then, under a hard
limit, ours, ours without the headroom that it keeps free by default, the stock Trainer, and the stock Trainer with
``auto_find_batch_size``. The limit (RLIMIT_DATA on a CPU, the memory fraction of the allocator on CUDA) is set after a
first optimizer step on very short rows, to what the process holds then, plus --share of what ours needed above that
without a limit. Allocations above it really fail; nothing is injected.

Prints per run: how it ended, optimizer steps executed (counted in the optimizer) and reported (``state.global_step``),
rows with gradients that reached an optimizer step (trained, repeated, never seen; each row should be trained once),
out-of-memory events, rows per optimizer step at the end, the last loss, the largest relative difference of the loss
curve from that of ours without a limit (- if the steps differ), peak above the first step, and wall time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer, TrainerCallback

from benchmarks.lib.common import shown, write_result
from benchmarks.lib.memory_work import (
    MIB,
    SHORTEST_ROW,
    Lengths,
    Ours,
    Shape,
    Stock,
    TokenRows,
    Witness,
    counted,
    in_fresh_process,
    limit_memory,
    trainer_for,
)
from scu_trainer.errors import OutOfMemory
from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loops.memory import MemoryLoop
from scu_trainer.train.run_directory.logs import run_log

BATCH_ROWS = 8
ACCUMULATION = 4
WINDOW_ROWS = BATCH_ROWS * ACCUMULATION
LENGTHS = Lengths("short", 40, 0.6)


@dataclass(frozen=True)
class Job:
    steps: int
    shape: Shape
    lengths: Lengths
    device: str = "cpu"


@dataclass(frozen=True)
class Contender:
    name: str
    ours: bool = False
    limited: bool = False
    auto_find: bool = False
    headroom: str = MemorySettings.target_headroom_gb

    @property
    def memory(self) -> Optional[MemorySettings]:
        return MemorySettings(target_headroom_gb=self.headroom) if self.ours else None


REFERENCE = Contender("ours, no limit", ours=True)
CONTENDERS = (
    Contender("stock, no limit"),
    Contender("ours, limited", ours=True, limited=True),
    Contender("ours, limited, no headroom", ours=True, limited=True, headroom="0%"),
    Contender("stock, limited", limited=True),
    Contender("stock, auto_find, limited", limited=True, auto_find=True),
)


# -- what is counted ---------------------------------------------------------------------------------------------------


class Record:
    """Records what reached the weights: the optimizer steps, and the rows and the loss of each."""

    def __init__(self) -> None:
        self.steps, self.starts = 0, 0
        self.rows: Counter[int] = Counter()
        self.rows_per_step: list[int] = []
        self.losses: list[float] = []
        self._pending_rows: list[int] = []
        self._pending_loss = 0.0

    def begin(self) -> None:
        """Start training or another attempt, and forget gradients that no optimizer step has used."""
        self.starts += 1
        self._clear()

    def batch_done(self, rows: list[int], loss: float) -> None:
        self._pending_rows += rows
        self._pending_loss += loss

    def optimizer_stepped(self, *_: Any) -> None:
        self.steps += 1
        self.rows.update(self._pending_rows)
        self.rows_per_step.append(len(self._pending_rows))
        self.losses.append(self._pending_loss)
        self._clear()

    def _clear(self) -> None:
        self._pending_rows, self._pending_loss = [], 0.0


class Recorded:
    """Mixin that records every accumulation batch after its backward. ``record`` is set after construction."""

    record: Record

    def training_step(self, model, inputs, num_items_in_batch=None):
        rows = inputs["sample_index"].tolist()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.record.batch_done(rows, float(loss))
        return loss


class RecordedStock(Recorded, Stock):
    pass


class RecordedOurs(Recorded, Ours):
    pass


class Limits(TrainerCallback):
    """Resets the peak and sets the limit after the first optimizer step. ``headroom_bytes``: None for no limit."""

    def __init__(self, device: str, witness: Witness, record: Record, headroom_bytes: Optional[int]) -> None:
        self.device, self.witness, self.record = device, witness, record
        self.headroom_bytes, self.base_bytes = headroom_bytes, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.record.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if self.base_bytes is not None:
            self.witness.read()
            return
        self.base_bytes = self.witness.start()
        if self.headroom_bytes is not None:
            limit_memory(self.device, self.headroom_bytes)

    def lift(self) -> None:
        if self.device == "cpu":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)


# -- one run, in a process of its own ----------------------------------------------------------------------------------


def run(job: Job, contender: Contender, headroom_bytes: Optional[int]) -> dict[str, Any]:
    # oneDNN may crash instead of raising an error if it cannot allocate memory for a new shape.
    torch.backends.mkldnn.enabled = False
    lengths = job.lengths.draw((job.steps - 1) * WINDOW_ROWS, job.shape.longest_row)
    rows = TokenRows([SHORTEST_ROW] * WINDOW_ROWS + lengths, job.shape.vocab)
    record, witness = Record(), Witness(job.device)
    register_optimizer_step_post_hook(record.optimizer_stepped)
    arguments = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": BATCH_ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 2e-3,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "linear",
        "auto_find_batch_size": contender.auto_find,
    }
    kinds = (RecordedStock, RecordedOurs)
    with (
        run_log(),
        trainer_for(job.device, job.shape.model(), rows, contender.memory, witness, kinds, **arguments) as trainer,
    ):
        trainer.record = record
        limits = Limits(job.device, witness, record, headroom_bytes if contender.limited else None)
        trainer.add_callback(limits)
        begun_s = time.perf_counter()
        error = _train(trainer)
        wall_s = time.perf_counter() - begun_s
        limits.lift()
        changes = changes_of(trainer) if contender.ours else []
    return {
        **_figures(trainer, record, len(rows), error),
        "wall_s": wall_s,
        "peak_over_first_step_mib": (witness.highest_bytes - (limits.base_bytes or 0)) / MIB,
        "chunk_changes": changes,
    }


def _train(trainer: Trainer) -> Optional[str]:
    try:
        trainer.train()
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        return str(error).partition("\n")[0]
    return None


def changes_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return every change of the size of micro-batches, with its reason."""
    path = Path(trainer.args.output_dir) / MemoryLoop.history_file
    return [{name: row[name] for name in ("step", "tokens_per_chunk", "reason")} for row in read_rows(path)]


def _figures(trainer: Trainer, record: Record, due: int, error: Optional[str]) -> dict[str, Any]:
    of_loop = counted(trainer)
    return {
        "error": error,
        "steps_executed": record.steps,
        "steps_reported": trainer.state.global_step,
        "rows_due": due,
        "rows_trained": len(record.rows),
        "rows_repeated": sum(count - 1 for count in record.rows.values()),
        "rows_never_seen": due - len(record.rows),
        "out_of_memory": of_loop.out_of_memory if of_loop else record.starts - 1 + (error is not None),
        "rows_per_step": record.rows_per_step[-1] if record.rows_per_step else None,
        "losses": record.losses,
    }


# -- report ------------------------------------------------------------------------------------------------------------


def compare(job: Job, share: float) -> dict[str, Any]:
    reference = {"contender": REFERENCE.name, **in_fresh_process(run, job, REFERENCE, None)}
    headroom_bytes = int(share * reference["peak_over_first_step_mib"] * MIB)
    results = [
        reference,
        *({"contender": contender.name, **attempt(job, contender, headroom_bytes)} for contender in CONTENDERS),
    ]
    for result in results:
        result["loss_distance"] = distance(result["losses"], reference["losses"])
    return {"headroom_mib": headroom_bytes / MIB, "results": results}


def attempt(job: Job, contender: Contender, headroom_bytes: int) -> dict[str, Any]:
    try:
        return in_fresh_process(run, job, contender, headroom_bytes)
    except BrokenProcessPool:
        return {"error": "the process was killed", "losses": []}


def distance(losses: list[float], others: list[float]) -> Optional[float]:
    """Return the largest relative difference of two curves; None if they do not have the same steps."""
    if len(losses) != len(others):
        return None
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def table_of(compared: dict[str, Any], job: Job) -> Table:
    limit = f"limit after the first step: {compared['headroom_mib']:.0f} MiB more than held then"
    table = Table(title=f"{job.lengths.name} lengths, batch {BATCH_ROWS} x accumulation {ACCUMULATION}; {limit}")
    table.add_column("run", no_wrap=True)
    table.add_column("ended")
    right = ("steps executed", "reported", "rows trained", "repeated", "never seen", "out of memory", "rows / step")
    for name in (*right, "last loss", "curve apart", "peak MiB", "wall s"):
        table.add_column(name, justify="right")
    for r in compared["results"]:
        counts = [r.get(name) for name in ("steps_executed", "steps_reported", "rows_trained", "rows_repeated")]
        counts += [r.get(name) for name in ("rows_never_seen", "out_of_memory", "rows_per_step")]
        apart = r["loss_distance"]
        table.add_row(
            r["contender"],
            "finished" if r["error"] is None else "died",
            *("-" if count is None else str(count) for count in counts),
            shown(r["losses"][-1] if r["losses"] else None, 4),
            "-" if apart is None else f"{apart:.0e}",
            shown(r.get("peak_over_first_step_mib"), 0),
            shown(r.get("wall_s"), 1),
        )
    return table


def notes(compared: dict[str, Any]) -> list[str]:
    """Return notes on what killed a run, and on how ours adapted."""
    lines = [f"{r['contender']}: {r['error']}" for r in compared["results"] if r["error"]]
    for r in compared["results"]:
        lines += [
            f"{r['contender']}, step {change['step']}: at most {change['tokens_per_chunk']} tokens: {change['reason']}"
            for change in r.get("chunk_changes", [])
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of the configured training")
    parser.add_argument("--share", type=float, default=0.6, help="headroom as a share of what ours needs unlimited")
    given = parser.parse_args()
    job = Job(given.steps, Shape(vocab=32_000, hidden=64, layers=2, longest_row=160), LENGTHS)
    compared = compare(job, given.share)
    console = Console(width=170)
    console.print(table_of(compared, job), *notes(compared), sep="\n", highlight=False, markup=False)
    write_result("real_memory", compared)


if __name__ == "__main__":
    main()
