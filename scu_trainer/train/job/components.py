"""The components that a job needs for training; each task (``tasks/``) creates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch


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
    batch_tokens: int = 8192
    teacher: Optional[torch.nn.Module] = None
    anchor: Any = None
    load_base: Optional[Callable[[], torch.nn.Module]] = None
