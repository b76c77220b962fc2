"""What a task (``tasks/``) loads: the components of a training, or a trained model and the rows to score it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch

from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.evaluation.scoring import BATCH_TOKENS
from scu_trainer.train.evaluation.sliding import Windows


@dataclass
class TrainingComponents:
    """Everything that training needs, loaded and checked. Nothing is written to the run directory yet.

    ``processor``: tokenizer or image processor, which is saved with the model; None if there is none. ``data``:
    ``PreparedData`` or ``PreparedSamples``. ``before_model_bytes``: see costs.py. ``batch_tokens``: padded tokens per
    forward pass when documents are scored. ``teacher``: a model to learn from, frozen, in evaluation mode, on the
    device. ``anchor``: an ``Anchor`` if a text must not be forgotten. ``load_base``: with an anchor, loads the initial
    model again; None if that is the base model under a new adapter, which is already loaded.
    """

    processor: Any
    data: Any
    model: torch.nn.Module
    collator: Any
    before_model_bytes: Optional[int] = None
    batch_tokens: int = BATCH_TOKENS
    teacher: Optional[torch.nn.Module] = None
    anchor: Any = None
    load_base: Optional[Callable[[], torch.nn.Module]] = None


@dataclass(frozen=True)
class EvaluationSource:
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
