"""One module per task: how to load its model and data, and to score held-out rows. All share the training loop."""

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
    """Return the task with this name in the settings."""
    module, kind = CLASSES[name].split(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
