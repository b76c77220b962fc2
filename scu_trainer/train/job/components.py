"""What a job needs before its first step; each task (``tasks/``) puts it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch


@dataclass
class TrainingComponents:
    """Everything loaded and checked, nothing written to the run directory.

    ``processor``: tokenizer or image processor, which is saved beside the model; None where there is none. ``data``:
    ``PreparedData`` or ``PreparedSamples``. ``before_model_bytes``: see costs.py.
    ``anchor``: an ``Anchor``, where something must not be forgotten. ``load_base``: then, the
    model that training began with, once more; None where that is the base of a new adapter, which is there already.
    ``teacher``: a model to learn from, frozen and in evaluation mode, on the device.
    ``batch_tokens``: padded tokens per forward pass when documents are scored.
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
