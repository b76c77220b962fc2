"""Short paired trainings at several learning rates, on a copy: ``scu-trainer plan --find_lr``.

Each begins with the same weights and random numbers and sees the same batches; only the rate differs. Nothing of the
run is written: what a trainer keeps lies in a folder that goes at the end. ``control/rate_search.py`` decides.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from rich.console import Console
from transformers import TrainingArguments, set_seed

from scu_trainer.control.rate_search import RUNGS, RateAdvice, Rung, advice, best_exponent, next_exponent, rate_of
from scu_trainer.errors import NonFiniteLoss, RequirementError
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.settings import CurriculumSettings, RetentionSettings, SafetySettings
from scu_trainer.settings.base import require
from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores, bootstrap_difference
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.session.session import build_trainer, score
from scu_trainer.train.step.distributed.deepspeed_rules import uses_deepspeed

FEWEST_STEPS = 8
"""Of a short training: below, it is warm-up and noise."""

FEWEST_DOCUMENTS = 2
"""Held out: one cannot be resampled."""

USUAL_TRIALS = (5, 3)
"""Of each rung, where the best rate is the one that was asked for."""


@dataclass(frozen=True)
class Tried:
    """A rung: trainings of ``steps`` steps. ``losses``: held out, nats per token (or label) by exponent, infinite where
    one ended without a finite loss. ``differences``: bits to the best of them, paired over documents."""

    steps: int
    losses: dict[int, float]
    differences: dict[int, BootstrapInterval]

    @property
    def best(self) -> int:
        return best_exponent(self.losses)

    def bits(self, exponent: int) -> float:
        return self.losses[exponent] / NATS_PER_BIT


@dataclass(frozen=True)
class FoundRate:
    """``advice``: by the last of ``rungs``. ``all_steps``: of the whole training."""

    asked: float
    rungs: tuple[Tried, ...]
    advice: RateAdvice
    all_steps: int
    seconds: float

    @property
    def share(self) -> float:
        """Optimizer steps of the search, of those that the whole training takes."""
        return sum(len(rung.losses) * rung.steps for rung in self.rungs) / self.all_steps


def find_rate(job: Job, console: Console) -> FoundRate:
    """Search. Raises a UserError where the job does not allow it."""
    job.check()
    refuse(job)
    parts = job.kind.load(job, console)
    documents = 0 if parts.data.eval is None else len(parts.data.eval)
    require(
        documents >= FEWEST_DOCUMENTS,
        f"--find_lr compares rates on held-out {job.kind.item}s, and there are {documents}; give eval_dataset, more "
        "data, or a larger validation_split_percentage",
    )
    trials = RateTrials(job, parts)
    shortest = max(rung.share for rung in RUNGS)
    require(
        trials.all_steps >= shortest * FEWEST_STEPS,
        f"--find_lr trains 1/{shortest} of the steps at each rate, and {trials.all_steps} are too few; "
        f"{shortest * FEWEST_STEPS} or more are needed (max_steps, num_train_epochs)",
    )
    console.print(_beforehand(trials.all_steps), soft_wrap=True)
    begun_s, tried, start = time.perf_counter(), [], 0
    for rung in RUNGS:
        tried.append(_climbed(rung, trials, start, console))
        start = tried[-1].best
    last = tried[-1]
    least = {
        exponent: last.differences[exponent].low if exponent in last.differences else math.inf
        for exponent in last.losses
    }
    found = advice(last.losses, least)
    return FoundRate(job.training.learning_rate, tuple(tried), found, trials.all_steps, time.perf_counter() - begun_s)


def _beforehand(all_steps: int) -> str:
    usual = " and ".join(
        f"{count} of {all_steps // rung.share:,}" for count, rung in zip(USUAL_TRIALS, RUNGS, strict=True)
    )
    steps = sum(count * (all_steps // rung.share) for count, rung in zip(USUAL_TRIALS, RUNGS, strict=True))
    return (
        f"finding the learning rate by short trainings, usually {usual} steps: about {steps:,}, where the whole training "
        f"takes {all_steps:,}; more where the best rate is far from learning_rate"
    )


def refuse(job: Job) -> None:
    """Raise a UserError for a job whose rates cannot be compared here."""
    training, optimizer = job.training, str(getattr(job.training.optim, "value", job.training.optim))
    if training.world_size > 1:
        raise RequirementError(
            f"--find_lr trains in one process, and the launcher started {training.world_size}; start it without one "
            "(per_device_train_batch_size times their number gives the same batch)"
        )
    if uses_deepspeed(training) or training.fsdp:
        raise RequirementError("--find_lr: DeepSpeed and FSDP take a model once in a process; leave them out to search")
    require(training.learning_rate > 0, f"learning_rate is {training.learning_rate}; --find_lr begins there: above 0")
    require(not optimizer.endswith("layerwise"), f"--find_lr: optim: {optimizer} stays in the model; use another")
    schedule = str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))
    require(
        schedule not in ("reduce_lr_on_plateau", "greedy"),
        f"--find_lr: lr_scheduler_type: {schedule} waits for evaluations, which a short training has none of; use "
        "another to search",
    )
    require(
        not job.efficiency.has_lr_steps or job.efficiency.milestones_are_shares,
        "--find_lr cannot shorten a schedule that is counted in epochs; give lr_milestones as shares, such as 0.5 0.75",
    )


def _climbed(rung: Rung, trials: RateTrials, start: int, console: Console) -> Tried:
    """Raises NonFiniteLoss where no training has a finite loss."""
    steps, asked = trials.all_steps // rung.share, trials.job.training.learning_rate
    scores: dict[int, Optional[DocumentScores]] = {}
    while (exponent := next_exponent(rung, _losses(scores), start)) is not None:
        begun_s = time.perf_counter()
        scores[exponent] = trials.trained(rate_of(asked, exponent), steps)
        console.print(
            f"{steps} steps at learning_rate {rate_of(asked, exponent):.2e}: held out "
            f"{_losses(scores)[exponent] / NATS_PER_BIT:.4f} bits, {time.perf_counter() - begun_s:.1f} s",
            soft_wrap=True,
        )
    losses = _losses(scores)
    best = best_exponent(losses)
    if not math.isfinite(losses[best]):
        raise NonFiniteLoss(
            "no short training ended with a finite held-out loss, the lowest learning_rate among them was "
            f"{rate_of(asked, min(losses)):.2e}; look at the data with scu-trainer data"
        )
    finite = {exponent: found for exponent, found in scores.items() if found is not None}
    differences = {exponent: bootstrap_difference(scores[best], found) for exponent, found in finite.items()}
    return Tried(steps, losses, differences)


def _losses(scores: dict[int, Optional[DocumentScores]]) -> dict[int, float]:
    return {exponent: math.inf if found is None else found.bpt * NATS_PER_BIT for exponent, found in scores.items()}


# -- one short training ------------------------------------------------------------------------------------------------


class RateTrials:
    """Trainings of ``job`` that leave its weights as they were. ``all_steps``: of the whole training."""

    def __init__(self, job: Job, parts: TrainingComponents) -> None:
        self.parts = replace(parts, anchor=None)
        self.all_steps = job.planned_steps(0 if job.data.streaming else len(parts.data.train))
        self.job = without_loops(job)
        self._start = _state(parts.model)

    def trained(self, rate: float, steps: int) -> Optional[DocumentScores]:
        """Held-out scores after a training of ``steps`` steps whose schedule is as long as itself; None where it ended
        without a finite loss."""
        with tempfile.TemporaryDirectory(prefix="scu_find_rate_") as scratch:
            job = replace(self.job, training=_arguments(self.job.training, rate, steps, self.all_steps, scratch))
            set_seed(job.training.seed)
            trainer = build_trainer(job, self.parts, None, Console(quiet=True))
            try:
                trainer.train()
                found = score(job, trainer, self.parts)
            except NonFiniteLoss:
                found = None
            finally:
                self._restore()
                trainer.accelerator.unwrap_model(self.parts.model, keep_fp32_wrapper=False)
        return found if found is not None and math.isfinite(float(found.nats.sum())) else None

    def _restore(self) -> None:
        self.parts.model.load_state_dict(self._start, strict=False)
        self.parts.model.zero_grad(set_to_none=True)


class OfTrials(Job):
    """A job whose rows are not watched."""

    acting_curriculum = None


def without_loops(job: Job) -> Job:
    """The job with the memory loop and no other that acts on the training."""
    efficiency = replace(job.efficiency, ema_decay=None, throughput=False, peak_tflops=None, profile_steps=0)
    return replace(
        OfTrials(**vars(job)),
        data=replace(job.data, sample_prompts=0),
        regularization=None,
        curriculum=CurriculumSettings(),
        efficiency=efficiency,
        retention=RetentionSettings(),
        safety=SafetySettings(preflight="off", divergence="off", max_nonfinite_steps=job.safety.max_nonfinite_steps),
    )


def _arguments(training: TrainingArguments, rate: float, steps: int, all_steps: int, scratch: str) -> TrainingArguments:
    """Of a training of ``steps`` steps in the place of ``all_steps``: what its schedule counts in steps shrinks
    alike."""
    short = copy.copy(training)
    short.output_dir, short.learning_rate, short.max_steps = scratch, rate, steps
    if short.warmup_steps >= 1:
        short.warmup_steps = round(short.warmup_steps * steps / all_steps)
    short.lr_scheduler_kwargs = {
        name: round(value * steps / all_steps) if name.endswith("_steps") and value else value
        for name, value in (training.lr_scheduler_kwargs or {}).items()
    }
    short.save_strategy, short.eval_strategy = (type(training.save_strategy)("no"), type(training.eval_strategy)("no"))
    short.logging_steps, short.report_to, short.push_to_hub = steps, [], False
    short.load_best_model_at_end, short.resume_from_checkpoint = False, None
    return short


def _state(model: torch.nn.Module) -> dict[str, Any]:
    """A copy of what training changes: trained weights, and all buffers that a checkpoint holds."""
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    names |= {name for name, _ in model.named_buffers()}
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name in names}
