"""Runs a few steps with the real settings and estimates the full run: ``--test_run`` and ``scu-trainer modes``."""

from __future__ import annotations

import contextlib
import copy
import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import psutil
import torch
from accelerate.utils import broadcast_object_list, wait_for_everyone
from rich.console import Console
from torch.utils.data import Subset
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from scu_trainer.hardware.watching.leftovers import TEST_RUN
from scu_trainer.run_files import free_bytes
from scu_trainer.train.checkpoints.format import size_bytes
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, is_main_process
from scu_trainer.train.run_directory.logs import RunLog
from scu_trainer.train.session.building import build_trainer
from scu_trainer.train.session.session import console_of_run
from scu_trainer.train.session.training import score
from scu_trainer.train.step.costs import StepTimes
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.trainer import SCUTrainer

STEPS = 6
SAVE_AT = 3
EVALUATION_ROWS = 16
NOT_RESUMED = "resuming was not tried: DeepSpeed and FSDP accept a model only once per process"


@dataclass(frozen=True)
class Estimate:
    """Measurements of STEPS steps, and the full run estimated from them.

    Fields:
        rows: for training; None for a stream.
        steps: optimizer steps of the full run.
        load_s: time until training can begin. first_steps_s: STEPS steps, including everything before the first.
        seconds_per_step: of a step that is not among the first.
        evaluations: of the held-out rows in the full run, including one before and one after training.
        evaluation_s: time for one evaluation, extrapolated.
        peak_bytes: GPU memory that torch reserved, or main memory of this process if no GPU trains.
    """

    rows: Optional[int]
    steps: int
    load_s: float
    first_steps_s: float
    seconds_per_step: float
    evaluations: int
    evaluation_s: float
    peak_bytes: int

    @property
    def total_s(self) -> float:
        """Without the time for checkpoints."""
        train_s = max(0.0, self.first_steps_s + (self.steps - STEPS) * self.seconds_per_step)
        return self.load_s + train_s + self.evaluations * self.evaluation_s


def try_out(job: Job, log: RunLog) -> Estimate:
    """Load, train STEPS steps, evaluate, save, resume from the checkpoint, and print an estimate of the full run.
    Leaves only caches behind. With DeepSpeed or FSDP nothing is resumed, and the printed line says so."""
    console = console_of_run()
    begun_s = time.perf_counter()
    job.check()
    job.require_one_gpu()
    parts = job.kind.load(job, console)
    load_s = time.perf_counter() - begun_s
    with _shared_scratch() as scratch:
        if is_main_process():
            log.open(Path(scratch))
        trainer = build_trainer(replace_training(job, scratch), parts, None, console)
        # DeepSpeed and FSDP wrap the model, and can do that only once in a process.
        resumes = not (trainer.is_deepspeed_enabled or is_sharded(trainer))
        start = {}
        if resumes:
            start = {name: p.detach().clone() for name, p in parts.model.named_parameters() if p.requires_grad}
        estimate = _estimate(job, parts, trainer, load_s)
        checkpoint = Path(scratch) / f"checkpoint-{SAVE_AT}"
        if resumes:
            # A new process would begin with these weights, toward which lambda decays.
            parts.model.load_state_dict(start, strict=False)
            resumed = build_trainer(replace_training(job, scratch), parts, None, Console(quiet=True))
            resumed.train(resume_from_checkpoint=str(checkpoint))
        _print_estimate(console, estimate, resumes, size_bytes(checkpoint), job)
    return estimate


def measure(job: Job, before_s: float = 0.0) -> Estimate:
    """Load, train STEPS steps and evaluate, without saving or printing anything. For one process. ``before_s``: seconds
    that a run takes before it reads its settings; they count as loading."""
    begun_s = time.perf_counter()
    job.check()
    job.require_one_gpu()
    parts = job.kind.load(job, Console(quiet=True))
    load_s = before_s + time.perf_counter() - begun_s
    with _shared_scratch() as scratch:
        short = replace_training(job, scratch)
        short.training.save_strategy = SaveStrategy.NO
        return _estimate(job, parts, build_trainer(short, parts, None, Console(quiet=True)), load_s)


@contextlib.contextmanager
def _shared_scratch() -> Iterator[str]:
    """Yield one folder for all ranks, as checkpoints need it, until all have left it. After a failure none waits."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(prefix=TEST_RUN)) if is_main_process() else ""
        (scratch,) = broadcast_object_list([own])
        yield scratch
        wait_for_everyone()


def _estimate(job: Job, parts: TrainingComponents, trainer: SCUTrainer, load_s: float) -> Estimate:
    """Train ``trainer``, which was made for STEPS steps of ``job``, and return the estimate."""
    times = StepTimes()
    trainer.add_callback(times)
    begun_s = time.perf_counter()
    trainer.train()
    first_steps_s = time.perf_counter() - begun_s
    evaluation_s = _evaluation_seconds(job, trainer, parts)
    peak_bytes = _peak_bytes(job)
    steps, epochs = _length(job, trainer)
    return Estimate(
        rows=None if job.data.streaming else len(parts.data.train),
        steps=steps,
        load_s=load_s,
        first_steps_s=first_steps_s,
        seconds_per_step=times.typical_s,
        evaluations=0 if parts.data.eval is None else _evaluations(job, steps, epochs) + 2,  # one before, one after
        evaluation_s=evaluation_s,
        peak_bytes=peak_bytes,
    )


def _length(job: Job, trainer: SCUTrainer) -> tuple[int, float]:
    """Return the optimizer steps and epochs of the full run; a curriculum has fewer batches than its rows suggest."""
    training = job.training
    if job.data.streaming:
        return training.max_steps, 1.0
    per_epoch = max(1, math.ceil(len(trainer.get_train_dataloader()) / training.gradient_accumulation_steps))
    if training.max_steps > 0:
        return training.max_steps, training.max_steps / per_epoch
    return math.ceil(training.num_train_epochs * per_epoch), training.num_train_epochs


def replace_training(job: Job, scratch: str) -> Job:
    """Return the job with the length, folders and intervals of a test run, and otherwise unchanged."""
    training = copy.copy(job.training)
    training.output_dir, training.max_steps = scratch, STEPS
    training.logging_steps, training.save_steps = 1, SAVE_AT
    training.save_total_limit = None  # the checkpoint that is resumed from must not be rotated away
    training.save_strategy, training.eval_strategy = SaveStrategy.STEPS, IntervalStrategy.NO
    training.report_to, training.push_to_hub = [], False
    training.load_best_model_at_end = False
    # infobatch prunes between the first epoch and the last ones, and refuses a run as short as this one
    methods = [method for method in job.curriculum.methods if method != "infobatch"]
    curriculum = replace(job.curriculum, curriculum="+".join(methods) or "none")
    return replace(job, training=training, curriculum=curriculum)


def _evaluation_seconds(job: Job, trainer, parts: TrainingComponents) -> float:
    """Return the seconds to score all held-out rows, extrapolated from the first ones."""
    if parts.data.eval is None:
        return 0.0
    few = min(EVALUATION_ROWS, len(parts.data.eval))
    begun_s = time.perf_counter()
    score(job, trainer, replace(parts, data=replace(parts.data, eval=_first_rows(parts.data.eval, few))))
    return (time.perf_counter() - begun_s) * len(parts.data.eval) / few


def _first_rows(rows: Any, count: int) -> Any:
    return rows.select(range(count)) if hasattr(rows, "select") else Subset(rows, range(count))


def _evaluations(job: Job, steps: int, epochs: float) -> int:
    """Return how often the full run evaluates during training."""
    training = job.training
    if training.eval_strategy == "steps":
        every = training.eval_steps or training.logging_steps
        return int(steps // every) if every >= 1 else round(1 / every)
    return math.ceil(epochs) if training.eval_strategy == "epoch" else 0


def _peak_bytes(job: Job) -> int:
    if job.training.device.type == "cuda":
        return torch.cuda.max_memory_reserved(job.training.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak if sys.platform == "darwin" else peak * 1024, psutil.Process().memory_info().rss)


def _print_estimate(console: Console, estimate: Estimate, resumes: bool, checkpoint_bytes: int, job: Job) -> None:
    done = "saved and resumed" if resumes else f"saved ({NOT_RESUMED})"
    whose = "of the GPU" if job.training.device.type == "cuda" else "of this process"
    output_dir = Path(job.training.output_dir)
    console.print(
        f"test run passed: trained, evaluated, {done}. The full run: {estimate.steps:,} steps of "
        f"{estimate.seconds_per_step:.2f} s and {estimate.evaluations} evaluations of {estimate.evaluation_s:.1f} s, "
        f"about {estimate.total_s / 60:.1f} minutes; {checkpoint_bytes / 2**20:.1f} MiB per checkpoint, "
        f"{free_bytes(output_dir) / 2**30:.1f} GiB free at {output_dir}; "
        f"peak memory {whose} {estimate.peak_bytes / 2**30:.2f} GiB",
        soft_wrap=True,
    )
