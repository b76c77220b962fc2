"""A DeepSpeed configuration against DeepSpeed's own reading of it, and against the settings of the run.

DeepSpeed drops unknown keys of the top level without a word, and the stock Trainer reports contradictions only after
the model is loaded; here both come first.
"""

from __future__ import annotations

import os
import re
from typing import Any, get_args

from transformers import TrainingArguments

from scu_trainer.errors import SettingsError, nearest
from scu_trainer.settings.base import plain
from scu_trainer.train.step.distributed.deepspeed_start import FILE_VARIABLE

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""``lr_scheduler_type`` that each of DeepSpeed's schedules stands for."""

OURS_ONLY = {"msamp"}
"""Keys that accelerate reads, not DeepSpeed."""

BY_LAUNCHER = "deepspeed_config of accelerate launch"
"""What a launch file or its flags say about DeepSpeed, where they name no JSON file."""


def source_of(training: TrainingArguments) -> str:
    """What to call the configuration in a message: its file where it has one."""
    if training.deepspeed:
        is_file = isinstance(training.deepspeed, str) and os.path.exists(training.deepspeed)
        return str(training.deepspeed) if is_file else "the DeepSpeed configuration"
    return os.environ.get(FILE_VARIABLE) or BY_LAUNCHER


def fill(training: TrainingArguments) -> dict[str, Any]:
    """The configuration, of ``--deepspeed`` or ``accelerate launch``, with every "auto" that the settings decide filled
    in; the stock Trainer does that after the model is loaded. Raises SettingsError where the two contradict each other.
    """
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
    """``mismatches``: as transformers words them, "- ds gradient_clipping=2.0 vs hf max_grad_norm=1.0"."""
    found = [re.fullmatch(r"- ds (\S+?)=(.*) vs hf (.+?)=(.*)", line, re.DOTALL) for line in mismatches]
    lines = [
        f"{match[1]} {match[2]}, the configuration says {match[3]} {match[4]}" if match else line
        for match, line in zip(found, mismatches, strict=True)
    ]
    if lines:
        raise SettingsError(f'{source} says {"; and ".join(lines)}; set "auto" there, or the same value')


def check_schedule(config: dict[str, Any], training: TrainingArguments, source: str) -> None:
    """Raise SettingsError where the file's optimizer or learning rates would replace what the settings ask for."""
    schedule = config.get("scheduler", {})
    meant = SCHEDULES.get(schedule.get("type"))
    asked = plain(training.lr_scheduler_type)
    if schedule and meant != asked:
        raise SettingsError(
            f"{source} says scheduler {schedule.get('type')}, the configuration says lr_scheduler_type {asked}; remove "
            f"scheduler from the file, or set lr_scheduler_type: {meant or 'that'} for {' or '.join(SCHEDULES)}"
        )
    if schedule:
        _check_lengths(schedule.get("params", {}), training, source)
    optimizer = config.get("optimizer", {}).get("type")
    asked = plain(training.optim)
    if optimizer and not (optimizer.lower() in ("adam", "adamw") and asked.startswith("adamw_torch")):
        raise SettingsError(
            f"{source} says optimizer {optimizer}, the configuration says optim {asked}; remove optimizer from the "
            "file, which then trains with optim"
        )


def _check_lengths(params: dict[str, Any], training: TrainingArguments, source: str) -> None:
    """The stock Trainer compares these two when it knows the number of steps: after everything is loaded."""
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
    # Batch sizes are compared with the settings already; here DeepSpeed multiplies them for itself.
    others = {name: value for name, value in config.items() if name not in BATCH_KEYS}
    recorder = Recorder({**others, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    try:
        DeepSpeedConfig(recorder)
    except ValidationError as error:
        raise SettingsError(f"{source}: {_first(error)}") from error
    except (AssertionError, ValueError, DeepSpeedConfigError) as error:
        raise SettingsError(f"{source}: {error}") from error
    unknown = [f"{name!r}{nearest(name, recorder.names)}" for name in config if name not in recorder.names | OURS_ONLY]
    if unknown:
        raise SettingsError(f"{source}: unknown key {', '.join(unknown)}; DeepSpeed would ignore it, so remove it")


class Recorder(dict):
    """A dict that notes which keys are asked for in ``names``."""

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
        return self  # "name in config.keys()" is a question, too


def _first(error) -> str:
    """The first thing that pydantic found, with the nearest known name for an unknown one."""
    found = error.errors()[0]
    name = ".".join(map(str, found["loc"]))
    if found["type"] != "extra_forbidden":
        return f"{name} is {found['input']!r}: {found['msg'][0].lower()}{found['msg'][1:]}"
    *sections, last = found["loc"]
    return f"unknown key {name!r}{nearest(str(last), _names_in(error.title, sections))}; remove it, or correct it"


def _names_in(title: str, sections: list[str]) -> list[str]:
    """Keys that DeepSpeed knows in ``sections`` of the configuration class called ``title``, as a file has them."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kinds = [DeepSpeedConfigModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next(kind for kind in kinds if kind.__name__ == title)
    for section in sections:
        annotation = kind.model_fields[section].annotation
        kind = next(part for part in (*get_args(annotation), annotation) if hasattr(part, "model_fields"))
    return [field.alias or name for name, field in kind.model_fields.items()]
