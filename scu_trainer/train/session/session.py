"""From settings to a trained run directory: what ``scripts/train.py`` calls.

Everything that can fail for a reason that the user can mend is tried before the run directory exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import TrainOutput, has_length

from scu_trainer.data.text.mixture_plan import rows_of_others
from scu_trainer.errors import RUN_AGAIN, OutOfMemory, SettingsError, Stopped, StorageError
from scu_trainer.models.kernels import kernel_line
from scu_trainer.models.loading.adapters import active_config, takes_from_base
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.models.loading.safety import refuse_pickle
from scu_trainer.run_files import RunStatus, give_usual_mode, read_json, require_writable, write_json
from scu_trainer.safe_paths import require_own_folder
from scu_trainer.settings import RegularizationSettings
from scu_trainer.settings.base import check_values, plain
from scu_trainer.settings.safety import steps_between_saves
from scu_trainer.settings.stock import ALLOWED, LEFT_TO_PREFLIGHT, seed_of_data
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.checkpoints.compatibility import check_compatibility, digest_of_weights
from scu_trainer.train.checkpoints.writer import written_or_refused
from scu_trainer.train.evaluation.by_source import metrics_by_source
from scu_trainer.train.evaluation.scoring import DocumentScores
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, is_main_process
from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.distillation import Distillation
from scu_trainer.train.loops.throughput import measure_pace
from scu_trainer.train.memory_estimate.record import RunEstimate, prediction
from scu_trainer.train.preflight import Finding, before_loading, before_training, report
from scu_trainer.train.preflight.length import interval
from scu_trainer.train.retention.loop import Retention
from scu_trainer.train.run_directory.console import ConsoleCallback
from scu_trainer.train.run_directory.directory_lock import RunDirectoryLock, from_first_rank, require_alike
from scu_trainer.train.run_directory.layout import RunStatusCallback, git_commit, hardware, versions
from scu_trainer.train.run_directory.log_history import LogHistoryCallback
from scu_trainer.train.run_directory.logs import RunLog, run_log
from scu_trainer.train.run_directory.resume import (
    ASKED_FOR,
    AUTO,
    START_NUMBER,
    Start,
    next_start_number,
    wanted_checkpoint,
)
from scu_trainer.train.session.samples import Samples
from scu_trainer.train.session.stopping import StopCallback, StopRequest
from scu_trainer.train.session.summary import best_held_out, held_out_by_source, held_out_figures, print_table
from scu_trainer.train.step.costs import StepTimes, above_baseline, cost_figures, step_peaks
from scu_trainer.train.step.distributed.deepspeed_rules import check_checkpoint
from scu_trainer.train.step.distributed.deepspeed_start import builds_are_said
from scu_trainer.train.step.distributed.launched import end_with_launcher, is_launched, lost_ranks_said
from scu_trainer.train.step.distributed.sharded import Beforehand, is_sharded, training_precision
from scu_trainer.train.step.recovery.snapshot import variable
from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")

STOCK = ("transformers", "accelerate")


def run(job: Job, console: Optional[Console] = None, log: Optional[RunLog] = None) -> dict[str, Any]:
    """Train, evaluate before and after, write the run directory. Returns the figures of scu_metrics.json.

    ``log``: one that ``run_log`` has begun earlier, to keep what libraries said while the settings were read.

    Raises a UserError before anything is written where the settings, the data, the model or the disk do not fit.
    """
    with run_log() if log is None else contextlib.nullcontext(log) as own_log:
        return _run(job, console or console_of_run(), own_log)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """A run is worth more than its lines: it continues where rich would exit."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logger.warning("the reader of the output is gone (a pipe such as head or less); the run continues without it")


def console_of_run() -> Console:
    """Of the main process alone. Names of files are no markup."""
    return _Screen(highlight=False, markup=False, quiet=not is_main_process())


def look_only(job: Job) -> None:
    """``--preflight_only``: load everything, look at it, train and write nothing. Raises a UserError."""
    console = console_of_run()
    early = _begin(job, console)
    parts = _loaded(job, console)
    _look(job, parts, early, Path(job.training.output_dir), console)


@lost_ranks_said()
def _begin(job: Job, console: Console) -> list[Finding]:
    """What can be refused, or found by preflight, before anything is loaded."""
    job.check()
    job.require_one_gpu()
    for note in job.notes:
        console.print(note, soft_wrap=True)
    require_own_folder(job.training.output_dir)
    require_writable(job.training.output_dir)
    # First, because settings also say what ranks ask each other. A scaled fp16 gradient cannot be averaged with others.
    scaled = {"fp16 (mixed_precision: fp16 or no settles it)": job.training.fp16}
    require_alike({**job.as_dict(), **scaled}, job.training)
    early = [] if job.safety.preflight == "off" else from_first_rank(lambda: before_loading(job), job.training)
    if any(finding.level == "error" for finding in early) and job.safety.preflight == "stop":
        report(early, console, "stop")
    check_values(type(job.training), vars(job.training), {**ALLOWED, **LEFT_TO_PREFLIGHT})
    return early


@lost_ranks_said()
def _loaded(job: Job, console: Console) -> TrainingComponents:
    """Data and model; how long the run is going to be also settles how often it saves, unless that was given."""
    parts, training = job.kind.load(job, console), job.training
    rows = {"training rows": parts.data.train, "held-out rows": parts.data.eval}
    require_alike({name: len(data) if has_length(data) else None for name, data in rows.items()}, training)
    if has_length(parts.data.train):
        job.check_rows(len(parts.data.train))
    if job.saves_by_length:
        train = parts.data.train
        steps = job.planned_steps(len(train)) if has_length(train) else training.max_steps
        training.save_steps = steps_between_saves(steps)
    return parts


def _look(
    job: Job, parts: TrainingComponents, early: list[Finding], output_dir: Path, console: Console
) -> list[Finding]:
    if job.safety.preflight == "off":
        return []
    found = [*early, *from_first_rank(lambda: before_training(job, parts, output_dir), job.training)]
    report(found, console, job.safety.preflight)
    return found


def _run(job: Job, console: Console, log: RunLog) -> dict[str, Any]:
    end_with_launcher()
    if job.training.log_level != "passive":  # of the console, as for every script that trains with transformers
        log.show(job.training.get_process_log_level())
    early = _begin(job, console)
    configuration = job.as_dict()  # as it was asked for: loading settles some of it
    own = configuration if job.safety.resume else None
    with lost_ranks_said(), RunDirectoryLock(job.training, own, job.safety.weights_only) as lock:
        start = lock.start
        if start.line:
            console.print(start.line, soft_wrap=True)
        if start.is_done:
            return read_json(start.output_dir / "scu_metrics.json")
        parts = _loaded(job, console)
        description = _description(job, parts, configuration)  # first: to look at rows of a stream counts them
        findings = _look(job, parts, early, start.output_dir, console)
        description["preflight"] = [finding.as_dict() for finding in findings]
        _look_at_checkpoint(job, start, description, console)
        job.training.output_dir = str(start.output_dir)
        taken_over = TakenOver(lambda: _take_over(job, description, lock, console))
        request = StopRequest(job.safety.grace_period_s, is_launched())
        # Said here too, because run.json takes its error from inside.
        with (
            _run_directory(job, start, taken_over, log) as status,
            variable("TENSORBOARD_LOGGING_DIR", f"{start.output_dir}/logs/tensorboard"),
            request.listening(),
            lost_ranks_said(),
        ):
            foreseen = prediction(job, parts)
            if job.efficiency.predict_memory:
                console.print(foreseen.line, soft_wrap=True)
            trainer = build_trainer(job, parts, status, console)
            trainer.checkpoints.facts = description
            trainer.add_callback(taken_over)
            return _train(job, parts, start, trainer, request, status, console, foreseen)


def _look_at_checkpoint(job: Job, start: Start, description: dict[str, Any], console: Console) -> None:
    """Rank 0 does, before it describes this start in the place of the one before."""
    if start.checkpoint is None:
        return
    checkpoint = Path(str(start.checkpoint))
    is_own = checkpoint.resolve().parent == start.output_dir.resolve()
    refuse_pickle(checkpoint, allow=job.model.allow_pickle or is_own)
    has_plan = job.acting_curriculum is not None
    found = from_first_rank(lambda: check_compatibility(checkpoint, description, has_plan), job.training)
    check_checkpoint(checkpoint, job.training, job.safety.weights_only)
    # What the checkpoint carries is what the run has: its description must not say otherwise.
    description["configuration"] |= {change.name: change.before for change in found if change.is_carried}
    for change in found:
        console.print(f"changed since {checkpoint.name}: {change.line}", soft_wrap=True)
    for line in _kept_rhythm(checkpoint, job.training):
        console.print(line, soft_wrap=True)


def _kept_rhythm(checkpoint: Path, training: TrainingArguments) -> Iterator[str]:
    """transformers saves, evaluates and logs as often as the checkpoint says, and tells the log file alone."""
    state = read_json(checkpoint / "trainer_state.json")
    for what in ("save", "eval", "logging"):
        name, before = f"{what}_steps", state.get(f"{what}_steps")
        asked = getattr(training, name)
        if plain(getattr(training, f"{what}_strategy")) != "steps" or not before or asked is None:
            continue
        now = interval(asked, state.get("max_steps") or 0)
        if now != before:
            yield f"{name} stays {before:g} and does not become {now:,}: a run keeps the rhythm of its checkpoint"


# -- the run directory -------------------------------------------------------------------------------------------------


class TakenOver(TrainerCallback):
    """Does what a run that is resumed cannot go back from once its checkpoint is read: where that is refused, such as
    for other data, the run stays as it was, and its own command resumes it."""

    def __init__(self, take_over: Callable[[], None]) -> None:
        self._take_over: Optional[Callable[[], None]] = take_over

    def on_train_begin(self, args, state, control, **kwargs):
        self.at_once()

    def at_once(self) -> None:
        take_over, self._take_over = self._take_over, None
        if take_over is not None:
            take_over()


def _take_over(job: Job, description: dict[str, Any], lock: RunDirectoryLock, console: Console) -> None:
    if aside := lock.put_aside():
        console.print(
            f"put aside, because this run resumes from an earlier checkpoint: {', '.join(aside)}", soft_wrap=True
        )
    if is_main_process():
        write_json(Path(job.training.output_dir) / "training_config.json", description)


@contextlib.contextmanager
def _run_directory(job: Job, start: Start, taken_over: TakenOver, log: RunLog) -> Iterator[Optional[RunStatus]]:
    """Make it, describe the run in it, and leave its status true however the run ends. None on all ranks but the
    first."""
    output_dir = Path(job.training.output_dir)
    if not is_main_process():
        yield None
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    status = RunStatus(output_dir / "run.json")
    status.update(status="running", pid=os.getpid(), error=None, unit=job.kind.unit)
    log.open(output_dir)
    try:
        if start.checkpoint is None or not (output_dir / "training_config.json").exists():
            taken_over.at_once()
        yield status
        status.update(status="finished", eta_s=0.0)
    except Stopped:
        _last_words(status, status="stopped", eta_s=None)
        raise
    except KeyboardInterrupt:
        _last_words(status, status="stopped", error=f"ended at once; {RUN_AGAIN}")
        raise
    except BaseException as error:
        _last_words(status, status="failed", error=f"{type(error).__name__}: {error}")
        raise


def _last_words(run_json: RunStatus, **changes: Any) -> None:
    """A disk on which they find no room must not hide why the run ended."""
    try:
        run_json.update(**changes)
    except StorageError as error:
        logger.warning("%s", error)


def _description(job: Job, parts: TrainingComponents, configuration: dict[str, Any]) -> dict[str, Any]:
    return {
        "configuration": configuration,
        ASKED_FOR: Path(job.training.output_dir).name,
        START_NUMBER: next_start_number(Path(job.training.output_dir)),
        "versions": versions(),
        "git_commit": git_commit(),
        "seed": job.training.seed,
        "split_seed": seed_of_data(job.training),
        "world_size": job.training.world_size,
        "data": {"fingerprint": parts.data.fingerprint, **parts.data.statistics.as_dict()},
        "weights": _weights_beside(parts),
        "hardware": hardware(job.training.device),
        "changed_from": job.changed_from,
    }


def _weights_beside(parts: TrainingComponents) -> dict[str, Optional[str]]:
    """What tells the weights that no checkpoint holds from others: those of the base under an adapter, of a teacher.
    What PiSSA and its like leave of a layer is rounded as the device and the number of threads have it, and left out.
    """
    adapter = active_config(parts.model)
    odd = ".base_layer." if takes_from_base(adapter) else None
    base = [
        weight
        for name, weight in parts.model.named_parameters()
        if adapter is not None and not weight.requires_grad and (odd is None or odd not in name)
    ]
    teacher = [] if parts.teacher is None else parts.teacher.parameters()
    return {"base": digest_of_weights(base), "teacher": digest_of_weights(teacher)}


# -- training ----------------------------------------------------------------------------------------------------------


def build_trainer(job: Job, parts: TrainingComponents, status: Optional[RunStatus], console: Console) -> SCUTrainer:
    regularization, tokens = _regularization(job, parts), parts.data.statistics.supervised_tokens or None
    with _stock_refusals():
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
    for theirs in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):  # one line for a log, one bar
        trainer.remove_callback(theirs)
    trainer.add_callback(ConsoleCallback(console, job.kind.unit))
    measure_pace(trainer)
    trainer.add_callback(LogHistoryCallback())
    if status is not None:
        trainer.add_callback(RunStatusCallback(status))
    return trainer


def _loops(job: Job, parts: TrainingComponents) -> list[Loop]:
    """Beside those that the settings of the trainer make."""
    loops: list[Loop] = []
    if parts.teacher is not None:
        loops.append(Distillation(parts.teacher, job.model.teacher_weight, job.model.teacher_temperature))
    if parts.anchor is not None:
        loops.append(Retention(parts.anchor, job.retention, parts.collator, parts.load_base, _learned(job, parts)))
    if job.task.task == TEXT and job.data.sample_prompts and parts.data.eval is not None:
        loops.append(Samples(parts.data.eval, parts.processor, job.data.sample_prompts, job.data.sample_max_new_tokens))
    return loops


def own_optimizer(job: Job, model: nn.Module) -> Optional[Optimizer]:
    """LoRA+: two learning rates (Hayou et al. 2024, https://arxiv.org/abs/2402.12354), in the groups of peft; None
    where the stock Trainer makes the optimizer."""
    ratio = job.model.loraplus_lr_ratio
    if ratio is None:
        return None
    from peft.optimizers import create_loraplus_optimizer

    kind, arguments = SCUTrainer.get_optimizer_cls_and_kwargs(job.training, model)
    arguments["loraplus_weight_decay"] = job.training.weight_decay
    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=ratio, **arguments)


def _learned(job: Job, parts: TrainingComponents) -> Any:
    """Held-out rows of what is learned: not of a source that is to be kept."""
    place, held_out = parts.anchor.place, parts.data.eval
    if place is None or held_out is None:
        return held_out
    return rows_of_others(held_out, place, len(job.data.sources))


def _regularization(job: Job, parts: TrainingComponents) -> Optional[RegularizationSettings]:
    """Where retention acts through lambda, it alone moves it."""
    if parts.anchor is None or parts.anchor.replayed is not None:
        return job.regularization
    return replace(job.regularization, law="fixed", lambda_init=0.0)


@contextlib.contextmanager
def _stock_refusals() -> Iterator[None]:
    """What the stock Trainer has against its own arguments is for the one who gave them; our faults stay faults."""
    try:
        yield
    except (ValueError, ImportError) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        if not frames or str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] not in STOCK:
            raise
        raise SettingsError(str(error)) from error


def _of_stream(job: Job, parts: TrainingComponents) -> list[str]:
    """What streaming data turned out to hold; their counts are known when they were read."""
    if job.training.dataloader_num_workers > 0:
        return [
            "streaming: what was read and left out was counted by the loader's workers and is not known here; "
            "dataloader_num_workers: 0 counts it"
        ]
    return parts.data.statistics.lines()


def _train(
    job: Job,
    parts: TrainingComponents,
    start: Start,
    trainer: SCUTrainer,
    request: StopRequest,
    status: Optional[RunStatus],
    console: Console,
    foreseen: RunEstimate,
) -> dict[str, Any]:
    output_dir, times, peaks = Path(job.training.output_dir), StepTimes(), step_peaks(trainer)
    stop = _stoppable(trainer, request, status)
    for watcher in (times, peaks):
        trainer.add_callback(watcher)
    before = Beforehand(trainer, lambda: _before(job, trainer, parts, console))
    if before.is_late and start.checkpoint is not None:
        console.print("the figures before training will be those of the checkpoint", soft_wrap=True)
    outcome = _outcome(trainer, start, console)
    is_stream_read = job.data.streaming and trainer.state.global_step > trainer._initial_global_step
    for line in _of_stream(job, parts) if is_stream_read else ():
        console.print(line, soft_wrap=True)
    if stop.stopped_at is not None:
        raise _stopped(job, trainer, stop.stopped_at, request)
    _save(trainer, output_dir)
    if is_stream_read and is_main_process() and not job.training.dataloader_num_workers:
        _write_what_the_stream_held(trainer, parts, output_dir)
    after = score(job, trainer, parts)
    costs = cost_figures(job.training.device, times, parts.before_model_bytes, peaks)
    figures = {
        "steps": trainer.state.global_step,
        "steps_of_this_start": trainer.state.global_step - trainer._initial_global_step,
        "train_s": outcome.metrics["train_runtime"],
        "item": job.kind.item,
        "unit": job.kind.unit,
        "has_base": job.task.task == TEXT,  # other models get a new head, or start from nothing
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


def _outcome(trainer: SCUTrainer, start: Start, console: Console) -> TrainOutput:
    said = contextlib.nullcontext()
    if trainer.is_deepspeed_enabled:
        said = builds_are_said(lambda line: console.print(line, soft_wrap=True))
    try:
        with said:
            return trainer.train(resume_from_checkpoint=start.checkpoint)
    except OutOfMemory as error:
        error.steps_done = trainer.state.global_step
        raise


def _save(trainer: SCUTrainer, output_dir: Path) -> None:
    """Before the scores, which take a while and change nothing. A push waits for them: the card has them."""
    trainer.before_save()
    with written_or_refused("the trained model"):
        trainer.save_model(_internal_call=True)
        trainer.save_state()
    if is_main_process():
        give_usual_mode(output_dir.iterdir())


def _write_what_the_stream_held(trainer: SCUTrainer, parts: TrainingComponents, output_dir: Path) -> None:
    found = parts.data.statistics.as_dict()
    known = trainer.checkpoints.facts["data"]
    found["formats"] = {**known["formats"], **found["formats"]}  # its last pass may not have come to some
    known |= found
    write_json(output_dir / "training_config.json", trainer.checkpoints.facts)


def _write_figures(
    trainer: SCUTrainer, figures: dict[str, Any], output_dir: Path, status: Optional[RunStatus], console: Console
) -> None:
    """With those of the loops, which are added to ``figures``."""
    for loop in trainer.loops:
        figures |= loop.figures()
    write_json(output_dir / "scu_metrics.json", figures)
    if status is not None:
        notices = [*trainer.checkpoints.notices, *trainer.pushes.notices]
        notices += [notice for loop in trainer.loops for notice in loop.notices]
        status.update(step=trainer.state.global_step, notices=notices)
    lines = [line for loop in trainer.loops for line in loop.lines(figures)]
    print_table(console, figures, output_dir, f"trained {trainer.state.global_step} steps", lines)


def _stoppable(trainer: SCUTrainer, request: StopRequest, status: Optional[RunStatus]) -> StopCallback:
    stop = StopCallback(request, trainer.args.world_size)
    trainer.add_callback(stop)
    if status is not None:
        stop.on_stop = lambda: status.update(status="stopping")
        trainer.checkpoints.before = lambda: _at_step(status, trainer.state.global_step)
        request.on_deadline = lambda: status.update(status="stopped", error="the grace period was over")
    return stop


def _at_step(status: RunStatus, step: int) -> None:
    """A checkpoint past the step of run.json would count as one of an earlier start."""
    status.update(step=step)
    status.flush()


def _stopped(job: Job, trainer: SCUTrainer, step: int, request: StopRequest) -> Exception:
    wanted, newest = f"checkpoint-{step}", trainer.checkpoints.newest
    if newest is None or newest.name != wanted:
        return StorageError(f"stopped at step {step}, but {trainer.checkpoints.notices[-1]}")
    why = request.name or "another rank"
    return Stopped(
        f"stopped by {why} after step {step}: {newest} is complete; run the same command{_more(job, newest)} to resume "
        "from it"
    )


def _more(job: Job, newest: Path) -> str:
    """What the same command needs to resume from ``newest``."""
    wanted, flags = wanted_checkpoint(job.training), []
    starts_elsewhere = not job.safety.resume if wanted is None else wanted not in (True, AUTO)
    if starts_elsewhere:
        flags.append(f"--resume_from_checkpoint {shlex.quote(str(newest))}")
    if job.training.save_only_model and not job.safety.weights_only:
        flags.append("--weights_only true")
    return f" with {' and '.join(flags)}" if flags else ""


def _before(job: Job, trainer: SCUTrainer, parts: TrainingComponents, console: Console) -> Optional[DocumentScores]:
    console.print(_kernels(job, trainer, parts), soft_wrap=True)
    if parts.data.eval is not None:
        console.print("scoring the held-out data, before training", soft_wrap=True)
    return score(job, trainer, parts)


def _kernels(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> str:
    """Which kernels really run, found by one forward on a training row."""
    if is_sharded(trainer):
        return "attention: not checked, because the weights are sharded"
    device = input_device(trainer.model)
    inputs = {name: value.to(device) for name, value in job.kind.example_inputs(parts).items()}
    return kernel_line(trainer.model, inputs, training_precision(trainer))


def score(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> Optional[DocumentScores]:
    """Held-out scores. The other ranks wait for the first, which has the figures to report; where weights are sharded
    all of them do the same work."""
    if parts.data.eval is None:
        return None
    if is_sharded(trainer):
        return _scores(job, trainer, parts)
    with trainer.accelerator.main_process_first():
        return _scores(job, trainer, parts) if is_main_process() else None


def _scores(job: Job, trainer: SCUTrainer, parts: TrainingComponents) -> DocumentScores:
    with training_precision(trainer):
        return job.kind.score(trainer.model, parts)
