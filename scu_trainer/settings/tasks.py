"""Settings of the task: what kind of model is trained, and its named groups of values.

Each task has its own settings (``images.py``, ``words.py``, ``sensors.py``), defaults, and named groups of values: a
preset adapts a job to a machine, a mode sets the size of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings import images, sensors, words
from scu_trainer.settings.base import check_fields, option, require
from scu_trainer.settings.data import DataSettings
from scu_trainer.settings.regularization import RetentionSettings

TEXT = "text-generation"

ONLY_TEXT = (
    "packing",
    "sample_prompts",
    "sample_max_new_tokens",
    "isolate_documents",
    "completion_only_loss",
    "assistant_only_loss",
    "chat_template",
    "prompt_column",
    "response_column",
    "system_column",
    "messages_column",
    "streaming",
    "stopping_strategy",
    "embedded_base_steps",
    "new_tokens",
    "adapter_name_or_path",
    *(item.name for item in fields(RetentionSettings)),
)
LANGUAGE = ("text_column", "block_size", "preprocessing_num_workers", "chunked_loss", "padding_free")
NOT_WORDS = (*ONLY_TEXT, "preprocessing_num_workers")
IMAGE_COLUMNS = ("image_column_name", "label_column_name")
RECORDINGS = ("synthetic", "num_classes", "sensor_samples", "sensor_missing_share")

TEXT_MODES: dict[str, dict[str, object]] = {
    "tiny": {
        "dataset_size": 40,
        "max_eval_documents": 8,
        "block_size": 128,
        "num_train_epochs": 1.0,
        "max_steps": -1,
    },
    "standard": {
        "dataset_size": None,
        "max_eval_documents": None,
        "block_size": 512,
        "num_train_epochs": 3.0,
        "max_steps": -1,
    },
    "extended": {
        "dataset_size": None,
        "max_eval_documents": None,
        "block_size": 1024,
        "num_train_epochs": 6.0,
        "max_steps": -1,
    },
}
"""Named groups of values, without model and tuning. ``max_steps`` -1 trains for the epochs; None means no limit."""


@dataclass(frozen=True)
class Kind:
    """The settings of a task. ``settings``: dataclass of the task's own fields. ``unused``: shared fields without
    effect on the task. ``defaults``: values that replace the general defaults. ``modes``, ``presets``: named groups of
    values. ``split_fields``: own fields that decide which rows are held out."""

    settings: Optional[type] = None
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    modes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split_fields: tuple[str, ...] = ()

    @property
    def own_names(self) -> tuple[str, ...]:
        return () if self.settings is None else tuple(item.name for item in fields(self.settings))


def _task_kind(settings: type, module: Any, unused: tuple[str, ...], split_fields: tuple[str, ...]) -> Kind:
    groups = {name.lower(): getattr(module, name, {}) for name in ("MODES", "PRESETS")}
    return Kind(settings, unused, module.DEFAULTS, **groups, split_fields=split_fields)


KINDS = {
    TEXT: Kind(modes=TEXT_MODES),
    "image-classification": _task_kind(images.ImageSettings, images, (*ONLY_TEXT, *LANGUAGE), IMAGE_COLUMNS),
    "word-generation": _task_kind(words.WordSettings, words, NOT_WORDS, ("category_column",)),
    "sensor-classification": _task_kind(sensors.SensorSettings, sensors, (*ONLY_TEXT, *LANGUAGE), RECORDINGS),
}


def require_mixable(data: DataSettings, task: str) -> None:
    """Raise SettingsError for a list of datasets with a task that cannot mix them."""
    require(
        not data.is_mixture or task == TEXT,
        f"dataset is a list of {len(data.sources)} sources ({data.shown_dataset}), but only task: {TEXT} mixes "
        f"sources, and task is {task}; give one dataset",
    )


@dataclass(frozen=True)
class TaskSettings:
    """The task, and its named groups of values."""

    task: Literal["text-generation", "image-classification", "word-generation", "sensor-classification"] = option(
        TEXT, "what to train: a causal language model, an image classifier, a GRU over words, a sensor classifier"
    )
    preset: Optional[str] = option(
        None, "values for a type of machine, which file and flags override; images: gpu, cpu, memory_efficient"
    )
    seeds: Optional[list[int]] = option(
        None,
        "train the job once with each of these seeds, one after another, each in its own folder below "
        "output_dir, and report mean and spread",
    )
    mode: Optional[str] = option(
        None,
        "values for a size of job: tiny, standard, extended. A mode in a file is overridden by the other lines of the "
        "file; a mode as a flag overrides the file",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("preset", "mode"):
            self._group_values(name)
        seeds = self.seeds or []
        require(len({*seeds}) == len(seeds), f"seeds are {seeds}; give different ones, such as 0 1 2")

    @property
    def kind(self) -> Kind:
        return KINDS[self.task]

    def _group_values(self, name: str) -> Mapping[str, Any]:
        wanted, known = getattr(self, name), getattr(self.kind, f"{name}s")
        if wanted is None or wanted in known:
            return known.get(wanted, {})
        allowed = (
            f"allowed: {', '.join(known)}{did_you_mean(wanted, known)}" if known else f"drop it: {self.task} has none"
        )
        raise SettingsError(f"{name} is {wanted!r}; {allowed}")

    @property
    def mode_values(self) -> Mapping[str, Any]:
        """Values of the mode by field, where None means the general default; empty without a mode."""
        return self._group_values("mode")

    @property
    def defaults(self) -> dict[str, Any]:
        """Values that replace the general defaults, for fields of any settings dataclass."""
        return {**self.kind.defaults, **self._group_values("preset"), **self.mode_values}

    def check_given(self, names: Collection[str]) -> None:
        """Raise SettingsError for a field in ``names``, those that were given, without effect on this task."""
        others = {name: task for task, kind in KINDS.items() if task != self.task for name in kind.own_names}
        for name in names:
            if name in others and name not in self.kind.own_names:
                raise SettingsError(
                    f"{name} has an effect only on task: {others[name]}, but task is {self.task}; drop one of them"
                )
            if name in self.kind.unused:
                raise SettingsError(f"{name} has no effect on task: {self.task}; drop it")
