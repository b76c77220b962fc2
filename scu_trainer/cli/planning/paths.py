"""``tuning_path: auto``: pick how the weights of a job are held on this machine, and fall back where that fails.

The planner names what fits and changes least; weights that fit nowhere go to main memory and disk. A way that cannot
hold one row in its first step gives way to the next: nothing was trained by then, so nothing is lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.names.translation import as_flags, without
from scu_trainer.cli.planning.plan import is_accepted, limited, means, planned_choice, source_of
from scu_trainer.errors import OutOfMemory, RequirementError
from scu_trainer.hardware.recommend import ROUNDING, choices
from scu_trainer.hardware.target import here
from scu_trainer.run_files import read_json, readable
from scu_trainer.train.run_directory.resume import latest_run
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from scu_trainer.train.job.job import Job

AUTO = "auto"
PATH_FIELDS = ("tuning", "load_in_8bit", "dtype", "mixed_precision", "checkpoint_every_layer", "deepspeed")
OFFLOADED = {"device_map": AUTO, "checkpoint_every_layer": True}


def train_on_a_path(config: Optional[str], flags: Sequence[str], job: Job, train: Callable[[Job], None]) -> Job:
    """Train ``job`` on the first way that holds it. Returns it with the settings that it got.

    Raises OutOfMemory where even the last way cannot hold one row, and what ``train`` raises.
    """
    if job.training.world_size > 1:
        raise RequirementError(
            "tuning_path: auto works for one process; run scu-trainer plan, and give its settings to the launcher"
        )
    failure: Optional[str] = None
    for settings, why in _ways(config, flags, job):
        chosen = _chosen(config, flags, settings, why if failure is None else f"{failure}; now {why}")
        if failure is not None and not (job.training.resume_from_checkpoint or job.training.save_only_model):
            chosen.training.resume_from_checkpoint = AUTO  # into the folder of the one before, which holds no step
        try:
            train(chosen)
            return chosen
        except Exception as error:
            if not _held_no_row(error, job):
                raise
            failure = f"{_named(settings)} could not hold one row: {' '.join(str(error).split())[:200]}"
        gc.collect()
    raise OutOfMemory(
        "tuning_path: auto found no way to fit a single row here: "
        f"{failure or 'nothing that changes no result fits'}; a "
        "shorter block_size, tuning: lora, or a smaller model takes less (scu-trainer plan names them)"
    )


def _ways(config: Optional[str], flags: Sequence[str], job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    """(settings, why), each taking less than the one before."""
    begun = _begun(job)
    if begun is not None:
        yield begun, "as this run was started"
        return
    yield from _planned(config, flags, job)
    if job.kind.name == "text-generation" and job.model.tuning != "full" and job.model.device_map is None:
        folder = str(Path(job.training.output_dir) / "offload")
        yield {**OFFLOADED, "offload_folder": folder}, "weights are kept in main memory and, if that is full, on disk"


def _planned(config: Optional[str], flags: Sequence[str], job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    from scu_trainer.train.memory_estimate.plan import choice_of

    target = limited(here(job.training.use_cpu), None, job)
    source, asked, before = source_of(job, target), choice_of(job), None
    for choice in choices(asked, means(source, job, target), target.device):
        settings = choice.settings(asked)
        if choice.change(asked) > ROUNDING or (settings and not is_accepted(config, flags, settings)):
            continue
        found = planned_choice(source, choice, asked, job, target)
        if found is None or not found.fits:
            continue
        now = found.estimate
        # At the peak, or of what does not depend on the micro-batch.
        if before and now.peak_bytes >= before.peak_bytes and now.lasting_bytes >= before.lasting_bytes:
            continue
        before = now
        yield settings, f"predicted {readable(before.peak_bytes)} of {readable(target.limit_bytes)}"


def _begun(job: Job) -> Optional[dict[str, Any]]:
    """The settings that an unfinished run in ``output_dir`` uses, so that the same command resumes it."""
    run = latest_run(Path(job.training.output_dir)) if job.safety.resume else None
    if run is None or read_json(run / "run.json").get("status") == "finished" or not any(run.glob("checkpoint-*")):
        return None
    configuration = read_json(run / "training_config.json").get("configuration", {})
    if configuration.get("tuning_path") != AUTO:
        return None
    names = (*PATH_FIELDS, *OFFLOADED, "offload_folder")
    return {name: configuration[name] for name in names if configuration.get(name) is not None}


def _chosen(config: Optional[str], flags: Sequence[str], settings: Mapping[str, Any], why: str) -> Job:
    job = read_job(config, [*without(flags, settings), *as_flags(settings)])
    job.notes = (*job.notes, f"tuning_path: {_named(settings)} ({why})")
    return job


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items()) or "as asked"


def _held_no_row(error: Exception, job: Job) -> bool:
    """Whether memory ran out before a step was done: while loading, in the evaluation before, or in the first step."""
    if isinstance(error, OutOfMemory) and error.steps_done is not None:
        return error.steps_done == 0
    if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
        return False
    run = latest_run(Path(job.training.output_dir))
    return run is None or read_json(run / "run.json").get("step") is None
