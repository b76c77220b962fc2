"""``tuning_path: auto``: picks how the weights of a job are held on this machine, and falls back if that fails.

The planner finds what fits and changes the result least. Weights that do not fit in any way are kept in main memory and
on disk. If a path cannot hold one row in its first step, the next one is tried; nothing was trained yet, so nothing is
lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.names.translation import as_flags, without
from scu_trainer.cli.planning.plan import is_accepted, limited_target, means, planned_choice, source_of
from scu_trainer.errors import OutOfMemory, RequirementError
from scu_trainer.hardware.presets import here
from scu_trainer.hardware.recommend import ROUNDING, choices
from scu_trainer.run_files import format_bytes, read_object
from scu_trainer.settings.base import as_typed
from scu_trainer.train.run_directory.resume import latest_run
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from scu_trainer.train.job.job import Job

AUTO = "auto"
PATH_FIELDS = ("tuning", "load_in_8bit", "dtype", "mixed_precision", "checkpoint_every_layer", "deepspeed")
OFFLOADED = {"device_map": AUTO, "checkpoint_every_layer": True}


def train_on_a_path(config: Optional[str], flags: Sequence[str], job: Job, train: Callable[[Job], None]) -> Job:
    """Train ``job`` on the first path that can hold it, and return the job with the settings of that path. Raises
    OutOfMemory if even the last path cannot hold one row, and anything that ``train`` raises."""
    if job.training.world_size > 1:
        raise RequirementError(
            "tuning_path: auto works for one process; run scu-trainer plan, and give its settings to the launcher"
        )
    failure: Optional[str] = None
    for settings, reason in _paths(config, flags, job):
        chosen = _job_with(config, flags, settings, reason if failure is None else f"{failure}; now {reason}")
        if failure is not None and not (job.training.resume_from_checkpoint or job.training.save_only_model):
            chosen.training.resume_from_checkpoint = AUTO  # use the folder of the failed attempt, which has no steps
        try:
            train(chosen)
            return chosen
        except Exception as error:
            if not _failed_before_first_step(error, job):
                raise
            failure = f"{_described(settings)} could not hold one row: {' '.join(str(error).split())[:200]}"
        gc.collect()
    raise OutOfMemory(
        "tuning_path: auto found no way to fit a single row here: "
        f"{failure or 'nothing that leaves the result unchanged fits'}; a "
        "shorter block_size, tuning: lora, or a smaller model takes less (scu-trainer plan shows how much)"
    )


def _paths(config: Optional[str], flags: Sequence[str], job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (settings, reason) of each path to try. Each path needs less memory than the one before."""
    unfinished = _settings_of_unfinished_run(job)
    if unfinished is not None:
        yield unfinished, "as this run was started"
        return
    yield from _planned_paths(config, flags, job)
    if job.kind.name == "text-generation" and job.model.tuning != "full" and job.model.device_map is None:
        folder = str(Path(job.training.output_dir) / "offload")
        yield {**OFFLOADED, "offload_folder": folder}, "weights are kept in main memory and, if that is full, on disk"


def _planned_paths(config: Optional[str], flags: Sequence[str], job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    from scu_trainer.train.memory_estimate.plan import choice_of

    target = limited_target(here(job.training.use_cpu), None, job)
    source, requested, smallest = source_of(job, target), choice_of(job), None
    for choice in choices(requested, means(source, job, target), target.device):
        settings = choice.settings(requested)
        if choice.change(requested) > ROUNDING or (settings and not is_accepted(config, flags, settings)):
            continue
        planned = planned_choice(source, choice, requested, job, target)
        if planned is None or not planned.fits:
            continue
        estimate = planned.estimate
        # A path must take less at the peak, or less memory that does not depend on the micro-batch.
        if smallest and estimate.peak_bytes >= smallest.peak_bytes and estimate.lasting_bytes >= smallest.lasting_bytes:
            continue
        smallest = estimate
        yield settings, f"predicted {format_bytes(smallest.peak_bytes)} of {format_bytes(target.limit_bytes)}"


def _settings_of_unfinished_run(job: Job) -> Optional[dict[str, Any]]:
    """Return the settings of an unfinished run in ``output_dir``, so that the same command resumes it; or None."""
    run = latest_run(Path(job.training.output_dir)) if job.safety.resume else None
    if run is None or read_object(run / "run.json").get("status") == "finished" or not any(run.glob("checkpoint-*")):
        return None
    configuration = read_object(run / "training_config.json").get("configuration", {})
    if configuration.get("tuning_path") != AUTO:
        return None
    names = (*PATH_FIELDS, *OFFLOADED, "offload_folder")
    return {name: configuration[name] for name in names if configuration.get(name) is not None}


def _job_with(config: Optional[str], flags: Sequence[str], settings: Mapping[str, Any], reason: str) -> Job:
    job = read_job(config, [*without(flags, settings), *as_flags(settings)])
    job.notes = (*job.notes, f"tuning_path: {_described(settings)} ({reason})")
    return job


def _described(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {as_typed(value)}" for name, value in settings.items()) or "as asked"


def _failed_before_first_step(error: Exception, job: Job) -> bool:
    """Whether memory ran out before the first step was done: in loading, in the first evaluation, or in that step."""
    if isinstance(error, OutOfMemory) and error.steps_done is not None:
        return error.steps_done == 0
    if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
        return False
    run = latest_run(Path(job.training.output_dir))
    return run is None or read_object(run / "run.json").get("step") is None
