"""Held-out bits per token and accuracy by document or sample, with bootstrap intervals and paired differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scu_trainer.figures import NATS_PER_BIT, first_few
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.loss.evaluation_path import EvaluationPath
from scu_trainer.train.loss.rows.model_loss import has_sharded_weights
from scu_trainer.train.step.recovery.halving import AllRowsAtOnce, Halving

logger = logging.getLogger("scu_trainer")

DRAWS_AT_ONCE = 2**20
"""Most documents drawn at once, because all resamples of a large held-out set would take gigabytes."""

BATCH_TOKENS = 8192
"""Padded tokens of a forward pass; fewer if that does not fit in memory."""

LARGEST_LOGITS = 2**28
"""Most numbers in the logits of one forward pass: 1 GiB in float32."""

MOST_NAMED = 8
"""Most documents that a message names."""

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "category_ids")


@dataclass(frozen=True)
class DocumentScores:
    """Scores of the held-out documents or samples, in arrays of shape (documents,).

    ``nats``: summed negative log-likelihood. ``tokens``: number of predicted tokens or labels. ``correct``: for
    classifiers, how many labels had the largest logit. ``reports``: for samples with a report, the scores of the
    reports, with ``correct`` 1 for a report whose words all had the largest logit.
    """

    nats: np.ndarray
    tokens: np.ndarray
    correct: Optional[np.ndarray] = None
    reports: Optional[DocumentScores] = None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-safe dict that ``read`` turns back into scores."""
        return {
            name: part.tolist() if isinstance(part, np.ndarray) else part and part.as_dict()
            for name, part in vars(self).items()
        }

    @classmethod
    def read(cls, found: dict[str, Any]) -> DocumentScores:
        return cls(
            **{
                name: np.array(part) if isinstance(part, list) else part and cls.read(part)
                for name, part in found.items()
            }
        )

    @property
    def bpt(self) -> float:
        """Token-weighted bits per token over all documents."""
        return float(self.nats.sum() / self.tokens.sum() / NATS_PER_BIT)

    @property
    def perplexity(self) -> float:
        return 2.0**self.bpt

    @property
    def accuracy(self) -> float:
        """Share of all labels that a classifier predicted correctly."""
        return float(self.correct.sum() / self.tokens.sum())


@dataclass(frozen=True)
class BootstrapInterval:
    """``value`` with the bounds of a percentile bootstrap interval over documents, and its confidence level."""

    value: float
    low: float
    high: float
    confidence: float

    def over(self, scores: DocumentScores) -> dict[str, Any]:
        """Return the interval for a file, without bounds if ``scores`` has one document: it cannot be resampled."""
        return {**asdict(self), **({"low": None, "high": None} if len(scores.tokens) < 2 else {})}


def bpt_metrics(prediction) -> dict[str, float]:
    """Return token-weighted held-out bits per token, as ``compute_metrics`` of a Trainer with ``preprocess_logits``.
    The stock ``eval_loss`` is a mean over batches that ignores their numbers of tokens."""
    warn_about_nonfinite(prediction.predictions[:, 0], "row")
    nats, tokens = prediction.predictions.astype(np.float64).sum(axis=0)
    bpt = nats / max(tokens, 1.0) / NATS_PER_BIT
    return {"bpt": bpt, "perplexity": 2.0**bpt}


def warn_about_nonfinite(nats: np.ndarray, item: str) -> None:
    """Warn about items without a finite score by number, which their mean, not finite either, does not show."""
    bad = np.flatnonzero(~np.isfinite(nats))
    if len(bad):
        logger.warning(
            "%d of %d held-out %ss have no finite score, so their mean does not either: %s %s",
            len(bad),
            len(nats),
            item,
            item,
            first_few(map(str, bad.tolist()), MOST_NAMED),
        )


def score_documents(
    model: nn.Module,
    rows,
    collate: Callable[[list[dict]], dict[str, torch.Tensor]],
    batch_tokens: int = BATCH_TOKENS,
    path: Optional[EvaluationPath] = None,
) -> DocumentScores:
    """Score every held-out row and sum the scores by document.

    ``rows``: dataset with input_ids, labels and document. ``batch_tokens``: padded tokens per forward pass; fewer if
    the logits are computed and would exceed LARGEST_LOGITS numbers. ``path``: the evaluation path of the model, for
    callers that score often and do not want to determine it each time. The model's training mode and the random state
    are restored.
    """
    with evaluating(model):
        return _document_scores(path or evaluation_path_of(model), rows, collate, batch_tokens)


def evaluation_path_of(model: nn.Module) -> EvaluationPath:
    """Return the evaluation path of ``model``. A forward pass has a lower precision than the weights under autocast, or
    if accelerate has wrapped the model's forward in autocast."""
    is_lower = torch.is_autocast_enabled(input_device(model).type) or hasattr(model, "_original_forward")
    return EvaluationPath(model, low_precision=is_lower)


def halving_strategy(model: nn.Module) -> Halving:
    """Return what to do with a batch that does not fit: halve it, or raise if weights are sharded over ranks, because
    the others wait in the same forward pass."""
    is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return AllRowsAtOnce() if is_shared and has_sharded_weights(model) else Halving()


def _document_scores(path: EvaluationPath, rows, collate: Callable, batch_tokens: int) -> DocumentScores:
    device = input_device(path.model)
    documents = np.asarray(rows["document"])
    nats, tokens = np.zeros(documents.max() + 1), np.zeros(documents.max() + 1, dtype=np.int64)
    if path.makes_logits:
        vocabulary_size = getattr(getattr(path.model, "config", None), "vocab_size", None) or 1
        batch_tokens = min(batch_tokens, max(1, LARGEST_LOGITS // vocabulary_size))
    halving = halving_strategy(path.model)
    for indices in _batches_by_length(rows["length"], batch_tokens):

        def score(part: range, indices=indices) -> np.ndarray:
            batch = collate([rows[int(i)] for i in indices[part.start : part.stop]])
            return _batch_scores(path, batch, device)

        for part, scores in halving.run(len(indices), score):
            seen_documents = documents[indices[part.start : part.stop]]
            np.add.at(nats, seen_documents, scores[:, 0])
            np.add.at(tokens, seen_documents, scores[:, 1].astype(np.int64))
    warn_about_nonfinite(nats, "document")
    is_scored = tokens > 0
    return DocumentScores(nats[is_scored], tokens[is_scored])


def _batch_scores(path: EvaluationPath, batch: dict[str, torch.Tensor], device: torch.device) -> np.ndarray:
    inputs = {name: batch[name].to(device) for name in MODEL_INPUTS if name in batch}
    return path.scores(inputs, batch["labels"].to(device)).cpu().double().numpy()


def _batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield row numbers in batches of similar length, longest first, so that one too large for memory fails at once."""
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count


def bootstrap_bpt(
    scores: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return token-weighted bits per token with a percentile bootstrap interval over documents (Efron, 1979)."""
    (drawn,) = _resampled_means([scores.nats], scores.tokens, resamples, seed)
    return _percentile_interval(scores.bpt, drawn / NATS_PER_BIT, confidence)


def bootstrap_accuracy(
    scores: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return the accuracy of a classifier with a percentile bootstrap interval over samples."""
    (drawn,) = _resampled_means([scores.correct], scores.tokens, resamples, seed)
    return _percentile_interval(scores.accuracy, drawn, confidence)


def bootstrap_exact(
    reports: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return the share of exactly predicted reports with a percentile bootstrap interval over reports."""
    (drawn,) = _resampled_means([reports.correct], np.ones_like(reports.tokens), resamples, seed)
    return _percentile_interval(float(reports.correct.mean()), drawn, confidence)


def bootstrap_difference(
    first: DocumentScores, second: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return bits per token of ``second`` minus ``first`` on the same documents, with the same resamples for both."""
    _require_same_documents(first, second)
    before, after = _resampled_means([first.nats, second.nats], first.tokens, resamples, seed) / NATS_PER_BIT
    return _percentile_interval(second.bpt - first.bpt, after - before, confidence)


def bootstrap_accuracy_difference(
    first: DocumentScores, second: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return the accuracy of ``second`` minus that of ``first``, with the same samples and resamples for both."""
    _require_same_documents(first, second)
    before, after = _resampled_means([first.correct, second.correct], first.tokens, resamples, seed)
    return _percentile_interval(second.accuracy - first.accuracy, after - before, confidence)


def _require_same_documents(first: DocumentScores, second: DocumentScores) -> None:
    if not np.array_equal(first.tokens, second.tokens):
        raise ValueError("both models must be scored on the same documents with the same tokenizer")


def _resampled_means(models: Sequence[np.ndarray], tokens: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return the amount per token, shape (models, resamples), with the same documents in a resample for all models."""
    generator, documents = np.random.default_rng(seed), len(tokens)
    drawn = np.empty((len(models), resamples))
    rows = max(1, DRAWS_AT_ONCE // documents)
    for start in range(0, resamples, rows):
        draws = generator.integers(0, documents, size=(min(rows, resamples - start), documents))
        for model_means, amounts in zip(drawn, models, strict=True):
            model_means[start : start + len(draws)] = amounts[draws].sum(axis=1) / tokens[draws].sum(axis=1)
    return drawn


def _percentile_interval(value: float, drawn: np.ndarray, confidence: float) -> BootstrapInterval:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return BootstrapInterval(float(value), float(low), float(high), confidence)
