"""From settings to a trained run directory: what ``scripts/train.py`` calls.

Everything that can fail for a reason that the user can mend is tried before the run directory exists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import PrinterCallback, set_seed

from scu_trainer.data import Collator, PreparedData, default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.models.fit import require_fit
from scu_trainer.models.isolation import require_isolation
from scu_trainer.models.load import load_model, load_tokenizer, prepare_for_tuning
from scu_trainer.run_files import RunStatus, require_room, require_writable, write_json
from scu_trainer.settings import ModelSettings
from scu_trainer.train.base_model import embedded_base, is_cached
from scu_trainer.train.console import ConsoleCallback
from scu_trainer.train.costs import StepTimes, bytes_before_model, cost_figures
from scu_trainer.train.evaluate import DocumentScores, bpt_metrics, preprocess_logits, score_documents
from scu_trainer.train.job import Job, checkpoint_bytes, claim, is_leader
from scu_trainer.train.logs import RunLog, run_log
from scu_trainer.train.run_directory import RunStatusCallback, git_commit, versions
from scu_trainer.train.summary import (
    best_held_out,
    held_out_figures,
    memory_figures,
    print_table,
    regularization_figures,
)
from scu_trainer.train.trainer import SCUTrainer


@dataclass
class Parts:
    """What a job needs before its first step: everything loaded and checked, nothing written to the run directory."""

    tokenizer: Any
    data: PreparedData
    model: torch.nn.Module
    collator: Collator
    before_model_bytes: Optional[int] = None


def run(job: Job, console: Optional[Console] = None, log: Optional[RunLog] = None) -> dict[str, Any]:
    """Train, evaluate before and after, write the run directory. Returns the figures of scu_metrics.json.

    ``log``: one that ``run_log`` has begun earlier, to keep what libraries said while the settings were read.

    Raises a UserError before anything is written where the settings, the data, the model or the disk do not fit.
    """
    console = console or Console(highlight=False, quiet=not is_leader())
    if log is not None:
        return _run(job, console, log)
    with run_log() as own_log:
        return _run(job, console, own_log)


def _run(job: Job, console: Console, log: RunLog) -> dict[str, Any]:
    job.check()
    for note in job.notes:
        console.print(note, soft_wrap=True)
    require_writable(job.training.output_dir)
    parts = load_parts(job, console)
    output_dir = claim(job.training.output_dir, resuming=job.checkpoint is not None)
    if str(output_dir) != job.training.output_dir:
        console.print(f"{job.training.output_dir} already holds a run; this one goes to {output_dir}", soft_wrap=True)
        job.training.output_dir = str(output_dir)
    with _run_directory(job, parts, log) as status:
        return _train(job, parts, status, console)


# -- loading -----------------------------------------------------------------------------------------------------------


def load_parts(job: Job, console: Console) -> Parts:
    """Tokenizer, rows, model with adapters; each checked against the others."""
    cache_dir = default_cache_dir(job.data.cache_dir)
    settings, tokenizer = _with_base(job.model, cache_dir, console)
    data = prepare(
        job.data, tokenizer, seed=job.training.seed, cache_dir=cache_dir, model_name=settings.model_name_or_path
    )
    for line in data.books.lines():
        console.print(line, soft_wrap=True)
    set_seed(job.training.seed)
    before_model_bytes = bytes_before_model(job.training.device)
    model = load_model(settings)
    require_fit(model, settings.model_name_or_path, len(tokenizer), job.data.block_size)
    if job.data.isolate_documents:
        require_isolation(model, len(tokenizer))
    model = prepare_for_tuning(model, settings)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    console.print(f"model: {total:,} weights, {trainable:,} trained ({settings.tuning})", soft_wrap=True)
    require_room(job.training.output_dir, checkpoint_bytes(model, job.training))
    return Parts(tokenizer, data, model, Collator.of(tokenizer), before_model_bytes)


def _with_base(settings: ModelSettings, cache_dir: Path, console: Console):
    """The settings with a model name filled in, and the tokenizer of that model."""
    if settings.model_name_or_path is not None:
        return settings, load_tokenizer(settings)
    if not is_cached(cache_dir, settings.embedded_base_steps):
        console.print(
            "making the embedded base model, once: a Granite hybrid on Python's documentation", soft_wrap=True
        )
    folder = embedded_base(cache_dir, settings.embedded_base_steps)
    return replace(settings, model_name_or_path=str(folder)), embedded_tokenizer(cache_dir)


# -- the run directory -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _run_directory(job: Job, parts: Parts, log: RunLog) -> Iterator[Optional[RunStatus]]:
    """Make it, describe the run in it, and leave its status true however the run ends. None on all ranks but the
    first."""
    output_dir = Path(job.training.output_dir)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(output_dir / "logs" / "tensorboard")
    if not is_leader():
        yield None
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    status = RunStatus(output_dir / "run.json")
    status.update(status="running", pid=os.getpid(), error=None)
    log.open(output_dir)
    try:
        write_json(output_dir / "training_config.json", _description(job, parts))
        yield status
        status.update(status="finished", eta_s=0.0)
    except KeyboardInterrupt:
        status.update(
            status="stopped", error="interrupted; resume_from_checkpoint: true goes on from the newest checkpoint"
        )
        raise
    except BaseException as error:
        status.update(status="failed", error=f"{type(error).__name__}: {error}")
        raise


def _description(job: Job, parts: Parts) -> dict[str, Any]:
    return {
        "configuration": job.as_dict(),
        "versions": versions(),
        "git_commit": git_commit(),
        "seed": job.training.seed,
        "world_size": job.training.world_size,
        "data": {"fingerprint": parts.data.fingerprint, **parts.data.books.as_dict()},
    }


# -- training ----------------------------------------------------------------------------------------------------------


def build_trainer(job: Job, parts: Parts, status: Optional[RunStatus], console: Console) -> SCUTrainer:
    trainer = SCUTrainer(
        model=parts.model,
        args=job.training,
        data_collator=parts.collator,
        train_dataset=parts.data.train,
        eval_dataset=parts.data.eval,
        processing_class=parts.tokenizer,
        compute_metrics=bpt_metrics,
        preprocess_logits_for_metrics=preprocess_logits,
        regularization=job.regularization,
        regularization_tokens=parts.data.books.supervised_tokens or None,
        memory=job.memory,
        curriculum=job.acting_curriculum,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ConsoleCallback(console))
    if status is not None:
        trainer.add_callback(RunStatusCallback(status))
    return trainer


def _train(job: Job, parts: Parts, status: Optional[RunStatus], console: Console) -> dict[str, Any]:
    output_dir = Path(job.training.output_dir)
    trainer, times = build_trainer(job, parts, status, console), StepTimes()
    trainer.add_callback(times)
    before = score(trainer, parts)
    outcome = trainer.train(resume_from_checkpoint=job.checkpoint)
    after = score(trainer, parts)
    trainer.save_model()
    trainer.save_state()
    figures = {
        "steps": trainer.state.global_step,
        "train_s": outcome.metrics["train_runtime"],
        **held_out_figures(before, after),
        "best_held_out": best_held_out(trainer.state.log_history),
        "costs": cost_figures(job.training.device, times, parts.before_model_bytes, trainer),
    }
    if is_leader():
        _write_results(trainer, output_dir, figures, outcome.metrics["train_runtime"])
        if status is not None:
            status.update(step=trainer.state.global_step, notices=_notices(trainer))
        print_table(console, figures, output_dir, f"trained {trainer.state.global_step} steps")
    return figures


def score(trainer: SCUTrainer, parts: Parts) -> Optional[DocumentScores]:
    """Held-out scores by document; the other ranks wait for the first, which has the figures to report."""
    with trainer.accelerator.main_process_first():
        if parts.data.eval is None or not is_leader():
            return None
        # The precision of training: before ``train()`` the model's forward is not yet wrapped in it.
        with trainer.accelerator.autocast():
            return score_documents(trainer.model, parts.data.eval, parts.collator)


def _notices(trainer: SCUTrainer) -> list[str]:
    notices = [] if trainer.regularizer is None else list(trainer.regularizer.progress.notices)
    return notices if trainer.curriculum is None else [*notices, *trainer.curriculum.notices]


def _write_results(trainer: SCUTrainer, output_dir: Path, figures: dict[str, Any], train_s: float) -> None:
    regularizer = trainer.regularizer
    if regularizer is not None:
        seconds = trainer.regularization_callback.seconds
        figures["regularization"] = regularization_figures(output_dir, regularizer, seconds, train_s)
    if trainer.chunked is not None:
        figures["memory"] = memory_figures(trainer.chunked.loop)
    if trainer.curriculum is not None:
        figures["curriculum"] = trainer.curriculum.figures()
    write_json(output_dir / "scu_metrics.json", figures)
