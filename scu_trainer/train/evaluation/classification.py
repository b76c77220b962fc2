"""Held-out scores of classifiers: by sample, nats of its label and whether it was named right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.evaluation.scoring import DocumentScores, say_nonfinite
from scu_trainer.train.step.prediction import Halving

ROWS_AT_ONCE = 128


def class_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss of each label in nats and 1 where it has the largest logit; float32 of shape (rows, 2).

    logits (rows, classes), labels (rows,).
    """
    nats = functional.cross_entropy(logits.float(), labels, reduction="none")
    return torch.stack([nats, (logits.argmax(dim=-1) == labels).float()], dim=1)


def preprocess_class_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """For ``Trainer(preprocess_logits_for_metrics=...)``."""
    return class_scores(logits[0] if isinstance(logits, tuple) else logits, labels)


def class_metrics(prediction: Any) -> dict[str, float]:
    """For ``Trainer(compute_metrics=...)`` beside ``preprocess_class_logits``: share of labels that were named right,
    and bits per label."""
    say_nonfinite(prediction.predictions[:, 0], "row")
    nats, correct = prediction.predictions.astype(np.float64).mean(axis=0)
    return {"accuracy": correct, "bpt": nats / math.log(2.0)}


@torch.no_grad()
def score_samples(
    model: nn.Module, rows: Any, collate: Callable[[list], Mapping[str, Any]], rows_at_once: int = ROWS_AT_ONCE
) -> DocumentScores:
    """Score every row of a map-style dataset; each has one label. Batches that do not fit in memory are halved.

    The model's training mode is left as it was.
    """
    was_training, device = model.training, input_device(model)
    halving, found = Halving(device), []
    model.eval()
    try:
        for start in range(0, len(rows), rows_at_once):
            numbers = range(start, min(start + rows_at_once, len(rows)))

            def score(part: range, numbers=numbers) -> np.ndarray:
                batch = collate([rows[number] for number in numbers[part.start : part.stop]])
                return _batch_scores(model, batch, device)

            found += [scores for _, scores in halving.run(len(numbers), score)]
    finally:
        model.train(was_training)
    nats, correct = np.concatenate(found).T
    say_nonfinite(nats, "sample")
    return DocumentScores(nats, np.ones(len(nats), dtype=np.int64), correct)


def _batch_scores(model: nn.Module, batch: Mapping[str, Any], device: torch.device) -> np.ndarray:
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return class_scores(logits, labels).double().cpu().numpy()
