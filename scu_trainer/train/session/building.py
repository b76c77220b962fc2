"""Builds the trainer of a job, with its loops, optimizer and console."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Optional

from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from transformers import PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from scu_trainer.data.text.mixture_plan import rows_of_others
from scu_trainer.errors import SettingsError
from scu_trainer.run_files import RunStatus
from scu_trainer.settings import RegularizationSettings
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.evaluation.by_source import metrics_by_source
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.distillation import Distillation
from scu_trainer.train.loops.throughput import Throughput
from scu_trainer.train.retention.loop import Retention
from scu_trainer.train.run_directory.console import ConsoleCallback
from scu_trainer.train.run_directory.layout import RunStatusCallback
from scu_trainer.train.run_directory.log_history import LogHistoryCallback
from scu_trainer.train.session.samples import Samples
from scu_trainer.train.trainer import SCUTrainer

STOCK = ("transformers", "accelerate")


def build_trainer(job: Job, parts: TrainingComponents, status: Optional[RunStatus], console: Console) -> SCUTrainer:
    regularization, tokens = _regularization(job, parts), parts.data.statistics.supervised_tokens or None
    with _argument_errors_for_user():
        trainer = SCUTrainer(
            model=parts.model,
            args=job.training,
            data_collator=parts.collator,
            train_dataset=parts.data.train,
            eval_dataset=parts.data.eval,
            processing_class=parts.processor,
            compute_metrics=metrics_by_source(job.kind.compute_metrics, parts.data),
            preprocess_logits_for_metrics=job.kind.preprocess_logits,
            regularization=regularization,
            regularization_tokens=None if regularization is None else tokens,
            memory=job.memory,
            curriculum=job.acting_curriculum,
            efficiency=job.efficiency,
            safety=job.safety,
            callbacks=_loops(job, parts),
            optimizers=(own_optimizer(job, parts.model), None),
        )
    for line in (line for loop in trainer.loops for line in loop.opening_lines()):
        console.print(line, soft_wrap=True)
    for theirs in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):  # our console prints the logs and the bar instead
        trainer.remove_callback(theirs)
    trainer.add_callback(ConsoleCallback(console, job.kind.unit))
    if trainer.loop(Throughput.name) is None:  # rows and tokens per second are logged without that setting, too
        trainer.add_callback(Throughput(counts_flops=False))
    trainer.add_callback(LogHistoryCallback())
    if status is not None:
        trainer.add_callback(RunStatusCallback(status))
    return trainer


def _loops(job: Job, parts: TrainingComponents) -> list[Loop]:
    """Return the loops in addition to those that the trainer makes from its settings."""
    loops: list[Loop] = []
    if parts.teacher is not None:
        loops.append(Distillation(parts.teacher, job.model.teacher_weight, job.model.teacher_temperature))
    if parts.anchor is not None:
        loops.append(
            Retention(parts.anchor, job.retention, parts.collator, parts.load_base, _rows_to_learn(job, parts))
        )
    if job.task.task == TEXT and job.data.sample_prompts and parts.data.eval is not None:
        loops.append(Samples(parts.data.eval, parts.processor, job.data.sample_prompts, job.data.sample_max_new_tokens))
    return loops


def own_optimizer(job: Job, model: nn.Module) -> Optional[Optimizer]:
    """Return the optimizer of LoRA+, with two learning rates in peft's groups (Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354); None if the stock Trainer makes the optimizer."""
    ratio = job.model.loraplus_lr_ratio
    if ratio is None:
        return None
    from peft.optimizers import create_loraplus_optimizer

    kind, arguments = SCUTrainer.get_optimizer_cls_and_kwargs(job.training, model)
    arguments["loraplus_weight_decay"] = job.training.weight_decay
    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=ratio, **arguments)


def _rows_to_learn(job: Job, parts: TrainingComponents) -> Any:
    """Return the held-out rows of what is learned, without those of a source that should be retained."""
    place, held_out = parts.anchor.place, parts.data.eval
    if place is None or held_out is None:
        return held_out
    return rows_of_others(held_out, place, len(job.data.sources))


def _regularization(job: Job, parts: TrainingComponents) -> Optional[RegularizationSettings]:
    """Return the regularization settings. If retention acts through lambda, only retention may change it."""
    if parts.anchor is None or parts.anchor.replayed is not None:
        return job.regularization
    return replace(job.regularization, law="fixed", lambda_init=0.0)


@contextlib.contextmanager
def _argument_errors_for_user() -> Iterator[None]:
    """Inside, errors of the stock Trainer about its arguments become SettingsError; our own faults pass through."""
    try:
        yield
    except (ValueError, ImportError) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        if not frames or str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] not in STOCK:
            raise
        raise SettingsError(str(error)) from error
