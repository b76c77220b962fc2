"""What a task is to the rest of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Protocol

import torch
from rich.console import Console

from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.train.evaluate import DocumentScores
from scu_trainer.train.job import Job
from scu_trainer.train.parts import Parts
from scu_trainer.train.sliding import Windows


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


class Task(Protocol):
    """``item``: what a held-out unit is called, in the singular. ``unit``: what bits are counted per.

    ``compute_metrics`` and ``preprocess_logits``: what the stock Trainer takes; ``eval_bpt`` is among the metrics.
    """

    name: str
    item: str
    unit: str
    compute_metrics: Callable[[Any], dict[str, float]]
    preprocess_logits: Callable[[Any, torch.Tensor], torch.Tensor]

    def check(self, job: Job) -> None:
        """Raise SettingsError for settings that contradict each other; costs nothing."""

    def load(self, job: Job, console: Console) -> Parts:
        """Everything that training needs. Raises a UserError where settings, data, model, memory or disk do not fit."""

    def load_scored(self, source: Source) -> Parts:
        """A model in evaluation mode and its held-out rows."""

    def score(self, model: torch.nn.Module, parts: Parts) -> DocumentScores:
        """Of ``parts.data.eval``."""

    def probe(self, parts: Parts) -> Mapping[str, Any]:
        """A small input of the model, to see which kernels run."""
