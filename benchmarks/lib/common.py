"""Shared by all benchmarks: the embedded base and data, quiet training, and result files with machine and versions."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import psutil
import torch
from rich.console import Console
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from scu_trainer.data import Collator, PreparedData, default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.hardware.profile import cpu as profiled_cpu
from scu_trainer.models.loading.load import load_model, prepare_for_tuning
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.fixtures.base_model import embedded_base
from scu_trainer.train.run_directory.layout import git_commit, versions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", ROOT / "benchmarks" / "results"))
"""Folder of the result files. The variable redirects a run whose results are only compared with the stored ones."""


def embedded_data(seed: int, **settings: Any) -> PreparedData:
    cache = default_cache_dir(None)
    return prepare(
        DataSettings(**settings), embedded_tokenizer(cache), seed=seed, cache_dir=cache, model_name="embedded base"
    )


def embedded_model(seed: int, **settings: Any):
    """Load the embedded base, with the adapters (or full tuning) that ``ModelSettings`` asks for."""
    model_settings = ModelSettings(**settings)
    base = embedded_base(default_cache_dir(None), model_settings.embedded_base_steps)
    set_seed(seed)
    return prepare_for_tuning(
        load_model(ModelSettings(**{**settings, "model_name_or_path": str(base)})), model_settings
    )


def collator() -> Collator:
    return Collator.of(embedded_tokenizer(default_cache_dir(None)))


@contextlib.contextmanager
def scratch_arguments(**changes: Any) -> Iterator[TrainingArguments]:
    """Yield TrainingArguments that save nothing and print nothing."""
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 100_000,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
    }
    with tempfile.TemporaryDirectory() as folder:
        yield TrainingArguments(output_dir=folder, **{**defaults, **changes})


def quiet(trainer: Trainer) -> Trainer:
    trainer.remove_callback(PrinterCallback)
    return trainer


class RowList(torch.utils.data.Dataset):
    """Rows in memory. Each access returns a copy, which may be changed."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


class Stopwatch:
    """Measures the CPU seconds spent in some functions, wherever they are called from."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable) -> Callable:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begun_s = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:  # nested calls are already included
                    self.seconds += time.process_time() - begun_s

        return timed

    @contextlib.contextmanager
    def on(self, *places: tuple[Any, str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, self.around(getattr(owner, name))))
            yield


def write_result(name: str, result: dict[str, Any], command: Optional[str] = None) -> Path:
    """Write results/NAME.json: the figures, and the command (by default this one), date, machine and versions that they
    come from."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "command": command or command_line(),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": profiled_cpu().name,
            "cores": psutil.cpu_count(),
            "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {**versions(), **_other_versions()},
        "git_commit": git_commit(),
        **result,
    }
    path = RESULTS / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)  # replaced atomically, because some benchmarks rewrite their file after each run
    Console().print(f"written: {path}")
    return path


def _other_versions() -> dict[str, str]:
    """Return the versions of the packages that are compared with, if they are installed."""
    names = ("trl", "liger-kernel", "bitsandbytes", "deepspeed", "flash-attn", "unsloth", "axolotl")
    return {name: importlib.metadata.version(name) for name in names if _is_installed(name)}


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def earlier(name: str) -> dict[str, Any]:
    """Return what results/NAME.json holds; {} without that file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def not_repeated(name: str, results: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the results in results/NAME.json that ``results`` does not repeat. ``keys``: fields that name a run."""
    now = {tuple(result[key] for key in keys) for result in results}
    return [result for result in earlier(name).get("results", []) if tuple(result[key] for key in keys) not in now]


def command_line() -> str:
    """Return the command line of this program, relative to the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    named = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(named), *sys.argv[1:]])


def shown(value: Optional[float], digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
