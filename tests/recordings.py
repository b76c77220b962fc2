"""Small recordings of several sensors, folders of them, and models that classify them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from scu_trainer.data.sensors.data import prepare_sensors
from scu_trainer.data.sensors.format import ARRAY_FORMATS, MANIFEST, Recording, with_time_first, write_recordings
from scu_trainer.data.sensors.synthetic import synthetic
from scu_trainer.models.sensors import TridentConfig, TridentForSensorClassification
from scu_trainer.settings import DataSettings
from scu_trainer.settings.sensors import SensorSettings

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_fusion_layers": 1,
    "num_attention_heads": 2,
    "fusion_queries": 2,
    "stem_channels": 4,
    "initializer_range": 0.2,  # so that everything that counts can be seen in the logits
}


def folder_of(folder: Path, samples: int = 16, classes: int = 4, **changes) -> Path:
    """Generated recordings as somebody would bring them."""
    write_recordings(folder, synthetic(samples, classes, seed=0, **changes))
    return folder


def edit_manifest(folder: Path, number: int, **changes) -> None:
    """Change columns of row ``number`` (from 1); None removes one."""
    lines = (folder / MANIFEST).read_text().splitlines()
    row = {**json.loads(lines[number - 1]), **changes}
    lines[number - 1] = json.dumps({name: value for name, value in row.items() if value is not None})
    (folder / MANIFEST).write_text("\n".join(lines) + "\n")


def prepared(dataset, cache_dir: Path, seed: int = 0, label_names=None, own: dict | None = None, **changes):
    """``prepare_sensors`` with little typing; a quarter is held out."""
    data = DataSettings(dataset=str(dataset), **{"validation_split_percentage": 25, **changes})
    settings = SensorSettings(**{"sensor_samples": 32, "num_classes": 4, **(own or {})})
    return prepare_sensors(data, settings, seed=seed, cache_dir=cache_dir, label_names=label_names)


def trident(seed: int = 0, **changes) -> TridentForSensorClassification:
    torch.manual_seed(seed)
    return TridentForSensorClassification(TridentConfig(**{**TINY, "num_labels": 4, **changes}))


def rows_of(recordings: Iterable[Recording]) -> list[dict]:
    """As a dataset gives them to the collator."""
    rows = []
    for recording in recordings:
        arrays = {name: with_time_first(name, array) for name, array in recording.arrays.items()}
        rows.append({**{name: arrays[name] for name in ARRAY_FORMATS if name in arrays}, "labels": recording.label})
    return rows


SHAPES = {
    "visible": (3, 16, 16),
    "infrared": (12, 12),
    "cooling_curve": (),
    "kinematics": (6,),
    "plume": (24, 24),
    "geometry": (4,),
}
