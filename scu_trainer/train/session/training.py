"""A training run of the command, from its first step to its results: scored before and after, stopped, saved."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from transformers.trainer_utils import TrainOutput

from scu_trainer.errors import OutOfMemory, Stopped, StorageError
from scu_trainer.models.kernels import kernel_line
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.run_files import RunStatus, apply_umask, write_json
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.checkpoints.writer import write_errors_raised
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, is_main_process
from scu_trainer.train.memory_estimate.record import RunEstimate
from scu_trainer.train.run_directory.resume import AUTO, Start, wanted_checkpoint
from scu_trainer.train.session.stopping import StopCallback, StopRequest
from scu_trainer.train.session.summary import best_held_out, held_out_by_source, held_out_figures, print_table
from scu_trainer.train.step.costs import StepTimes, above_baseline, cost_figures, step_peaks
from scu_trainer.train.step.distributed.deepspeed_start import builds_reported
from scu_trainer.train.step.distributed.sharded import BeforeFirstStep, is_sharded, save_whole, training_precision
from scu_trainer.train.trainer import SCUTrainer

BEFORE = "held_out_before"
"""Key in the trainer's state for the held-out scores from before the first step."""


def train(
    job: Job,
    parts: TrainingComponents,
    start: Start,
    trainer: SCUTrainer,
    request: StopRequest,
    status: Optional[RunStatus],
    console: Console,
    foreseen: RunEstimate,
) -> dict[str, Any]:
    """Train to the last step, with everything before and after it. Returns the content of scu_metrics.json."""
    output_dir, times, peaks = Path(job.training.output_dir), StepTimes(), step_peaks(trainer)
    stop = _add_stop_callback(trainer, request, status)
    for watcher in (times, peaks):
        trainer.add_callback(watcher)
    before = BeforeFirstStep(trainer, lambda: _score_before(job, trainer, parts, console))
    outcome = _run_training(trainer, start, console)
    is_stream_read = job.data.streaming and trainer.state.global_step > trainer._initial_global_step
    for line in _stream_lines(job, parts) if is_stream_read else ():
        console.print(line, soft_wrap=True)
    if stop.stopped_at is not None:
        raise _stop_error(job, trainer, stop.stopped_at, request)
    _save(trainer, output_dir)
    if is_stream_read and is_main_process() and not job.training.dataloader_num_workers:
        _add_stream_statistics(trainer, parts, output_dir)
    after = score(job, trainer, parts)
    costs = cost_figures(job.training.device, times, parts.before_model_bytes, peaks)
    figures = {
        "steps": trainer.state.global_step,
        "steps_of_this_start": trainer.state.global_step - trainer._initial_global_step,
        "train_s": outcome.metrics["train_runtime"],
        "item": job.kind.item,
        "unit": job.kind.unit,
        "has_base": job.task.task == TEXT,  # other models get a new head, or are trained from scratch
        "has_new_tokens": bool(job.model.new_tokens),
        **held_out_figures(before.value, after),
        **held_out_by_source(before.value, after, parts.data),
        "best_held_out": best_held_out(trainer.state.log_history),
        "costs": costs,
        "memory_estimate": foreseen.as_dict(above_baseline(costs)),
    }
    if is_main_process():
        _write_figures(trainer, figures, output_dir, status, console)
    return figures


def _stream_lines(job: Job, parts: TrainingComponents) -> list[str]:
    """Return lines about the content of streaming data, which is known only after reading them."""
    if job.training.dataloader_num_workers > 0:
        return [
            "streaming: the loader's workers counted the rows that were read and left out, so the counts are not "
            "known here; set dataloader_num_workers: 0 to count them"
        ]
    return parts.data.statistics.lines()


def _run_training(trainer: SCUTrainer, start: Start, console: Console) -> TrainOutput:
    reports = contextlib.nullcontext()
    if trainer.is_deepspeed_enabled:
        reports = builds_reported(lambda line: console.print(line, soft_wrap=True))
    try:
        with reports:
            return trainer.train(resume_from_checkpoint=start.checkpoint)
    except OutOfMemory as error:
        error.steps_done = trainer.state.global_step
        raise


def _save(trainer: SCUTrainer, output_dir: Path) -> None:
    """Save the model before it is scored, which takes a while and changes nothing. A push waits for the scores,
    because the model card holds them."""
    trainer.before_save()
    save_whole(trainer)
    with write_errors_raised("the trained model"):
        trainer.save_model(_internal_call=True)
        trainer.save_state()
    if is_main_process():
        apply_umask(output_dir.iterdir())


def _add_stream_statistics(trainer: SCUTrainer, parts: TrainingComponents, output_dir: Path) -> None:
    found = parts.data.statistics.as_dict()
    known = trainer.checkpoints.facts["data"]
    found["formats"] = {**known["formats"], **found["formats"]}  # the last pass may not have reached all formats
    known |= found
    write_json(output_dir / "training_config.json", trainer.checkpoints.facts)


def _write_figures(
    trainer: SCUTrainer, figures: dict[str, Any], output_dir: Path, status: Optional[RunStatus], console: Console
) -> None:
    """Add the metrics of the loops to ``figures``, write scu_metrics.json, and print the table."""
    for loop in trainer.loops:
        figures |= loop.figures()
    write_json(output_dir / "scu_metrics.json", figures)
    if status is not None:
        notices = [*trainer.checkpoints.notices, *trainer.pushes.notices]
        notices += [notice for loop in trainer.loops for notice in loop.notices]
        status.update(step=trainer.state.global_step, notices=notices)
    lines = [line for loop in trainer.loops for line in loop.lines(figures)]
    print_table(console, figures, output_dir, f"trained {trainer.state.global_step} steps", lines)


def _add_stop_callback(trainer: SCUTrainer, request: StopRequest, status: Optional[RunStatus]) -> StopCallback:
    stop = StopCallback(request, trainer.args.world_size)
    trainer.add_callback(stop)
    if status is not None:
        stop.on_stop = lambda: status.update(status="stopping")
        trainer.checkpoints.before = lambda: _record_step(status, trainer.state.global_step)
        request.on_deadline = lambda: status.update(status="stopped", error="the grace period was over")
    return stop


def _record_step(status: RunStatus, step: int) -> None:
    """Write the step to run.json, because a checkpoint past its step would count as one of an earlier start."""
    status.update(step=step)
    status.flush()


def _stop_error(job: Job, trainer: SCUTrainer, step: int, request: StopRequest) -> Exception:
    wanted, newest = f"checkpoint-{step}", trainer.checkpoints.newest
    if newest is None or newest.name != wanted:
        return StorageError(f"stopped at step {step}, but {trainer.checkpoints.notices[-1]}")
    why = request.name or "another rank"
    return Stopped(
        f"stopped by {why} after step {step}: {newest} is complete; run the same "
        f"command{_flags_to_resume(job, newest)} to resume from it"
    )


def _flags_to_resume(job: Job, newest: Path) -> str:
    """Return the flags that the same command needs to resume from ``newest``."""
    wanted, flags = wanted_checkpoint(job.training), []
    starts_elsewhere = not job.safety.resume if wanted is None else wanted not in (True, AUTO)
    if starts_elsewhere:
        flags.append(f"--resume_from_checkpoint {shlex.quote(str(newest))}")
    if job.training.save_only_model and not job.safety.weights_only:
        flags.append("--weights_only true")
    return f" with {' and '.join(flags)}" if flags else ""


def _score_before(
    job: Job, trainer: SCUTrainer, parts: TrainingComponents, console: Console
) -> Optional[DocumentScores]:
    """Return the held-out scores before training. If the model is placed only when training begins, a run that resumes
    has loaded its checkpoint by then, and the trainer's state holds the first scores."""
    console.print(_kernel_report(job, trainer, parts), soft_wrap=True)
    if parts.data.eval is None:
        return None
    state, data = trainer.state, parts.data.fingerprint
    kept = state.stateful_callbacks.get(BEFORE, {"data": None})
    if kept["data"] == data:
        return DocumentScores.read(kept["scores"])
    if state.global_step:
        console.print("the metrics before training will be those of the checkpoint", soft_wrap=True)
    console.print("scoring the held-out data, before training", soft_wrap=True)
    found = score(job, trainer, parts)
    if found is not None and not state.global_step:
        state.stateful_callbacks[BEFORE] = {"data": data, "scores": found.as_dict()}
    return found


def _kernel_report(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> str:
    """Return which kernels really run, found by one forward on a training row."""
    if is_sharded(trainer):
        return "attention: not checked, because the weights are sharded"
    device = input_device(trainer.model)
    inputs = {name: value.to(device) for name, value in job.kind.example_inputs(parts).items()}
    return kernel_line(trainer.model, inputs, training_precision(trainer))


def score(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> Optional[DocumentScores]:
    """Return held-out scores. The other ranks wait for the first, which reports the metrics; with sharded weights all
    ranks do the same work."""
    if parts.data.eval is None:
        return None
    if is_sharded(trainer):
        return _scores(job, trainer, parts)
    with trainer.accelerator.main_process_first():
        return _scores(job, trainer, parts) if is_main_process() else None


def _scores(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> DocumentScores:
    with training_precision(trainer):
        return job.kind.score(trainer.model, parts)
