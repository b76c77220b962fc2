"""``scu-trainer plan``: predicts how much memory a job needs, and finds the fastest settings with which it fits."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.configuration import naming_file, read_job, read_values, typed_entries
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import guarded, preserved_environment
from scu_trainer.cli.names.translation import as_flags, without
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.planning import screen as plan_screen
from scu_trainer.cli.planning.accuracy import accuracy
from scu_trainer.errors import DataError, ModelError, SettingsError, UserError
from scu_trainer.hardware.estimate import MARGIN, OVERHEAD
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.hardware.optimizer_bytes import uncounted_state
from scu_trainer.hardware.precision import DeviceFacts
from scu_trainer.hardware.presets import PlanTarget, here, named, parse_bytes
from scu_trainer.hardware.recommend import AvailableChanges, SettingChoice, choices
from scu_trainer.imports import without_collector
from scu_trainer.models.loading.names import base_of, with_adapter_as_model
from scu_trainer.run_files import format_bytes
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.shipped import recipe
from scu_trainer.train.run_directory.logs import run_log

if TYPE_CHECKING:
    from scu_trainer.train.job.job import Job
    from scu_trainer.train.memory_estimate.plan import Planned, Source

logger = logging.getLogger("scu_trainer")

DESCRIPTION = """\
Predicts the peak memory of a training run from shapes, without reading weights, and looks for the fastest settings
with which it fits a machine. Flags of `scu-trainer train` are accepted as well. Nothing is trained."""

MOST_FASTER_CHOICES = 2
"""At most this many faster choices, which change the result more, are listed after the first that fits."""

DECODED_PER_BATCH, WORKERS_BESIDE_GPU = ("image-classification", "sensor-classification"), 4
"""Tasks that decode and augment rows for each batch, and the number of worker processes for that if training is on a
GPU. On a CPU they would take cores from training. Tokens need no workers."""

CLEARLY_FASTER = 0.9
"""A choice counts as faster below this share of the other's time, because relative times are rough."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer plan", description=DESCRIPTION)
    parser.add_argument(
        "--config", type=recipe, help="YAML or JSON file of the job; default: the defaults of scu-trainer train"
    )
    parser.add_argument("--gpu", help='plan for this GPU, such as "RTX 3050 4GB", or cpu-only; default: this machine')
    parser.add_argument("--ram", help="main memory of that machine, such as 16GB; default: what such a machine has")
    parser.add_argument("--here", action="store_true", help="plan for this machine as it is now (the default)")
    parser.add_argument("--limit", help="memory that training may use, such as 6GB; default: what is free")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the job with these settings, for --config to read; hardware config: optimal_config.yaml",
    )
    parser.add_argument(
        "--accuracy",
        nargs="?",
        const="runs",
        metavar="FOLDER",
        help="compare the predictions of the runs in FOLDER (default: runs) with the measured peaks, and stop",
    )
    return parser


@guarded
def main(argv: list[str]) -> int:
    options, flags = parse_with_fields(_parser(), argv)
    if options.accuracy is not None:
        without_others = _parser().parse_args(["--accuracy", options.accuracy, *(["--json"] if options.json else [])])
        if flags or options != without_others:
            raise SettingsError("--accuracy compares existing runs and takes no other option than --json")
        return accuracy(Path(options.accuracy), options.json)
    if options.here and (options.gpu or options.ram):
        raise SettingsError("--here means this machine, but --gpu or --ram describes another one; keep one of them")
    if options.output is not None:
        plan_screen.check_output_path(options.output)
    with without_collector(freeze=True), run_log():
        return _plan(options, flags)


def _plan(options: argparse.Namespace, flags: list[str]) -> int:
    from scu_trainer.train.memory_estimate.plan import divided_by_zero3

    target = _target_of(options, flags)
    job = _job_to_plan(options.config, flags, target)
    _warn_of_missing_data(job)
    target = limited_target(target, options.limit, job)
    source = source_of(job, target)
    facts = None if target.is_here else target.facts
    tried = choices_to_report(source, job, target, lambda settings: is_accepted(options.config, flags, settings, facts))
    best = next((planned for planned in tried if planned.fits), None)
    report = {
        "machine": target.name,
        "device": target.device,
        "limit_bytes": target.limit_bytes,
        "margin": MARGIN,
        # Memory control shrinks micro-batches until they fit; without it they keep their size.
        "fits": tried[0].fits and (job.memory.memory_control or tried[0].step == tried[0].whole),
        "predicted": {**tried[0].as_asked.as_dict(), **plan_screen.micro_batch(tried[0].whole)},
        "not_counted": [text for text in (uncounted_state(tried[0].choice.optim), divided_by_zero3(job)) if text],
        "choices": [plan_screen.as_dict(planned, tried[0], target.device) for planned in tried],
        "recommended": None if best is None else settings_of(best, tried[0], job, target.device),
    }
    if best is not None and options.limit is not None and job.memory.memory_control:
        # Training does not know about --limit: memory control would use all free memory.
        limit_gb = round((target.limit_bytes + _held_bytes(target)) / 2**30, 3)
        if limit_gb < (job.memory.memory_limit_gb or math.inf):
            report["recommended"]["memory_limit_gb"] = limit_gb
    words = [*([] if options.config is None else ["--config", options.config]), *flags]
    print(json.dumps(report, indent=2) if options.json else plan_screen.screen(report, words))
    if best is None:
        return 2
    if options.output is not None:
        _write_configuration(options, flags, report, job)
    return 0


def _write_configuration(options: argparse.Namespace, flags: list[str], report: dict[str, Any], job: Job) -> None:
    precision = job.model.mixed_precision, job.notes[0].removeprefix("precision: ")
    plan_screen.write(options.output, typed_entries(options.config, flags), report, precision)
    print(f"\nwritten: {options.output}", file=sys.stderr if options.json else sys.stdout)


# -- the job and the machine -------------------------------------------------------------------------------------------


def _target_of(options: argparse.Namespace, flags: Sequence[str]) -> PlanTarget:
    if options.gpu or options.ram:
        return named(options.gpu, options.ram)
    return here(bool(read_values(options.config, flags)["use_cpu"]))


def _job_to_plan(config: Optional[str], flags: Sequence[str], target: PlanTarget) -> Job:
    job = read_job(config, flags, None if target.is_here else target.facts)
    with naming_file(config, flags):
        job.check_machine_independent()
    if job.data.streaming and job.kind.name != "text-generation":
        raise SettingsError("the rows of a stream are not known in advance; set streaming: false to plan")
    return job


def _warn_of_missing_data(job: Job) -> None:
    """Warn about a missing dataset. A plan reads no text, so a misspelled path would only show when training starts."""
    from scu_trainer.data.sources import require_existing_path

    names = [*dataset_names(job.data.dataset), *dataset_names(job.data.eval_dataset)]
    for name in names if job.kind.name == "text-generation" else ():
        try:
            require_existing_path(name)
        except (DataError, OSError) as error:  # also for a path without permission, which a plan does not need
            logger.warning("%s; a plan needs no data, but train needs them", error)


def limited_target(target: PlanTarget, text: Optional[str], job: Job) -> PlanTarget:
    """Return ``target`` with the limit that was typed, or with the lower of its own limit and ``memory_limit_gb``. On a
    CPU, the latter is for the whole process, while a prediction is for what training adds to it."""
    limit_gb = job.memory.memory_limit_gb
    if text is not None or limit_gb is None:
        return target.limited(None if text is None else parse_bytes(text, "limit"))
    held_bytes = _held_bytes(target)
    left_bytes = max(0, round(limit_gb * 2**30) - held_bytes)
    if left_bytes >= target.limit_bytes:
        return target
    less = f", less the {format_bytes(held_bytes)} that a process holds without a model" if held_bytes else ""
    return replace(target.limited(left_bytes), name=f"{target.name} (memory_limit_gb{less})")


def _held_bytes(target: PlanTarget) -> int:
    """Return the bytes that a process without a model already holds in the memory that ``target`` trains in."""
    import psutil

    return psutil.Process().memory_info().rss if target.device == "cpu" else 0


def source_of(job: Job, target: PlanTarget) -> Source:
    from scu_trainer.train.memory_estimate.plan import FromConfiguration, FromParts
    from scu_trainer.train.step.distributed.deepspeed_start import models_kept_whole

    if job.efficiency.keep_freed_memory and target.device == "cpu":
        keep_freed()  # as in training, so that the heap is measured in the same state
    if job.kind.name == "text-generation":
        job = replace(job, model=with_adapter_as_model(job.model))
        return FromConfiguration(job, _configuration(job), target.device)
    from rich.console import Console

    with models_kept_whole(job.training):
        return FromParts(job, job.kind.load(job, Console(quiet=True)), target.device)


def _configuration(job: Job) -> Any:
    """Read the configuration of the model to tune, no weights. Raises ModelError, also if training would refuse it."""
    from scu_trainer.models.embedded import base_config
    from scu_trainer.models.loading.causal import require_causal
    from scu_trainer.models.loading.load import config_of, has_loadable_weights, load_tokenizer
    from scu_trainer.models.quantize import BITSANDBYTES, is_stored_quantized, stored_quantization

    model = job.model
    if model.model_name_or_path is None:
        return base_config(2048, 0, 1, 2)
    config, name = config_of(model), base_of(model.model_name_or_path)
    if getattr(config, "architectures", None):  # those of trained weights name the head; a bare configuration may not
        require_causal(config, name)
    if Path(name).is_dir():  # for a Hub id nothing more is downloaded
        if not has_loadable_weights(model):
            logger.warning("%s holds no weights: a plan needs none, but train needs them, and a tokenizer", name)
        else:
            load_tokenizer(model)
    if model.tuning == "qlora":
        is_stored_quantized(model, config)
    elif stored := stored_quantization(config):
        method = stored["quant_method"]
        advice = "scu-trainer train --tuning lora says before its first step how much memory that takes"
        if method == BITSANDBYTES:
            advice = "plan with --tuning qlora"
        raise ModelError(
            f"the weights of {name} are stored quantized ({method}), but a plan reads no weights; {advice}, or plan "
            "for the full model"
        )
    return config


# -- the choices -------------------------------------------------------------------------------------------------------


def is_accepted(
    config: Optional[str], flags: Sequence[str], settings: Mapping[str, Any], planned_for: Optional[DeviceFacts] = None
) -> bool:
    """Whether ``train`` accepts the job with ``settings`` in place of typed ones. ``planned_for``: see ``read_job``."""
    from scu_trainer.train.step.distributed.deepspeed_start import process_group_kept

    try:
        with preserved_environment(), process_group_kept():  # settings with DeepSpeed create one
            read_job(config, [*without(flags, settings), *as_flags(settings)], planned_for).check_machine_independent()
    except UserError:
        return False
    return True


def choices_to_report(
    source: Source, job: Job, target: PlanTarget, accepts: Callable[[Mapping[str, Any]], bool]
) -> list[Planned]:
    """Return the requested choice, then choices that need less memory, up to the first that fits, then those that fit
    and are clearly faster than all before. ``accepts``: whether the job can be trained with other settings."""
    from scu_trainer.train.memory_estimate.plan import choice_of

    requested = choice_of(job)
    candidates: list[Planned] = []
    too_large: set[tuple] = set()
    fastest, faster_count, lowest_bytes = math.inf, 0, math.inf
    is_hopeless = OVERHEAD.get(target.device, OVERHEAD["cpu"]).fixed_bytes > target.limit_bytes
    for choice in choices(requested, means(source, job, target), target.device)[: 1 if is_hopeless else None]:
        time = choice.time(target.device)
        if (
            faster_count == MOST_FASTER_CHOICES
            or time > CLEARLY_FASTER * fastest
            or _lasting_settings(choice) in too_large
        ):
            continue
        settings = choice.settings(requested)
        if settings and not accepts(settings):
            continue
        candidate = planned_choice(source, choice, requested, job, target)
        if candidate is None:
            continue
        if candidate.estimate.lasting_bytes > target.limit_bytes:
            too_large.add(_lasting_settings(choice))
        if candidate.fits or candidate.estimate.peak_bytes < lowest_bytes:
            candidates.append(candidate)
            faster_count += fastest < math.inf
        lowest_bytes = min(lowest_bytes, candidate.estimate.peak_bytes)
        if candidate.fits:
            fastest, lowest_bytes = time, 0
    return candidates


def planned_choice(
    source: Source, choice: SettingChoice, requested: SettingChoice, job: Job, target: PlanTarget
) -> Optional[Planned]:
    """Predict a choice. Returns None if the model's code fails with it; raises ModelError if it is ``requested``."""
    from scu_trainer.train.memory_estimate.plan import planned
    from scu_trainer.train.step.distributed.deepspeed_start import models_kept_whole
    from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

    try:
        with models_kept_whole(job.training):
            return planned(source, choice, target.limit_bytes, job.memory.min_batch_size)
    except Exception as error:  # the model's code may raise anything for tensors without data
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        if choice != requested:
            return None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{job.model.model_name_or_path} cannot be predicted, because its code fails without data: {reason}; "
            "measure it instead: scu-trainer variants"
        ) from error


def _lasting_settings(choice: SettingChoice) -> tuple:
    """Return the settings that determine the bytes that do not depend on the micro-batch."""
    return choice.tuning, choice.load_in_8bit, choice.dtype, choice.optim, choice.offload


def means(source: Source, job: Job, target: PlanTarget) -> Any:
    is_text = job.kind.name == "text-generation"
    return AvailableChanges(
        half=target.half,
        stored_half=is_text and source.stored_dtype in ("bfloat16", "float16"),
        adapters=is_text and not source.is_quantized,
        bitsandbytes=target.device in ("cpu", "cuda") and importlib.util.find_spec("bitsandbytes") is not None,
        offloading=target.device == "cuda" and is_text and importlib.util.find_spec("deepspeed") is not None,
    )


def settings_of(planned: Planned, requested: Planned, job: Job, device: str) -> dict[str, Any]:
    """Return the settings that turn the requested job into ``planned``."""
    settings = planned.choice.settings(requested.choice)
    if planned.step.rows < planned.whole.rows and not job.memory.memory_control:
        settings["token_cap"] = planned.step.tokens
    if device == "cuda" and job.kind.name in DECODED_PER_BATCH and job.training.dataloader_num_workers == 0:
        settings["dataloader_num_workers"] = WORKERS_BESIDE_GPU
    return settings
