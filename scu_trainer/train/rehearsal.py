"""``--test_run``: a few steps of everything on the real settings, then what the full run would take."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import psutil
import torch
from accelerate.utils import broadcast_object_list, wait_for_everyone
from rich.console import Console
from torch.utils.data import Subset

from scu_trainer.run_files import free_bytes
from scu_trainer.train.costs import StepTimes
from scu_trainer.train.job import Job, is_leader
from scu_trainer.train.logs import RunLog
from scu_trainer.train.parts import Parts
from scu_trainer.train.session import build_trainer, score
from scu_trainer.train.sharded import is_sharded

STEPS = 6
SAVE_AT = 3
EVALUATION_ROWS = 16
PREFIX = "scu-test-run-"
NOT_RESUMED = "resuming was not rehearsed: DeepSpeed and FSDP take a model once in a process"


def rehearse(job: Job, console: Optional[Console] = None, log: Optional[RunLog] = None) -> dict[str, float]:
    """Load, train STEPS steps, evaluate, save, resume from the checkpoint, and print an estimate of the full run.

    Nothing is left behind but caches. Where weights are handed to DeepSpeed or FSDP nothing is resumed, and the line
    says so. Returns seconds_per_step, steps, total_s, checkpoint_bytes, peak_rss_bytes, is_resumed.
    """
    console = console or Console(highlight=False, quiet=not is_leader())
    job.check()
    started_s = time.perf_counter()
    parts = job.kind.load(job, console)
    load_s = time.perf_counter() - started_s
    with _shared_scratch() as scratch:
        if log is not None and is_leader():
            log.open(Path(scratch))
        figures = _measure(job, parts, scratch, console)
    figures["steps"] = job.planned_steps(len(parts.data.train)) if not job.data.streaming else job.training.max_steps
    evaluations = _evaluations(job, int(figures["steps"])) + 2  # one before, one after
    figures["total_s"] = load_s + figures["steps"] * figures["seconds_per_step"] + evaluations * figures["evaluation_s"]
    _say(console, figures, evaluations, Path(job.training.output_dir))
    return figures


@contextlib.contextmanager
def _shared_scratch() -> Iterator[str]:
    """One folder for all ranks, as checkpoints need it. It goes when all have left it; after a failure none waits."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)) if is_leader() else ""
        (scratch,) = broadcast_object_list([own])
        yield scratch
        wait_for_everyone()


def _measure(job: Job, parts: Parts, scratch: str, console: Console) -> dict[str, Any]:
    short = replace_training(job, scratch)
    times = StepTimes()
    trainer = build_trainer(short, parts, None, console)
    # The model will be DeepSpeed's or FSDP's, and both start once in a process.
    resumes = not (trainer.is_deepspeed_enabled or is_sharded(trainer))
    start = _trained_weights(parts.model) if resumes else {}
    trainer.add_callback(times)
    trainer.train()
    evaluation_s = _evaluation_seconds(job, trainer, parts)
    checkpoint = Path(scratch) / f"checkpoint-{SAVE_AT}"
    if resumes:
        parts.model.load_state_dict(start, strict=False)  # lambda pulls toward where a new process would begin
        resumed = build_trainer(short, parts, None, Console(quiet=True))
        resumed.train(resume_from_checkpoint=str(checkpoint))
    return {
        "is_resumed": resumes,
        "seconds_per_step": times.typical_s,
        "evaluation_s": evaluation_s,
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def replace_training(job: Job, scratch: str) -> Job:
    """The job with the length, the places and the rhythm of a rehearsal; everything else as it is."""
    training = copy.copy(job.training)
    training.output_dir, training.max_steps = scratch, STEPS
    training.logging_steps, training.save_steps = 1, SAVE_AT
    training.save_total_limit = None  # the checkpoint that is resumed from must not be rotated away
    training.save_strategy, training.eval_strategy = (
        type(training.save_strategy)("steps"),
        type(training.eval_strategy)("no"),
    )
    training.report_to, training.push_to_hub = [], False
    training.load_best_model_at_end = False
    # So short a run has no epochs to prune in.
    methods = [method for method in job.curriculum.methods if method != "infobatch"]
    curriculum = replace(job.curriculum, curriculum="+".join(methods) or "none")
    return replace(job, training=training, curriculum=curriculum)


def _evaluation_seconds(job: Job, trainer, parts: Parts) -> float:
    """Seconds to score all held-out rows, extrapolated from the first ones."""
    if parts.data.eval is None:
        return 0.0
    few = min(EVALUATION_ROWS, len(parts.data.eval))
    begun_s = time.perf_counter()
    score(job, trainer, replace(parts, data=replace(parts.data, eval=_first(parts.data.eval, few))))
    return (time.perf_counter() - begun_s) * len(parts.data.eval) / few


def _trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what training will change."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _first(rows: Any, count: int) -> Any:
    return rows.select(range(count)) if hasattr(rows, "select") else Subset(rows, range(count))


def _evaluations(job: Job, steps: int) -> int:
    training = job.training
    if training.eval_strategy == "steps":
        every = training.eval_steps or training.logging_steps
        return int(steps // every) if every >= 1 else round(1 / every)
    return round(training.num_train_epochs) if training.eval_strategy == "epoch" else 0


def _peak_rss_bytes() -> int:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak if sys.platform == "darwin" else peak * 1024, psutil.Process().memory_info().rss)


def _say(console: Console, figures: dict[str, Any], evaluations: int, output_dir: Path) -> None:
    minutes = figures["total_s"] / 60
    done = "saved and resumed" if figures["is_resumed"] else f"saved ({NOT_RESUMED})"
    console.print(
        f"test run passed: trained, evaluated, {done}. The full run: {figures['steps']:,} steps of "
        f"{figures['seconds_per_step']:.2f} s and {evaluations} evaluations of {figures['evaluation_s']:.1f} s, "
        f"about {minutes:.1f} minutes; {figures['checkpoint_bytes'] / 2**20:.1f} MiB per checkpoint, "
        f"{free_bytes(output_dir) / 2**30:.1f} GiB free at {output_dir}; "
        f"peak memory of this process {figures['peak_rss_bytes'] / 2**30:.2f} GiB",
        soft_wrap=True,
    )
