"""Held-out scores and metrics of each source of a mixture, in addition to those over all sources."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from scu_trainer.data.text.mixture_plan import row_tokens
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.train.evaluation.scoring import DocumentScores

logger = logging.getLogger("scu_trainer")


def scores_by_source(scores: DocumentScores, data: Any) -> dict[str, DocumentScores]:
    """Split ``scores`` of the held-out documents of ``data`` by the name of their source. Sources without held-out
    documents are left out; the result is empty if ``data`` is not a mixture."""
    names = getattr(data, "sources", ())
    if not names:
        return {}
    sources = np.unique(np.asarray(data.eval["document"])) % len(names)  # scores are in the order of the numbers
    return {
        name: DocumentScores(scores.nats[sources == source], scores.tokens[sources == source])
        for source, name in enumerate(names)
        if (sources == source).any()
    }


def metrics_by_source(compute_metrics: Callable[[Any], dict], data: Any) -> Callable[[Any], dict]:
    """Return a ``compute_metrics`` that adds bpt_NAME for every source of ``data``; the given one if ``data`` is not a
    mixture. Predictions: (rows, 2), nats and predicted tokens, as ``preprocess_logits`` returns them."""
    if not getattr(data, "sources", ()) or data.eval is None:
        return compute_metrics
    sources = np.asarray(data.eval["document"]) % len(data.sources)
    return functools.partial(_metrics_with_sources, compute_metrics, data.sources, sources, row_tokens(data.eval)[1])


def _metrics_with_sources(
    compute_metrics: Callable[[Any], dict],
    names: tuple[str, ...],
    sources: np.ndarray,
    tokens: np.ndarray,
    prediction: Any,
) -> dict[str, float]:
    """Add the metrics of each source. ``sources``, ``tokens``: source and predicted tokens of each held-out row."""
    metrics = compute_metrics(prediction)
    rows = prediction.predictions.astype(np.float64)
    if not np.array_equal(rows[:, 1], tokens):  # another sampler, or wrong columns
        logger.warning("held-out rows came in another order than they are stored, so there are no metrics by source")
        return metrics
    for source, name in enumerate(names):
        nats, predicted = rows[sources == source].sum(axis=0)
        if predicted:
            metrics[f"bpt_{name}"] = nats / predicted / NATS_PER_BIT
    return metrics
