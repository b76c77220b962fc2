"""What a trained model is scored on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.evaluation.sliding import Windows


@dataclass(frozen=True)
class Source:
    """A trained model and the rows that it has not learned. ``model.model_name_or_path``: what to load. ``own``: the
    task's settings. ``seed``: of the held-out split. ``windows``: for documents that are longer than a row; None: the
    rows that training evaluates. ``tokenizer_of``: the model whose tokenizer and chat template make rows of text; None:
    this one."""

    model: ModelSettings
    data: DataSettings
    own: Any
    seed: int
    windows: Optional[Windows] = None
    tokenizer_of: Optional[ModelSettings] = None
