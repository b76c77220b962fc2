"""Checks a DeepSpeed configuration against DeepSpeed's own parser, and against the settings of the run.

DeepSpeed silently drops unknown keys at the top level, and the stock Trainer reports contradictions only after the
model is loaded. Here both are checked first.
"""

from __future__ import annotations

import os
import re
from typing import Any, get_args

from transformers import TrainingArguments

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings.base import as_typed
from scu_trainer.train.step.distributed.deepspeed_start import FILE_VARIABLE

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules, and the ``lr_scheduler_type`` that each of them corresponds to."""

OURS_ONLY = {"msamp"}
"""Keys that accelerate reads, and DeepSpeed does not."""

BY_LAUNCHER = "deepspeed_config of accelerate launch"
"""Name of the configuration if a launch file, or its flags, configure DeepSpeed without a JSON file."""


def source_of(training: TrainingArguments) -> str:
    """Return the name of the configuration for messages: its file, if it has one."""
    if training.deepspeed:
        is_file = isinstance(training.deepspeed, str) and os.path.exists(training.deepspeed)
        return str(training.deepspeed) if is_file else "the DeepSpeed configuration"
    return os.environ.get(FILE_VARIABLE) or BY_LAUNCHER


def fill_auto_values(training: TrainingArguments) -> dict[str, Any]:
    """Return the configuration of ``--deepspeed`` or ``accelerate launch`` with each "auto" filled in, which the stock
    Trainer does after the model is loaded. Raises SettingsError if configuration and settings contradict each other."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    plugin = training.deepspeed_plugin
    if getattr(training, "hf_deepspeed_config", None) is None:
        filled = HfTrainerDeepSpeedConfig(plugin.deepspeed_config)
        filled.trainer_config_process(training)
        training.hf_deepspeed_config = plugin.hf_ds_config = filled
        plugin.deepspeed_config = filled.config
    config = training.hf_deepspeed_config
    _refuse_mismatches(config.mismatches, source_of(training))
    return config.config


def _refuse_mismatches(mismatches: list[str], source: str) -> None:
    """Raise SettingsError for ``mismatches`` as transformers words them, "- ds gradient_clipping=2.0 vs hf
    max_grad_norm=1.0"."""
    matches = [re.fullmatch(r"- ds (\S+?)=(.*) vs hf (.+?)=(.*)", line, re.DOTALL) for line in mismatches]
    lines = [
        f"{match[1]} {match[2]}, the configuration says {match[3]} {match[4]}" if match else line
        for match, line in zip(matches, mismatches, strict=True)
    ]
    if lines:
        raise SettingsError(f'{source} says {"; and ".join(lines)}; set "auto" there, or the same value')


def check_schedule(config: dict[str, Any], training: TrainingArguments, source: str) -> None:
    """Raise SettingsError if the optimizer or schedule of the file would replace what the settings ask for."""
    schedule = config.get("scheduler", {})
    equivalent = SCHEDULES.get(schedule.get("type"))
    requested = as_typed(training.lr_scheduler_type)
    if schedule and equivalent != requested:
        raise SettingsError(
            f"{source} says scheduler {schedule.get('type')}, the configuration says lr_scheduler_type {requested}; "
            f"remove scheduler from the file, or set lr_scheduler_type: {equivalent or 'that'} for "
            f"{' or '.join(SCHEDULES)}"
        )
    if schedule:
        _check_lengths(schedule.get("params", {}), training, source)
    optimizer = config.get("optimizer", {}).get("type")
    requested = as_typed(training.optim)
    if optimizer and not (optimizer.lower() in ("adam", "adamw") and requested.startswith("adamw_torch")):
        raise SettingsError(
            f"{source} says optimizer {optimizer}, the configuration says optim {requested}; remove optimizer from the "
            "file, which then trains with optim"
        )


def _check_lengths(params: dict[str, Any], training: TrainingArguments, source: str) -> None:
    """Raise SettingsError for other step counts than in the settings. The stock Trainer does so after loading."""
    steps = training.max_steps
    warmup = max(1, training.get_warmup_steps(steps)) if steps > 0 else None
    for name, value in {"total_num_steps": steps if steps > 0 else None, "warmup_num_steps": warmup}.items():
        found = params.get(name, "auto")
        if found not in ("auto", value):
            says = "the number of steps follows from the data" if value is None else f"the configuration says {value}"
            raise SettingsError(f'{source} says scheduler.params.{name} {found}, {says}; set "auto" there')


def check_keys(config: dict[str, Any], source: str) -> None:
    """Raise SettingsError for keys that DeepSpeed would drop or reject, and for values that it rejects."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    if config["zero_optimization"].get("stage") not in (0, 1, 2, 3):
        stage = config["zero_optimization"].get("stage", "missing")
        raise SettingsError(f"{source}: zero_optimization.stage is {stage}; allowed: 0, 1, 2, 3")
    # Batch sizes have already been compared with the settings; here DeepSpeed would multiply them itself.
    others = {name: value for name, value in config.items() if name not in BATCH_KEYS}
    recorder = Recorder({**others, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    try:
        DeepSpeedConfig(recorder)
    except ValidationError as error:
        raise SettingsError(f"{source}: {_first_error(error)}") from error
    except (AssertionError, ValueError, DeepSpeedConfigError) as error:
        raise SettingsError(f"{source}: {error}") from error
    unknown = [
        f"{name!r}{did_you_mean(name, recorder.names)}" for name in config if name not in recorder.names | OURS_ONLY
    ]
    if unknown:
        raise SettingsError(f"{source}: unknown key {', '.join(unknown)}; DeepSpeed would ignore it, so remove it")


class Recorder(dict):
    """A dict that records in ``names`` which keys are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def keys(self):
        return self  # so that "name in config.keys()" is recorded too


def _first_error(error) -> str:
    """Return the first error of pydantic, with the nearest known name for an unknown one."""
    found = error.errors()[0]
    name = ".".join(map(str, found["loc"]))
    if found["type"] != "extra_forbidden":
        return f"{name} is {found['input']!r}: {found['msg'][0].lower()}{found['msg'][1:]}"
    *sections, last = found["loc"]
    return f"unknown key {name!r}{did_you_mean(str(last), _names_in(error.title, sections))}; remove it, or correct it"


def _names_in(title: str, sections: list[str]) -> list[str]:
    """Return the keys of ``sections`` in the configuration class ``title``, as a DeepSpeed file writes them."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kinds = [DeepSpeedConfigModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next(kind for kind in kinds if kind.__name__ == title)
    for section in sections:
        annotation = kind.model_fields[section].annotation
        kind = next(part for part in (*get_args(annotation), annotation) if hasattr(part, "model_fields"))
    return [field.alias or name for name, field in kind.model_fields.items()]
