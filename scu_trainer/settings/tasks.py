"""What kind of model is trained, and the named groups of values that go with it.

Each task has settings of its own (``images.py``, ``words.py``, ``sensors.py``), other defaults, and named groups of
values: a preset fits a job to a machine, a mode sets the size of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

from scu_trainer.errors import SettingsError, nearest
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
"""Groups of values under one name; ``max_steps`` of -1 lets the epochs count, None is everything that there is. The
model and how it is tuned stay."""


@dataclass(frozen=True)
class Kind:
    """``settings``: dataclass of the task's own fields. ``unused``: shared fields that have no effect on it.
    ``split_fields``: own fields that decide which rows are held out."""

    settings: Optional[type] = None
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    modes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split_fields: tuple[str, ...] = ()

    @property
    def own_names(self) -> tuple[str, ...]:
        return () if self.settings is None else tuple(item.name for item in fields(self.settings))


def _kind(settings: type, module: Any, unused: tuple[str, ...], split_fields: tuple[str, ...]) -> Kind:
    groups = {name.lower(): getattr(module, name, {}) for name in ("MODES", "PRESETS")}
    return Kind(settings, unused, module.DEFAULTS, **groups, split_fields=split_fields)


KINDS = {
    TEXT: Kind(modes=TEXT_MODES),
    "image-classification": _kind(images.ImageSettings, images, (*ONLY_TEXT, *LANGUAGE), IMAGE_COLUMNS),
    "word-generation": _kind(words.WordSettings, words, NOT_WORDS, ("category_column",)),
    "sensor-classification": _kind(sensors.SensorSettings, sensors, (*ONLY_TEXT, *LANGUAGE), RECORDINGS),
}


def require_mixable(data: DataSettings, task: str) -> None:
    """Raise SettingsError for a list of datasets and a task that cannot mix them."""
    require(
        not data.is_mixture or task == TEXT,
        f"dataset is a list of {len(data.sources)} sources ({data.shown_dataset}); task: {TEXT} only mixes "
        f"sources, and task is {task}; give one dataset",
    )


@dataclass(frozen=True)
class TaskSettings:
    """Which of the tasks, on what scale."""

    task: Literal["text-generation", "image-classification", "word-generation", "sensor-classification"] = option(
        TEXT, "what to train: a causal language model, an image classifier, a GRU over words, a classifier of sensors"
    )
    preset: Optional[str] = option(
        None, "values for a kind of machine, which file and flags override; images: gpu, cpu, memory_efficient"
    )
    seeds: Optional[list[int]] = option(
        None,
        "train the job once with each of these seeds, one after another, each in its own folder below "
        "output_dir, and report mean and spread",
    )
    mode: Optional[str] = option(
        None,
        "values for a size of job: tiny, standard, extended. In a file, its other lines override them; as a "
        "flag, they override the file",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("preset", "mode"):
            self._group(name)
        seeds = self.seeds or []
        require(len({*seeds}) == len(seeds), f"seeds are {seeds}; give different ones, such as 0 1 2")

    @property
    def kind(self) -> Kind:
        return KINDS[self.task]

    def _group(self, name: str) -> Mapping[str, Any]:
        wanted, known = getattr(self, name), getattr(self.kind, f"{name}s")
        if wanted is None or wanted in known:
            return known.get(wanted, {})
        allowed = f"allowed: {', '.join(known)}{nearest(wanted, known)}" if known else f"drop it: {self.task} has none"
        raise SettingsError(f"{name} is {wanted!r}; {allowed}")

    @property
    def mode_values(self) -> Mapping[str, Any]:
        """Values of the mode by field, None for the general default; empty without a mode."""
        return self._group("mode")

    @property
    def defaults(self) -> dict[str, Any]:
        """Values that replace the general defaults, of fields of any dataclass."""
        return {**self.kind.defaults, **self._group("preset"), **self.mode_values}

    def check_typed(self, names: Collection[str]) -> None:
        """Raise SettingsError for a field that was given and has no effect on this task."""
        others = {name: task for task, kind in KINDS.items() if task != self.task for name in kind.own_names}
        for name in names:
            if name in others and name not in self.kind.own_names:
                raise SettingsError(
                    f"{name} has an effect on task: {others[name]} only, and task is {self.task}; drop one of them"
                )
            if name in self.kind.unused:
                raise SettingsError(f"{name} has no effect on task: {self.task}; drop it")
