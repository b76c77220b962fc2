"""``scu-trainer plan``: what a job will take of a machine's memory, and the fastest settings with which it fits."""

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

from scu_trainer.cli.configuration import read_job, read_values, typed_entries
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import environment_kept, guarded
from scu_trainer.cli.names.translation import as_flags, without
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.planning import screen as plan_screen
from scu_trainer.cli.planning.accuracy import accuracy
from scu_trainer.cli.planning.written import check_place, write
from scu_trainer.errors import DataError, ModelError, SettingsError, UserError
from scu_trainer.hardware.estimate import MARGIN, OVERHEAD
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.hardware.optimizer_bytes import uncounted
from scu_trainer.hardware.precision import DeviceFacts
from scu_trainer.hardware.presets import parse_bytes
from scu_trainer.hardware.recommend import Means, SettingChoice, choices
from scu_trainer.hardware.target import Target, here, named
from scu_trainer.imports import without_collector
from scu_trainer.models.loading.names import base_of, with_adapter_as_model
from scu_trainer.run_files import readable
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.shipped import recipe
from scu_trainer.train.run_directory.logs import run_log

if TYPE_CHECKING:
    from scu_trainer.train.job.job import Job
    from scu_trainer.train.memory_estimate.plan import Planned, Source

logger = logging.getLogger("scu_trainer")

DESCRIPTION = """\
Predicts the peak memory of a training run from shapes alone, without reading weights, and looks for the fastest
settings
with which it fits a machine. Flags of `scu-trainer train` are accepted as well. Nothing is trained."""

FASTER_ONES = 2
"""Faster choices that change the result more, listed after the first that fits."""

MADE_WHEN_NEEDED, WORKERS_BESIDE_GPU = ("image-classification", "sensor-classification"), 4
"""Tasks whose rows are decoded and augmented for each batch: beside a GPU, worker processes do that. On a CPU they
would take cores from training; tokens need none."""

CLEARLY_FASTER = 0.9
"""Share of another choice's time that counts as faster: relative times are rough."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer plan", description=DESCRIPTION)
    parser.add_argument(
        "--config", type=recipe, help="YAML or JSON file of the job; default: the defaults of scu-trainer train"
    )
    parser.add_argument("--gpu", help='for a card by name, such as "RTX 3050 4GB", or cpu-only; default: this machine')
    parser.add_argument("--ram", help="main memory of that machine, such as 16GB; default: what such a machine has")
    parser.add_argument("--here", action="store_true", help="for this machine as it is now (the default)")
    parser.add_argument("--limit", help="memory that training may use, such as 6GB; default: what is free")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the job with those settings, to be read by --config; hardware config: optimal_config.yaml",
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
        alone = _parser().parse_args(["--accuracy", options.accuracy, *(["--json"] if options.json else [])])
        if flags or options != alone:
            raise SettingsError("--accuracy compares runs that are there and takes no other option but --json")
        return accuracy(Path(options.accuracy), options.json)
    if options.here and (options.gpu or options.ram):
        raise SettingsError("--here is this machine, and --gpu or --ram name another one; keep one of them")
    if options.output is not None:
        check_place(options.output)
    with without_collector(freeze=True), run_log():
        return _plan(options, flags)


def _plan(options: argparse.Namespace, flags: list[str]) -> int:
    from scu_trainer.train.memory_estimate.plan import divided_by_zero3

    target = _target(options, flags)
    job = _job(options.config, flags, target)
    _warn_of_missing_data(job)
    target = limited(target, options.limit, job)
    source = source_of(job, target)
    facts = None if target.is_here else target.facts
    tried = considered(source, job, target, lambda settings: is_accepted(options.config, flags, settings, facts))
    best = next((planned for planned in tried if planned.fits), None)
    report = {
        "machine": target.name,
        "device": target.device,
        "limit_bytes": target.limit_bytes,
        "margin": MARGIN,
        # Memory control cuts micro-batches until they fit; without it they keep their size.
        "fits": tried[0].fits and (job.memory.memory_control or tried[0].step == tried[0].whole),
        "predicted": plan_screen.predicted(tried[0].as_asked, tried[0].whole),
        "not_counted": [text for text in (uncounted(tried[0].choice.optim), divided_by_zero3(job)) if text],
        "choices": [plan_screen.as_dict(planned, tried[0], target.device) for planned in tried],
        "recommended": None if best is None else settings_of(best, tried[0], job, target.device),
    }
    if best is not None and options.limit is not None and job.memory.memory_control:
        # Of which training knows nothing: memory control takes whatever is free.
        limit_gb = round((target.limit_bytes + _held_bytes(target)) / 2**30, 3)
        if limit_gb < (job.memory.memory_limit_gb or math.inf):
            report["recommended"]["memory_limit_gb"] = limit_gb
    words = [*([] if options.config is None else ["--config", options.config]), *flags]
    print(json.dumps(report, indent=2) if options.json else plan_screen.screen(report, words))
    if best is None:
        return 2
    if options.output is not None:
        _write(options, flags, report, job)
    return 0


def _write(options: argparse.Namespace, flags: list[str], report: dict[str, Any], job: Job) -> None:
    precision = job.model.mixed_precision, job.notes[0].removeprefix("precision: ")
    write(options.output, typed_entries(options.config, flags), report, precision)
    print(f"\nwritten: {options.output}", file=sys.stderr if options.json else sys.stdout)


# -- what is planned ---------------------------------------------------------------------------------------------------


def _target(options: argparse.Namespace, flags: Sequence[str]) -> Target:
    if options.gpu or options.ram:
        return named(options.gpu, options.ram)
    return here(bool(read_values(options.config, flags)["use_cpu"]))


def _job(config: Optional[str], flags: Sequence[str], target: Target) -> Job:
    job = read_job(config, flags, None if target.is_here else target.facts)
    job.check_anywhere()
    if job.data.streaming and job.kind.name != "text-generation":
        raise SettingsError("the rows of a stream are not known in advance; set streaming: false to plan")
    return job


def _warn_of_missing_data(job: Job) -> None:
    """A plan does not read text, so a misspelled path would show only when training starts."""
    from scu_trainer.data.sources import require_there

    names = [*dataset_names(job.data.dataset), *dataset_names(job.data.eval_dataset)]
    for name in names if job.kind.name == "text-generation" else ():
        try:
            require_there(name)
        except (DataError, OSError) as error:  # a place that may not be looked at ends no plan
            logger.warning("%s; a plan needs no data, but train needs them", error)


def limited(target: Target, text: Optional[str], job: Job) -> Target:
    """``target`` with the limit that was typed, or the tighter of its own and ``memory_limit_gb``. On a CPU that one
    is for the whole process, a prediction for what training adds to it."""
    limit_gb = job.memory.memory_limit_gb
    if text is not None or limit_gb is None:
        return target.limited(None if text is None else parse_bytes(text, "limit"))
    held_bytes = _held_bytes(target)
    left_bytes = max(0, round(limit_gb * 2**30) - held_bytes)
    if left_bytes >= target.limit_bytes:
        return target
    less = f", less the {readable(held_bytes)} that a process holds without a model" if held_bytes else ""
    return replace(target.limited(left_bytes), name=f"{target.name} (memory_limit_gb{less})")


def _held_bytes(target: Target) -> int:
    """What a process without a model holds of the memory in which ``target`` trains."""
    import psutil

    return psutil.Process().memory_info().rss if target.device == "cpu" else 0


def source_of(job: Job, target: Target) -> Source:
    from scu_trainer.train.memory_estimate.plan import FromConfiguration, FromParts
    from scu_trainer.train.step.distributed.deepspeed_start import models_kept_whole

    if job.efficiency.keep_freed_memory and target.device == "cpu":
        keep_freed()  # as training will have it, and the heap that is looked at
    if job.kind.name == "text-generation":
        job = replace(job, model=with_adapter_as_model(job.model))
        return FromConfiguration(job, _configuration(job), target.device)
    from rich.console import Console

    with models_kept_whole(job.training):
        return FromParts(job, job.kind.load(job, Console(quiet=True)), target.device)


def _configuration(job: Job) -> Any:
    """Of the model that is tuned, read without its weights. Raises ModelError, also for what training would refuse."""
    from scu_trainer.models.embedded import base_config
    from scu_trainer.models.loading.causal import require_causal
    from scu_trainer.models.loading.load import check_weights, config_of, load_tokenizer
    from scu_trainer.models.quantize import BITSANDBYTES, is_stored_quantized, stored_quantization

    model = job.model
    if model.model_name_or_path is None:
        return base_config(2048, 0, 1, 2)
    config, name = config_of(model), base_of(model.model_name_or_path)
    if getattr(config, "architectures", None):  # what was trained names its head; a configuration alone may not
        require_causal(config, name)
    if Path(name).is_dir():  # of the Hub nothing more is fetched
        if not check_weights(model):
            logger.warning("%s holds no weights: a plan needs none, but train needs them, and a tokenizer", name)
        else:
            load_tokenizer(model)
    if model.tuning == "qlora":
        is_stored_quantized(model, config)
    elif stored := stored_quantization(config):
        method = stored["quant_method"]
        way = "scu-trainer train --tuning lora says before its first step how much memory that takes"
        if method == BITSANDBYTES:
            way = "plan with --tuning qlora"
        raise ModelError(
            f"the weights of {name} are stored quantized ({method}), and a plan reads no weights; {way}, or plan for "
            "the full model"
        )
    return config


# -- which choices -----------------------------------------------------------------------------------------------------


def is_accepted(
    config: Optional[str], flags: Sequence[str], settings: Mapping[str, Any], planned_for: Optional[DeviceFacts] = None
) -> bool:
    """Whether ``train`` takes the job with ``settings`` in the place of what was typed. ``planned_for``: as for
    ``read_job``."""
    from scu_trainer.train.step.distributed.deepspeed_start import process_group_kept

    try:
        with environment_kept(), process_group_kept():  # DeepSpeed is only asked about
            read_job(config, [*without(flags, settings), *as_flags(settings)], planned_for).check_anywhere()
    except UserError:
        return False
    return True


def considered(source: Source, job: Job, target: Target, accepts: Callable[[Mapping[str, Any]], bool]) -> list[Planned]:
    """What was asked for; then choices that take less, up to the first that fits; then those that fit and are clearly
    faster than all before. ``accepts``: whether the job can be trained with some other settings."""
    from scu_trainer.train.memory_estimate.plan import choice_of

    asked = choice_of(job)
    found: list[Planned] = []
    too_large: set[tuple] = set()
    fastest, faster, lowest_bytes = math.inf, 0, math.inf
    hopeless = OVERHEAD.get(target.device, OVERHEAD["cpu"]).fixed_bytes > target.limit_bytes
    for choice in choices(asked, means(source, job, target), target.device)[: 1 if hopeless else None]:
        time = choice.time(target.device)
        if faster == FASTER_ONES or time > CLEARLY_FASTER * fastest or _stored(choice) in too_large:
            continue
        settings = choice.settings(asked)
        if settings and not accepts(settings):
            continue
        candidate = planned_choice(source, choice, asked, job, target)
        if candidate is None:
            continue
        if candidate.estimate.lasting_bytes > target.limit_bytes:
            too_large.add(_stored(choice))
        if candidate.fits or candidate.estimate.peak_bytes < lowest_bytes:
            found.append(candidate)
            faster += fastest < math.inf
        lowest_bytes = min(lowest_bytes, candidate.estimate.peak_bytes)
        if candidate.fits:
            fastest, lowest_bytes = time, 0
    return found


def planned_choice(
    source: Source, choice: SettingChoice, asked: SettingChoice, job: Job, target: Target
) -> Optional[Planned]:
    """None for a choice with which the model's code fails. Raises ModelError if it fails for what was asked."""
    from scu_trainer.train.memory_estimate.plan import planned
    from scu_trainer.train.step.distributed.deepspeed_start import models_kept_whole
    from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

    try:
        with models_kept_whole(job.training):
            return planned(source, choice, target.limit_bytes, job.memory.min_batch_size)
    except Exception as error:  # whatever a model's own code says to tensors without content
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        if choice != asked:
            return None
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{job.model.model_name_or_path} cannot be predicted, because its code fails without data: {first}; "
            f"measure it "
            "instead: scu-trainer variants"
        ) from error


def _stored(choice: SettingChoice) -> tuple:
    """What decides the bytes that do not depend on the micro-batch."""
    return choice.tuning, choice.load_in_8bit, choice.dtype, choice.optim, choice.offload


def means(source: Source, job: Job, target: Target) -> Any:
    is_text = job.kind.name == "text-generation"
    return Means(
        half=target.half,
        stored_half=is_text and source.stored_dtype in ("bfloat16", "float16"),
        adapters=is_text and not source.is_quantized,
        bitsandbytes=target.device in ("cpu", "cuda") and importlib.util.find_spec("bitsandbytes") is not None,
        offloading=target.device == "cuda" and is_text and importlib.util.find_spec("deepspeed") is not None,
    )


def settings_of(planned: Planned, asked: Planned, job: Job, device: str) -> dict[str, Any]:
    """What to set to get it."""
    found = planned.choice.settings(asked.choice)
    if planned.step.rows < planned.whole.rows and not job.memory.memory_control:
        found["token_cap"] = planned.step.tokens
    if device == "cuda" and job.kind.name in MADE_WHEN_NEEDED and job.training.dataloader_num_workers == 0:
        found["dataloader_num_workers"] = WORKERS_BESIDE_GPU
    return found
