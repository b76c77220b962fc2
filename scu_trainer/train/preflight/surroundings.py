"""Checks of the environment of the run: reporting services, the Hub, processor cores, folders and disks."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from huggingface_hub import get_token
from transformers import EvalPrediction

from scu_trainer.data.store import default_cache_dir
from scu_trainer.errors import StorageError
from scu_trainer.hardware.needs import REPORTERS, reporters_of
from scu_trainer.hardware.probe import has_cuda, usable_cores
from scu_trainer.run_files import nearest_existing, require_writable
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding

REPORT_TO = Check(
    "report-to-missing",
    "error",
    "report_to names a service that is unknown or whose package is not installed",
    "install the package, or set report_to: tensorboard or none",
)
WANDB_LOGIN = Check(
    "no-wandb-login",
    "error",
    "report_to names wandb, which has no API key and would end the run when training starts",
    "run `wandb login`, set WANDB_API_KEY or WANDB_MODE=offline, or set report_to: tensorboard",
)
HUB_TOKEN = Check(
    "no-hub-token",
    "error",
    "push_to_hub is on, but there is no Hub token",
    "run `hf auth login` or set HF_TOKEN, or drop push_to_hub",
)
BEST_METRIC = Check(
    "best-metric-unknown",
    "error",
    "metric_for_best_model is not a metric of the evaluation, so the first evaluation would end the run",
    "set it to one of the metrics that the message lists",
)
BEST_DIRECTION = Check(
    "best-metric-reversed",
    "error",
    "greater_is_better is the wrong direction for metric_for_best_model, so the worst model would be kept as the best; "
    "the stock default is true for every metric except those that end with loss",
    "set greater_is_better",
)
WORKERS = Check(
    "more-workers-than-cores",
    "warning",
    "dataloader_num_workers exceeds the cores of this machine, so workers and training compete for them",
    "lower dataloader_num_workers",
)
THREADS = Check(
    "more-threads-than-cores",
    "warning",
    "torch computes with more threads than this run has cores, for example in a container with a CPU limit that torch "
    "does not detect: threads that wait for each other use up the processor time",
    "set OMP_NUM_THREADS to the cores of each process",
)
CACHE = Check(
    "cache-not-writable",
    "warning",
    "cache_dir is not writable, so a run can only use data that was prepared there before",
    "change its permissions, or set cache_dir to another folder",
)
OUTPUT_IN_DATA = Check(
    "writes-into-dataset",
    "warning",
    "output_dir or cache_dir is inside the folder of the dataset, so the next run reads this run's files as data",
    "set it to a folder outside the dataset",
)
INODES = Check(
    "few-inodes",
    "warning",
    "the disk of output_dir is nearly out of inodes, so it cannot store new files even if there is free space",
    "remove small files there, or set output_dir to another disk",
)

WANDB_ONLINE = ("online", "shared", "run")
"""Values of wandb's ``mode`` that need an API key."""
STOCK_FIGURES = ("loss", "runtime", "samples_per_second", "steps_per_second")
SMALLER_IS_BETTER = ("loss", "bpt", "perplexity")
LARGER_IS_BETTER = ("accuracy",)
FEWEST_INODES = 1000


def before_loading(job: Job) -> Iterator[Finding]:
    yield from _check_services(job)
    yield from _check_best_metric(job)
    yield from _check_cores(job)
    yield from _check_folders(job)


def _check_services(job: Job) -> Iterator[Finding]:
    for name in reporters_of({"report_to": job.training.report_to}):
        package = REPORTERS.get(name)
        module = package and package.removesuffix("-core").replace("-", "_")
        if name not in REPORTERS:
            yield REPORT_TO.found(f"report_to {name!r} is unknown; known: {', '.join(REPORTERS)}", "report_to")
        elif module and importlib.util.find_spec(module) is None:
            yield REPORT_TO.found(f"report_to: {name} needs the package {package}, not installed", "report_to")
        elif name == "wandb" and (problem := missing_wandb_login()) is not None:
            yield WANDB_LOGIN.found(f"report_to: wandb, but {problem}", "report_to")
    if job.training.push_to_hub and not (job.training.hub_token or get_token()):
        yield HUB_TOKEN.found("push_to_hub: true, but no token is stored or set", "push_to_hub")


def _check_best_metric(job: Job) -> Iterator[Finding]:
    training = job.training
    if training.metric_for_best_model is None or training.eval_strategy == "no":
        return
    name = training.metric_for_best_model.removeprefix("eval_")
    smallest = EvalPrediction(predictions=numpy.ones((1, 2)), label_ids=numpy.zeros((1, 1)))
    # Without the prefix eval_; the metrics of the task come last.
    available = [*STOCK_FIGURES, *job.kind.compute_metrics(smallest)]
    if name not in available:
        what = f"an evaluation returns {', '.join(available)}, but not {name}"
        other = next((name for name in LARGER_IS_BETTER if name in available), available[-1])
        greater = str(other in LARGER_IS_BETTER).lower()
        how = f"set metric_for_best_model to loss, or to {other} with greater_is_better: {greater}"
        yield BEST_METRIC.found(what, "metric_for_best_model", how)
    wanted = {**dict.fromkeys(SMALLER_IS_BETTER, False), **dict.fromkeys(LARGER_IS_BETTER, True)}.get(name)
    if wanted is not None and bool(training.greater_is_better) != wanted:
        sense = "larger" if wanted else "smaller"
        what = f"a {sense} {name} is better, but greater_is_better is {training.greater_is_better}"
        yield BEST_DIRECTION.found(what, "greater_is_better", f"set greater_is_better: {str(wanted).lower()}")


def _check_cores(job: Job) -> Iterator[Finding]:
    workers, cores = job.training.dataloader_num_workers, usable_cores()
    if workers > max(1, cores):
        yield WORKERS.found(f"{workers} data loader workers on {cores:g} cores", "dataloader_num_workers")
    threads, processes = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads > 1 and threads * processes > math.ceil(cores) and (job.training.use_cpu or not has_cuda()):
        each = f" in each of {processes} processes" if processes > 1 else ""
        what = f"torch computes with {threads} threads{each}, but may use only {cores:g} of the cores"
        yield THREADS.found(what, "OMP_NUM_THREADS", f"set OMP_NUM_THREADS={max(1, int(cores) // processes)}")


# -- folders -----------------------------------------------------------------------------------------------------------


def _check_folders(job: Job) -> Iterator[Finding]:
    cache_dir = default_cache_dir(job.data.cache_dir)
    try:
        require_writable(cache_dir, "cache_dir")
    except StorageError as error:
        yield CACHE.found(str(error), "cache_dir")
    datasets = [Path(name).expanduser() for name in dataset_names(job.data.dataset)]
    folders = (("output_dir", Path(job.training.output_dir)), ("cache_dir", cache_dir))
    for dataset, (name, folder) in itertools.product(datasets, folders):
        if dataset.is_dir() and folder.expanduser().resolve().is_relative_to(dataset.resolve()):
            yield OUTPUT_IN_DATA.found(f"{name} {folder} is inside the dataset {dataset}", name)
    yield from _check_inodes(Path(job.training.output_dir))


def _check_inodes(output_dir: Path) -> Iterator[Finding]:
    existing = nearest_existing(output_dir)
    disk = os.statvfs(existing)
    if disk.f_files and disk.f_favail < FEWEST_INODES:  # some file systems do not count inodes
        yield INODES.found(f"{disk.f_favail:,} inodes are left on the disk of {existing}", "output_dir")


# -- wandb -------------------------------------------------------------------------------------------------------------


def missing_wandb_login() -> Optional[str]:
    """Return why wandb would end the run; None if not, if it asks at the terminal, or if its version is unknown."""
    import wandb
    from wandb.errors import AuthenticationError, term

    try:
        from wandb.integration.sagemaker.config import is_using_sagemaker  # SageMaker provides its own key

        settings = _wandb_settings()
        needs_key = wandb.run is None and settings.mode in WANDB_ONLINE
        if not needs_key or term.can_use_terminput() or is_using_sagemaker():
            return None
        return _missing_wandb_key(settings)
    except AuthenticationError as error:
        return f"its API key is refused: {str(error).rstrip('.')}"
    except (ImportError, AttributeError, TypeError):
        return None  # another version of wandb with other function names
    except ValueError as error:
        return f"one of its settings is not valid ({_invalid_setting(error)}); correct the variable WANDB_..."


def _invalid_setting(error: ValueError) -> str:
    """Return the setting and its allowed values in one line, without the type and the URL that pydantic adds."""
    lines = str(error).splitlines()
    return " ".join(" ".join(lines[1:3] or lines).split()).partition(" [type=")[0]


def _wandb_settings() -> Any:
    """Return the settings that ``wandb.init`` would read, without starting its service."""
    import wandb

    settings = wandb.Settings()
    settings.silent = True  # otherwise it prints which file it read
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path("~", ".config", "wandb")
    settings.settings_system = str(Path(folder).expanduser() / "settings")
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return settings


def _missing_wandb_key(settings: Any) -> Optional[str]:
    """Return a message if no API key is stored or set, else None. Raises AuthenticationError for a malformed key."""
    from wandb.sdk.lib import wbauth

    host = settings.base_url
    if wbauth.session_credentials(host=host) or settings.identity_token_file:
        return None
    if settings.api_key:
        wbauth.AuthApiKey(host=host, api_key=settings.api_key)
        return None
    return None if wbauth.read_netrc_auth(host=host) else f"no API key for {host} is stored or set"
