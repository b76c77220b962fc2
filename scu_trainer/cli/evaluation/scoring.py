"""One model after the other, asked the same: held-out rows, and tasks of lm-evaluation-harness."""

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

    from scu_trainer.train.evaluation.harness import Harness, TaskFigure
    from scu_trainer.train.evaluation.scoring import DocumentScores
    from scu_trainer.train.evaluation.sliding import Windows
    from scu_trainer.train.job.components import TrainingComponents
    from scu_trainer.train.job.job import Task

CHECKED_ROWS, CHECKED_TOKENS = 4, 256
"""Held-out text on which the logits of a merged model are compared with those of its adapter."""


@dataclass
class EvaluationResult:
    """What one model gave. ``merge``: of a merged one its type, and how far its logits are from the adapter's.
    ``cuts``: as in ``Harness``."""

    scores: Optional[DocumentScores] = None
    merge: Optional[dict[str, Any]] = None
    figures: tuple[TaskFigure, ...] = ()
    cuts: tuple[int, int] = (0, 0)


@dataclass
class EvaluationRequest:
    """What all models of a comparison are asked, in one ``precision``, so that they round alike.

    ``settings``: of the held-out documents; None for tasks only. ``data``: the rows of the ``owner``, once it was
    asked.
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
        """Holds one model at a time, or two to merge an adapter."""
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
        """Model, tokenizer, and the documents if there are any."""
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
            found = f"no finite loss on {broken} of {len(scores.nats)} {self.task.item}s"
            raise ModelError(f"{subject.name}: {found}, broken weights")
        return scores

    def _parts(self, subject: Subject) -> TrainingComponents:
        from scu_trainer.train.job.source import Source

        source = Source(subject.model, self.settings, self._own(subject), self.seed, self.windows, self.owner.model)
        parts = replace(self.task.load_scored(source), batch_tokens=self.batch_tokens)
        if parts.data.eval is None:
            raise DataError(
                f"no {self.task.item} of {self.settings.shown_dataset} is held out; add --eval_dataset NAME_OR_PATH"
            )
        self._require_same_rows(subject, parts.data.eval)
        if self.data is None or subject is self.owner:
            self.data = parts.data
        return parts

    def _own(self, subject: Subject) -> Any:
        """Settings of the task for ``subject``; those of the split are the owner's."""
        own = subject.own(self.task.name)
        return own if own is None else replace(own, **own_split(self.owner))

    def _require_same_rows(self, subject: Subject, rows: Any) -> None:
        keys = list(rows.keys()) if hasattr(rows, "keys") else None
        if self.held_out not in (None, keys):
            same = f"on the same {self.task.item}s"
            raise ModelError(f"{subject.name} and the other model cannot be scored {same}; score each separately")
        self.held_out = keys

    def _checked_ids(self, tokenizer: Any, parts: Optional[TrainingComponents]) -> Any:
        """Token ids, shape (rows, time): of the longest held-out rows; without any, every tenth token there is."""
        import torch

        if parts is None:
            return torch.arange(0, len(tokenizer), 10)[:CHECKED_TOKENS][None]
        rows, lengths = parts.data.eval, parts.data.eval["length"]
        longest = sorted(range(len(rows)), key=lambda row: -lengths[row])[:CHECKED_ROWS]
        width = min(CHECKED_TOKENS, *(lengths[row] for row in longest))
        return torch.stack([torch.as_tensor(rows[row]["input_ids"][:width], dtype=torch.int64) for row in longest])


def _merged(model: nn.Module, dtype_name: str, input_ids: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The adapter of ``model`` in the weights of its base, and how far the logits of both are apart."""
    dtype = export_dtype(model, dtype_name)
    merged = _beside(model, merge_adapter(model, dtype).eval().requires_grad_(False))
    difference, tolerance = check_merge(model, merged, input_ids), merge_tolerance(model, dtype)
    name = str(dtype).removeprefix("torch.")
    if not math.isfinite(difference):
        raise ModelError(f"merged in {name} the model gives logits that are not finite; use --merge_dtype float32")
    return merged, {
        "dtype": name,
        "logit_difference": difference,
        "tolerance": tolerance,
        "is_within_tolerance": difference <= tolerance,
    }


def _beside(model: nn.Module, merged: nn.Module) -> nn.Module:
    """``merged`` on the device of ``model``."""
    import torch

    try:
        return merged.to(input_device(model))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "no GPU memory for the merged model beside its adapter; drop merged, or write it with scu-trainer merge "
            "and give its folder to --against"
        ) from error
