"""One training under a hard memory limit, in its own process: the contenders of under_a_limit.py, and their counts.

The processes are forks of a server that has imported everything and run nothing, in an environment in which freed
blocks are returned to the kernel immediately. Each starts like a new process, but without the time for imports.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer

from benchmarks.lib.common import ROOT
from benchmarks.lib.memory_work import EXACT_MEMORY, MIB, SHORTEST_ROW, TokenRows, Witness, counted, trainer_for
from benchmarks.lib.text_job import Job, held_out_bits
from benchmarks.studies.real_memory import Limits, Record, RecordedOurs, RecordedStock, changes_of
from scu_trainer.errors import OutOfMemory
from scu_trainer.settings import MemorySettings
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

NO_BATCH_LEFT = "No executable batch size found"
"""The message of ``auto_find_batch_size`` when it gives up."""

KILLED = "the process was killed"


@dataclass(frozen=True)
class Contender:
    """A contender. ``headroom``: the memory that ours keeps free; None for the stock Trainer. ``batch_rows``: None for
    the configured batch; otherwise accumulation grows as the batch shrinks."""

    name: str
    headroom: Optional[str] = None
    limited: bool = True
    auto_find: bool = False
    batch_rows: Optional[int] = None
    checkpointing: bool = False

    @property
    def memory(self) -> Optional[MemorySettings]:
        return None if self.headroom is None else MemorySettings(target_headroom_gb=self.headroom)

    def job(self, job: Job) -> Job:
        rows = self.batch_rows or job.batch_rows
        return replace(job, batch_rows=rows, accumulation=job.step_rows // rows, checkpointing=self.checkpointing)


# -- one run -----------------------------------------------------------------------------------------------------------


def run(job: Job, contender: Contender, headroom_bytes: Optional[int]) -> dict[str, Any]:
    """Train one contender until it finishes or dies. ``headroom_bytes``: the limit above what it holds after its first
    optimizer step."""
    if any(os.environ.get(name) != value for name, value in EXACT_MEMORY.items()):
        raise RuntimeError("the fork server was started in another environment: freed blocks would stay")
    gc.freeze()  # the collections of the training need not walk over what the server has imported
    # oneDNN may crash instead of raising an error if it cannot allocate memory for a new shape.
    torch.backends.mkldnn.enabled = False
    rows, record, witness = rows_of(job), Record(), Witness(job.device)
    register_optimizer_step_post_hook(record.optimizer_stepped)
    kinds = (RecordedStock, RecordedOurs)
    with (
        run_log(),
        trainer_for(
            job.device, job.model(), rows, contender.memory, witness, kinds, **arguments(contender.job(job), contender)
        ) as trainer,
    ):
        trainer.record = record
        limits = Limits(job.device, witness, record, headroom_bytes if contender.limited else None)
        trainer.add_callback(limits)
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        error = _train(trainer)
        wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        limits.lift()
        return {
            "error": error,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "peak_over_first_step_mib": (witness.highest_bytes - (limits.base_bytes or 0)) / MIB,
            **_counted(trainer, record, job, error),
            **(_pieces(trainer) if contender.memory else {}),
            "held_out_bits": None if error else held_out_bits(trainer.model, job),
        }


def rows_of(job: Job) -> TokenRows:
    """Return the rows. Those of the first optimizer step are very short, so that model, gradients and optimizer state
    are allocated before the limit is set."""
    lengths = job.lengths.draw((job.steps - 1) * job.step_rows, job.shape.longest_row)
    return TokenRows([SHORTEST_ROW] * job.step_rows + lengths, job.shape.vocab)


def arguments(job: Job, contender: Contender) -> dict[str, Any]:
    """Return the TrainingArguments. They train one epoch, so that a smaller batch leaves no row out."""
    return {
        **job.training(),
        "max_steps": -1,
        "num_train_epochs": 1,
        "optim": "adamw_torch_fused",
        "auto_find_batch_size": contender.auto_find,
    }


def _train(trainer: Trainer) -> Optional[str]:
    try:
        trainer.train()
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error) or NO_BATCH_LEFT in str(error)):
            raise
        return str(error).partition("\n")[0]
    return None


def _counted(trainer: Trainer, record: Record, job: Job, error: Optional[str]) -> dict[str, Any]:
    """Return the counts of a run. Rows count as trained when their gradients have reached an optimizer step."""
    due, of_loop = job.steps * job.step_rows, counted(trainer)
    return {
        "steps_due": job.steps,
        "steps_executed": record.steps,
        "steps_reported": trainer.state.global_step,
        "rows_due": due,
        "rows_trained_once": sum(count == 1 for count in record.rows.values()),
        "rows_repeated": sum(count - 1 for count in record.rows.values()),
        "rows_never_seen": due - len(record.rows),
        "rows_per_step": max(record.rows_per_step[-2:], default=None),  # the last step of an epoch may have fewer
        "out_of_memory": of_loop.out_of_memory if of_loop else record.starts - 1 + (error is not None),
        "losses": record.losses,
    }


def _pieces(trainer: Trainer) -> dict[str, Any]:
    """Return how ours split: micro-batches, tokens with padding, and every change of the size with its reason."""
    statistics = trainer.micro_batches.loop.statistics
    return {
        "chunks": statistics.chunks,
        "processed_tokens": statistics.processed_tokens,
        "failed_tokens": statistics.failed_tokens,
        "changes": changes_of(trainer),
    }


# -- processes ---------------------------------------------------------------------------------------------------------


def attempt(job: Job, contender: Contender, headroom_bytes: Optional[int]) -> dict[str, Any]:
    """Return the result of ``run`` with the name of the contender; for a killed process only that it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "deepspeed"])  # accelerate imports the latter where it is installed
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **EXACT_MEMORY}
    named = {
        "contender": contender.name,
        "batch_rows": contender.job(job).batch_rows,
        "checkpointing": contender.checkpointing,
    }
    begun_s = time.perf_counter()
    # The server inherits the environment at the moment when the first process is requested.
    with patch.dict(os.environ, given), ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return {**named, **pool.submit(run, job, contender, headroom_bytes).result()}
        except BrokenProcessPool:
            wall_s, due = time.perf_counter() - begun_s, job.steps * job.step_rows
            return {**named, "error": KILLED, "wall_s": wall_s, "rows_due": due, "losses": []}


def composer() -> str:
    """Return why Composer's automatic micro-batching is not measured."""
    if importlib.util.find_spec("composer") is None:
        return "not installed"
    from composer import Trainer as Composers

    if "device_train_microbatch_size" not in inspect.signature(Composers.__init__).parameters:
        return "installed, without device_train_microbatch_size"
    return "installed, not driven by this benchmark"
