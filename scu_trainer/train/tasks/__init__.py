"""A module per task: what is loaded, and how held-out rows are scored. The loop around them is the same."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scu_trainer.train.job.job import Task

CLASSES = {
    "text-generation": "text.TextTask",
    "image-classification": "images.ImageTask",
    "word-generation": "words.WordTask",
    "sensor-classification": "sensors.SensorTask",
}


def task_of(name: str) -> Task:
    """The task of that name in the settings."""
    module, kind = CLASSES[name].split(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
