"""Builds the plan of a comparison from the command line, with every arm resolved and checked before anything runs."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.configuration import as_yaml, json_values, read_job, read_values
from scu_trainer.cli.main import preserved_environment
from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.translation import flags_of, translated
from scu_trainer.errors import SettingsError, UserError, did_you_mean
from scu_trainer.hardware.probe import ram_bytes, usable_cores
from scu_trainer.runs import room
from scu_trainer.runs.studies.comparison_arms import DEFAULT_ARMS, Arm, chosen_arms
from scu_trainer.runs.studies.comparison_plan import (
    ComparisonPlan,
    check_comparable,
    check_equal_budget,
    check_steers,
    differences,
)

BYTES_PER_JOB = 4 * 2**30
"""Main memory reserved for each run if --jobs is not given."""

SET_BY_COMPARISON = {
    "scu": "arms turn the loop on and off: choose with --arms",
    "scu_law": "arms choose the law: choose with --arms",
    "seed": "each run has its own: give --seeds",
    "resume_from_checkpoint": "runs resume automatically; drop it",
}
"""Fields of the training command that a comparison sets itself, and what to type instead."""

SET_FOR_EACH_RUN = {
    "seed": SET_BY_COMPARISON["seed"],
    "resume_from_checkpoint": SET_BY_COMPARISON["resume_from_checkpoint"],
    "output_dir": "each run has its own below --output_dir; drop it",
}
"""Fields that an arm cannot set either, because they differ between its runs."""


def check_words(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Check the command line, and replace the words of ``options.seeds`` by numbers. Raises SettingsError."""
    if options.config is None:
        raise SettingsError("--config is missing: give the YAML or JSON file of the job, or --table FOLDER")
    for typed, _ in flags_of(translated(flags, known_names())[0]):
        name = typed.removeprefix("no_")
        if name in SET_BY_COMPARISON:
            raise SettingsError(f"--{typed} is set by the comparison: {SET_BY_COMPARISON[name]}")
    options.seeds = _parse_seeds(options.seeds)
    if not 0.5 <= options.confidence < 1:
        raise SettingsError(f"confidence is {options.confidence:g}; it must be at least 0.5 and below 1, such as 0.95")
    if options.jobs is not None and options.jobs < 1:
        raise SettingsError(f"jobs is {options.jobs}; it must be 1 or more")
    if "WORLD_SIZE" in os.environ:
        raise SettingsError(
            "compare starts its runs itself and needs no launcher; type scu-trainer compare without one"
        )


def _parse_seeds(words: Sequence[str]) -> list[int]:
    """Return the seeds, which may be separated by commas or spaces, as arms may be."""
    seeds = [word for text in words for word in text.split(",") if word]
    if not seeds or not all(word.isdecimal() for word in seeds) or len(set(map(int, seeds))) < len(seeds):
        raise SettingsError(f"seeds are {' '.join(words)}; give different whole numbers from 0 on, such as 0 1 2")
    return [int(word) for word in seeds]


def refuse_push(push_to_hub: Any, each: str) -> None:
    """Raise SettingsError if several runs would push to one repository. ``push_to_hub``: the value in a file, flag or
    settings. ``each``: the word for one of the runs, such as seed."""
    if str(push_to_hub).lower() == "true":
        raise SettingsError(
            f"push_to_hub would overwrite each {each} with the next; drop it, and push the run that you want"
        )


def arms_of(options: argparse.Namespace, flags: Sequence[str]) -> list[Arm]:
    words = [word for text in options.arms or DEFAULT_ARMS for word in text.split(",") if word]

    def rate_times_steps() -> Optional[float]:
        values = read_values(options.config, flags)
        return values["learning_rate"] * values["max_steps"] if values["max_steps"] > 0 else None

    arms = chosen_arms(words, options.arm, rate_times_steps)
    for arm in arms:
        for name in arm.settings.keys() & SET_FOR_EACH_RUN.keys():
            raise SettingsError(f"arm {arm.name}: {name} is set by the comparison: {SET_FOR_EACH_RUN[name]}")
    return arms


def reference_of(requested: str, arms: Sequence[Arm]) -> str:
    name, names = requested.replace(":", "_"), [arm.name for arm in arms]
    if name not in names:
        raise SettingsError(
            f"reference {requested!r} is not an arm{did_you_mean(name, names)}; arms: {', '.join(names)}"
        )
    return name


def plan_of(options: argparse.Namespace, flags: Sequence[str], arms: Sequence[Arm], command: str) -> ComparisonPlan:
    """Resolve and check every arm as its training would, and return the plan. Raises UserError before anything runs."""
    folder, resolved, texts = Path(options.output_dir), {}, {}
    for arm in arms:
        overrides = ["--seed", str(options.seeds[0]), "--output_dir", str(folder / "runs" / arm.name)]
        words = [*flags, *arm.flags, *overrides, "--resume_from_checkpoint", "auto"]
        try:
            resolved[arm.name], texts[arm.name] = resolved_settings(options.config, words)
        except UserError as error:
            raise SettingsError(f"arm {arm.name}: {error}") from error
        check_comparable(arm.name, resolved[arm.name])
        check_steers(arm, resolved[arm.name])
    check_equal_budget(resolved)
    return ComparisonPlan(folder, command, options.config, tuple(arms), tuple(options.seeds), 1, resolved, texts)


def resolved_settings(config: Optional[str], words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return all settings of a job, as training writes them to its run directory, and as the YAML that runs read."""
    with preserved_environment():  # reading a job prepares this process, which must not affect the runs that we start
        job = read_job(config, words)
        job.task = replace(job.task, seeds=None)  # each run has one seed
        job.check()
        settings, text = json_values(job.as_dict()), as_yaml(job)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            mismatches = differences(settings, json_values(read_job(file.name, []).as_dict()))
    if mismatches:
        raise SettingsError(f"a configuration file cannot hold these settings unchanged: {'; '.join(mismatches)}")
    return settings, text


def with_threads_and_devices(plan: ComparisonPlan, jobs: Optional[int]) -> tuple[ComparisonPlan, list[str]]:
    """Return the plan with the number of threads per run, and a device for each run that may run at the same time."""
    on_cpu = any(settings.get("use_cpu") for settings in plan.resolved.values())
    gpus = [] if on_cpu else [name for name in room.devices() if name != room.CPU]
    cores = max(1, int(usable_cores()))
    if gpus:
        if jobs is not None and jobs > len(gpus):
            raise SettingsError(f"jobs is {jobs}, but there are {len(gpus)} GPUs, one for each run; lower --jobs")
        devices = gpus[: jobs or len(gpus)]
    else:
        fitting = max(1, min(cores, ram_bytes()[1] // BYTES_PER_JOB, len(plan.runs)))
        devices = [room.CPU] * (jobs or fitting)
    return replace(plan, threads=max(1, cores // len(devices))), devices
