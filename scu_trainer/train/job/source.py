"""A trained model together with the rows to score it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.evaluation.sliding import Windows


@dataclass(frozen=True)
class Source:
    """A trained model and its held-out rows.

    ``model.model_name_or_path``: the model to load. ``own``: the task's settings. ``seed``: seed of the held-out split.
    ``windows``: sliding windows for documents that are longer than a row; None: the rows that training evaluates.
    ``tokenizer_of``: the model whose tokenizer and chat template turn text into rows; None: this model.
    """

    model: ModelSettings
    data: DataSettings
    own: Any
    seed: int
    windows: Optional[Windows] = None
    tokenizer_of: Optional[ModelSettings] = None
