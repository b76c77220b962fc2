"""From settings to a trained run directory: the implementation of ``scripts/train.py``.

Everything that can fail for a reason that the user can fix is tried before the run directory exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from accelerate.utils import patch_environment
from rich.console import Console
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from scu_trainer.errors import RUN_AGAIN, Stopped, StorageError
from scu_trainer.models.loading.adapters import active_config, changes_base_weights
from scu_trainer.models.loading.safety import refuse_pickle
from scu_trainer.run_files import RunStatus, read_object, require_writable, write_json
from scu_trainer.safe_paths import require_own_folder
from scu_trainer.settings.base import as_typed, check_values
from scu_trainer.settings.safety import default_save_steps
from scu_trainer.settings.stock import ALLOWED, CHECKED_BY_PREFLIGHT, effective_data_seed
from scu_trainer.train.checkpoints.compatibility import check_compatibility, digest_of_weights
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job, is_main_process
from scu_trainer.train.memory_estimate.record import predict_run
from scu_trainer.train.preflight import Finding, before_loading, before_training, report
from scu_trainer.train.preflight.length import interval
from scu_trainer.train.run_directory.directory_lock import RunDirectoryLock, from_first_rank, require_equal_ranks
from scu_trainer.train.run_directory.layout import git_commit, hardware, versions
from scu_trainer.train.run_directory.logs import RunLog, run_log
from scu_trainer.train.run_directory.resume import ASKED_FOR, START_NUMBER, Start, next_start_number
from scu_trainer.train.session.building import build_trainer
from scu_trainer.train.session.stopping import StopRequest
from scu_trainer.train.session.training import train
from scu_trainer.train.step.distributed.deepspeed_rules import check_checkpoint
from scu_trainer.train.step.distributed.launched import end_with_launcher, is_launched, lost_ranks_reported

logger = logging.getLogger("scu_trainer")


def run(job: Job, console: Optional[Console] = None, log: Optional[RunLog] = None) -> dict[str, Any]:
    """Train, evaluate before and after, and write the run directory. Returns the content of scu_metrics.json.

    log: a log that ``run_log`` began earlier, to keep what libraries logged while the settings were read. Raises a
    UserError, before anything is written, if the settings, the data, the model or the disk are not suitable.
    """
    with run_log() if log is None else contextlib.nullcontext(log) as own_log:
        return _run(job, console or console_of_run(), own_log)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Continue without output where rich would exit, because the run matters more than its lines."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logger.warning("the reader of the output (a pipe such as head or less) has ended; the run continues without it")


def console_of_run() -> Console:
    """Return the console, quiet on all ranks but the main process. No markup, because file names may contain it."""
    return _Screen(highlight=False, markup=False, quiet=not is_main_process())


def look_only(job: Job) -> None:
    """``--preflight_only``: load and check everything, but train and write nothing. Raises a UserError."""
    console = console_of_run()
    early = _check_before_loading(job, console)
    parts = _load(job, console)
    _run_preflight(job, parts, early, Path(job.training.output_dir), console)


@lost_ranks_reported()
def _check_before_loading(job: Job, console: Console) -> list[Finding]:
    """Check everything that can be refused, or found by preflight, before anything is loaded."""
    job.check()
    job.require_one_gpu()
    for note in job.notes:
        console.print(note, soft_wrap=True)
    require_own_folder(job.training.output_dir)
    require_writable(job.training.output_dir)
    # First, because settings decide on collective calls. A scaled fp16 gradient cannot be averaged with others.
    scaled = {"fp16 (mixed_precision: fp16 or no settles it)": job.training.fp16}
    require_equal_ranks({**job.as_dict(), **scaled}, job.training)
    early = [] if job.safety.preflight == "off" else from_first_rank(lambda: before_loading(job), job.training)
    if any(finding.level == "error" for finding in early) and job.safety.preflight == "stop":
        report(early, console, "stop")
    check_values(type(job.training), vars(job.training), {**ALLOWED, **CHECKED_BY_PREFLIGHT})
    return early


@lost_ranks_reported()
def _load(job: Job, console: Console) -> TrainingComponents:
    """Load data and model. The length of the run, now known, also decides how often it saves, unless that was set."""
    parts, training = job.kind.load(job, console), job.training
    rows, held_out = (len(data) if has_length(data) else None for data in (parts.data.train, parts.data.eval))
    require_equal_ranks({"training rows": rows, "held-out rows": held_out}, training)
    if rows is not None:
        job.check_rows(rows)
    if job.saves_by_length:
        training.save_steps = default_save_steps(training.max_steps if rows is None else job.planned_steps(rows))
    return parts


def _run_preflight(
    job: Job, parts: TrainingComponents, early: list[Finding], output_dir: Path, console: Console
) -> list[Finding]:
    if job.safety.preflight == "off":
        return []
    found = [*early, *from_first_rank(lambda: before_training(job, parts, output_dir), job.training)]
    report(found, console, job.safety.preflight)
    return found


def _run(job: Job, console: Console, log: RunLog) -> dict[str, Any]:
    end_with_launcher()
    if job.training.log_level != "passive":  # for the console, as in every training script with transformers
        log.show(job.training.get_process_log_level())
    early = _check_before_loading(job, console)
    configuration = job.as_dict()  # as the user gave it: loading changes some of it
    own = configuration if job.safety.resume else None
    with lost_ranks_reported(), RunDirectoryLock(job.training, own, job.safety.weights_only) as lock:
        start = lock.start
        if start.line:
            console.print(start.line, soft_wrap=True)
        if start.is_done:
            return read_object(start.output_dir / "scu_metrics.json")
        parts = _load(job, console)
        description = _description(job, parts, configuration)  # before preflight, which reads and counts stream rows
        findings = _run_preflight(job, parts, early, start.output_dir, console)
        description["preflight"] = [finding.as_dict() for finding in findings]
        _check_checkpoint(job, start, description, console)
        job.training.output_dir = str(start.output_dir)
        taken_over = TakeOverCallback(lambda: _take_over(job, description, lock, console))
        request = StopRequest(job.safety.grace_period_s, is_launched())
        # lost_ranks_reported is entered here too, because run.json records the error from inside.
        with (
            _run_directory(job, start, taken_over, log) as status,
            patch_environment(TENSORBOARD_LOGGING_DIR=f"{start.output_dir}/logs/tensorboard"),
            request.listening(),
            lost_ranks_reported(),
        ):
            foreseen = predict_run(job, parts)
            if job.efficiency.predict_memory:
                console.print(foreseen.line, soft_wrap=True)
            trainer = build_trainer(job, parts, status, console)
            trainer.checkpoints.facts = description
            trainer.add_callback(taken_over)
            if foreseen.first_tokens is not None:  # only with memory control
                trainer.micro_batches.loop.first_cap_tokens = foreseen.first_tokens
            return train(job, parts, start, trainer, request, status, console, foreseen)


def _check_checkpoint(job: Job, start: Start, description: dict[str, Any], console: Console) -> None:
    """Check the checkpoint of ``start``, on rank 0 before the description of this start replaces the previous one."""
    if start.checkpoint is None:
        return
    checkpoint = Path(str(start.checkpoint))
    is_own = checkpoint.resolve().parent == start.output_dir.resolve()
    refuse_pickle(checkpoint, allow=job.model.allow_pickle or is_own)
    has_plan = job.acting_curriculum is not None
    found = from_first_rank(lambda: check_compatibility(checkpoint, description, has_plan), job.training)
    check_checkpoint(checkpoint, job.training, job.safety.weights_only)
    # The values that the checkpoint carries stay in effect, so the description must show them.
    description["configuration"] |= {change.name: change.before for change in found if change.is_carried}
    for change in found:
        console.print(f"changed since {checkpoint.name}: {change.line}", soft_wrap=True)
    for line in _kept_intervals(checkpoint, job.training):
        console.print(line, soft_wrap=True)


def _kept_intervals(checkpoint: Path, training: TrainingArguments) -> Iterator[str]:
    """Yield a line for each interval of the settings that has no effect: transformers saves, evaluates and logs as
    often as the checkpoint says, and reports that only in the log file."""
    state = read_object(checkpoint / "trainer_state.json")
    for event in ("save", "eval", "logging"):
        name, before = f"{event}_steps", state.get(f"{event}_steps")
        requested = getattr(training, name)
        if as_typed(getattr(training, f"{event}_strategy")) != "steps" or not before or requested is None:
            continue
        now = interval(requested, state.get("max_steps") or 0)
        if now != before:
            yield f"{name} stays {before:g} and does not become {now:,}: a run keeps the intervals of its checkpoint"


# -- the run directory -------------------------------------------------------------------------------------------------


class TakeOverCallback(TrainerCallback):
    """Does what a resumed run cannot undo, once its checkpoint has been read. If the resume is refused before that,
    such as for other data, the run directory stays as it was, and its own command still resumes the run."""

    def __init__(self, take_over: Callable[[], None]) -> None:
        self._take_over: Optional[Callable[[], None]] = take_over

    def on_train_begin(self, args, state, control, **kwargs):
        self.take_over_now()

    def take_over_now(self) -> None:
        take_over, self._take_over = self._take_over, None
        if take_over is not None:
            take_over()


def _take_over(job: Job, description: dict[str, Any], lock: RunDirectoryLock, console: Console) -> None:
    if renamed := lock.put_aside():
        console.print(
            f"put aside, because this run resumes from an earlier checkpoint: {', '.join(renamed)}", soft_wrap=True
        )
    if is_main_process():
        write_json(Path(job.training.output_dir) / "training_config.json", description)


@contextlib.contextmanager
def _run_directory(job: Job, start: Start, taken_over: TakeOverCallback, log: RunLog) -> Iterator[Optional[RunStatus]]:
    """Create the run directory and describe the run in it; however the run ends, leave its status correct. Yields None
    on all ranks but the first."""
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
            taken_over.take_over_now()
        yield status
        status.update(status="finished", eta_s=0.0)
    except Stopped:
        _update_at_end(status, status="stopped", eta_s=None)
        raise
    except KeyboardInterrupt:
        _update_at_end(status, status="stopped", error=f"ended at once; {RUN_AGAIN}")
        raise
    except BaseException as error:
        _update_at_end(status, status="failed", error=f"{type(error).__name__}: {error}")
        raise


def _update_at_end(run_json: RunStatus, **changes: Any) -> None:
    """Update run.json. A full disk must not hide why the run ended."""
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
        "split_seed": effective_data_seed(job.training),
        "world_size": job.training.world_size,
        "data": {"fingerprint": parts.data.fingerprint, **parts.data.statistics.as_dict()},
        "weights": _digests_of_fixed_weights(parts),
        "hardware": hardware(job.training.device),
        "changed_from": job.changed_from,
    }


def _digests_of_fixed_weights(parts: TrainingComponents) -> dict[str, Optional[str]]:
    """Return digests of the weights that no checkpoint holds: those of the base under an adapter, and of a teacher.
    What PiSSA and its like leave of a layer is excluded: its rounding depends on the device and the number of
    threads."""
    adapter = active_config(parts.model)
    excluded = ".base_layer." if changes_base_weights(adapter) else None
    base = [
        weight
        for name, weight in parts.model.named_parameters()
        if adapter is not None and not weight.requires_grad and (excluded is None or excluded not in name)
    ]
    teacher = [] if parts.teacher is None else parts.teacher.parameters()
    return {"base": digest_of_weights(base), "teacher": digest_of_weights(teacher)}
