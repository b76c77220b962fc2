"""Held-out scores of classifiers: for each sample, the nats of its label and whether the prediction is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.evaluation.scoring import DocumentScores, halving_strategy, warn_about_nonfinite

ROWS_AT_ONCE = 128


def class_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return float32 (rows, 2): the loss of each label in nats, and 1 if the label has the largest logit. ``logits``:
    (rows, classes). ``labels``: (rows,)."""
    nats = functional.cross_entropy(logits.float(), labels, reduction="none")
    return torch.stack([nats, (logits.argmax(dim=-1) == labels).float()], dim=1)


def preprocess_class_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return ``class_scores``, as ``preprocess_logits_for_metrics`` of a Trainer."""
    return class_scores(logits[0] if isinstance(logits, tuple) else logits, labels)


def preprocess_class_and_report(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Do the same for a model that may also return ``report_scores``: (rows, 2), or (rows, 5) with them."""
    scores = preprocess_class_logits(logits, labels)
    return torch.cat([scores, logits[1].float()], dim=1) if isinstance(logits, tuple) else scores


def class_metrics(prediction: Any) -> dict[str, float]:
    """Return accuracy and bits per label, as ``compute_metrics`` of a Trainer with ``preprocess_class_logits``."""
    warn_about_nonfinite(prediction.predictions[:, 0], "row")
    nats, correct = prediction.predictions[:, :2].astype(np.float64).mean(axis=0)
    return {"accuracy": correct, "bpt": nats / NATS_PER_BIT}


def class_and_report_metrics(prediction: Any) -> dict[str, float]:
    """Return the same metrics, and over the rows with a report its bits per word and the share of exact reports."""
    reports = _report_scores(prediction.predictions[:, 2:].astype(np.float64))
    report = {} if reports is None else {"report_bpt": reports.bpt, "report_exact": float(reports.correct.mean())}
    return {**class_metrics(prediction), **report}


def _report_scores(scores: np.ndarray) -> Optional[DocumentScores]:
    """Return the scores of the rows with a report; None without any. ``scores``: (rows, 3) or (rows, 0)."""
    scores = scores[scores[:, 1] > 0] if scores.shape[1] else scores[:0]
    return DocumentScores(scores[:, 0], scores[:, 1].astype(np.int64), scores[:, 2]) if len(scores) else None


def score_samples(
    model: nn.Module, rows: Any, collate: Callable[[list], Mapping[str, Any]], rows_at_once: int = ROWS_AT_ONCE
) -> DocumentScores:
    """Score every row of a map-style dataset with one label per row, and restore the model's training mode. Batches
    that do not fit in memory are halved, see ``halving_strategy``."""
    device = input_device(model)
    halving, all_scores = halving_strategy(model), []
    with evaluating(model):
        for start in range(0, len(rows), rows_at_once):
            numbers = range(start, min(start + rows_at_once, len(rows)))

            def score(part: range, numbers=numbers) -> np.ndarray:
                batch = collate([rows[number] for number in numbers[part.start : part.stop]])
                return _batch_scores(model, batch, device)

            all_scores += [scores for _, scores in halving.run(len(numbers), score)]
    all_scores = np.concatenate(all_scores)
    nats, correct = all_scores[:, :2].T
    warn_about_nonfinite(nats, "sample")
    return DocumentScores(nats, np.ones(len(nats), dtype=np.int64), correct, _report_scores(all_scores[:, 2:]))


def _batch_scores(model: nn.Module, batch: Mapping[str, Any], device: torch.device) -> np.ndarray:
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    scores, reports = class_scores(logits, labels), getattr(outputs, "report_scores", None)
    return (scores if reports is None else torch.cat([scores, reports], dim=1)).cpu().double().numpy()
