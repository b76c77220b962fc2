"""Scores one model after the other on the same held-out rows and the same tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.subjects import Subject, own_split
from scu_trainer.errors import DataError, ModelError
from scu_trainer.models.export import export_dtype
from scu_trainer.models.loading.load import load_for_evaluation, load_tokenizer
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.models.merge import check_merge, merge_adapter, merge_tolerance
from scu_trainer.settings import DataSettings

if TYPE_CHECKING:
    from torch import nn

    from scu_trainer.train.evaluation.harness import Harness, TaskMetric
    from scu_trainer.train.evaluation.scoring import DocumentScores
    from scu_trainer.train.evaluation.sliding import Windows
    from scu_trainer.train.job.components import TrainingComponents
    from scu_trainer.train.job.job import Task

CHECKED_ROWS, CHECKED_TOKENS = 4, 256
"""Amount of held-out text on which the logits of a merged model are compared with those of its adapter."""


@dataclass
class EvaluationResult:
    """The result of one model. ``merge``: for a merged model, its type, and how far its logits are from the adapter's.
    ``cuts``: as in ``Harness``."""

    scores: Optional[DocumentScores] = None
    merge: Optional[dict[str, Any]] = None
    figures: tuple[TaskMetric, ...] = ()
    cuts: tuple[int, int] = (0, 0)


@dataclass
class EvaluationRequest:
    """What to score all models of a comparison on, with the same ``precision``, so that they round in the same way.

    ``settings``: those of the held-out documents; None if only tasks are run. ``data``: the rows of the ``owner``, once
    it was scored.
    """

    task: Task
    settings: Optional[DataSettings]
    owner: Subject
    seed: int
    precision: str
    batch_tokens: int
    windows: Optional[Windows] = None
    harness: Optional[Harness] = None
    data: Any = None
    held_out: Optional[list[str]] = None

    def ask(self, subject: Subject) -> EvaluationResult:
        """Load and score a model. Only one model is held at a time, or two to merge an adapter."""
        result = EvaluationResult()
        model, tokenizer, parts = self.loaded(subject)
        if subject.merge_dtype is not None:
            model, result.merge = _merged(model, subject.merge_dtype, self._checked_ids(tokenizer, parts))
            parts = None if parts is None else replace(parts, model=model)
        if parts is not None:
            result.scores = self.scores(subject, parts)
        if self.harness is not None:
            result.figures = tuple(self.harness.ask(model, tokenizer, self.precision))
            result.cuts = self.harness.cuts
        return result

    def loaded(self, subject: Subject) -> tuple[nn.Module, Any, Optional[TrainingComponents]]:
        """Return the model, its tokenizer, and the components with the documents, if there are any."""
        if self.settings is not None:
            parts = self._parts(subject)
            return parts.model, parts.processor, parts
        tokenizer = load_tokenizer(subject.model)
        return load_for_evaluation(subject.source, subject.model), tokenizer, None

    def scores(self, subject: Subject, parts: TrainingComponents) -> DocumentScores:
        import numpy
        import torch

        dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        device = next(parts.model.parameters()).device.type
        try:
            with torch.autocast(device, dtype, enabled=dtype is not None):
                scores = self.task.score(parts.model, parts)
        except torch.OutOfMemoryError as error:
            smaller = f"at batch_tokens {self.batch_tokens}; give a smaller --batch_tokens"
            where = "on a single row" if self.task.unit == "label" else smaller
            raise ModelError(f"out of GPU memory {where}") from error
        broken = int((~numpy.isfinite(scores.nats)).sum())
        if broken:
            problem = f"no finite loss on {broken} of {len(scores.nats)} {self.task.item}s"
            raise ModelError(f"{subject.name}: {problem}, broken weights")
        return scores

    def _parts(self, subject: Subject) -> TrainingComponents:
        from scu_trainer.train.job.components import EvaluationSource

        source = EvaluationSource(
            subject.model, self.settings, self._settings_of(subject), self.seed, self.windows, self.owner.model
        )
        parts = replace(self.task.load_scored(source), batch_tokens=self.batch_tokens)
        if parts.data.eval is None:
            raise DataError(
                f"no {self.task.item} of {self.settings.shown_dataset} is held out; add --eval_dataset NAME_OR_PATH"
            )
        self._require_same_rows(subject, parts.data.eval)
        if self.data is None or subject is self.owner:
            self.data = parts.data
        return parts

    def _settings_of(self, subject: Subject) -> Any:
        """Return the settings of the task for ``subject``, with those of the split taken from the owner."""
        own = subject.own(self.task.name)
        return own if own is None else replace(own, **own_split(self.owner))

    def _require_same_rows(self, subject: Subject, rows: Any) -> None:
        keys = list(rows.keys()) if hasattr(rows, "keys") else None
        if self.held_out not in (None, keys):
            requirement = f"on the same {self.task.item}s"
            raise ModelError(
                f"{subject.name} and the other model cannot be scored {requirement}; score each separately"
            )
        self.held_out = keys

    def _checked_ids(self, tokenizer: Any, parts: Optional[TrainingComponents]) -> Any:
        """Return token ids, shape (rows, time): of the longest held-out rows, or every tenth token if there are no
        rows."""
        import torch

        if parts is None:
            return torch.arange(0, len(tokenizer), 10)[:CHECKED_TOKENS][None]
        rows, lengths = parts.data.eval, parts.data.eval["length"]
        longest = sorted(range(len(rows)), key=lambda row: -lengths[row])[:CHECKED_ROWS]
        width = min(CHECKED_TOKENS, *(lengths[row] for row in longest))
        return torch.stack([torch.as_tensor(rows[row]["input_ids"][:width], dtype=torch.int64) for row in longest])


def _merged(model: nn.Module, dtype_name: str, input_ids: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return ``model`` with its adapter merged into its base, and how far the logits of both are apart."""
    dtype = export_dtype(model, dtype_name)
    merged = _on_same_device(model, merge_adapter(model, dtype).eval().requires_grad_(False))
    difference, tolerance = check_merge(model, merged, {"input_ids": input_ids}), merge_tolerance(model, dtype)
    name = str(dtype).removeprefix("torch.")
    if not math.isfinite(difference):
        raise ModelError(f"merged in {name} the model gives logits that are not finite; use --merge_dtype float32")
    return merged, {
        "dtype": name,
        "logit_difference": difference,
        "tolerance": tolerance,
        "is_within_tolerance": difference <= tolerance,
    }


def _on_same_device(model: nn.Module, merged: nn.Module) -> nn.Module:
    """Return ``merged`` on the device of ``model``. Raises ModelError if there is not enough GPU memory."""
    import torch

    try:
        return merged.to(input_device(model))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "there is no GPU memory for the merged model in addition to its adapter; drop merged, or write it with "
            "scu-trainer merge and give its folder to --against"
        ) from error
