"""Held-out bits per token, and accuracy of classifiers: by document or sample, with a bootstrap interval, and paired
between two models."""

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
from scu_trainer.train.step.recovery.halving import Halving, Together

logger = logging.getLogger("scu_trainer")

DRAWS_AT_ONCE = 2**20
"""Documents drawn at once: the resamples of a large held-out set would fill gigabytes."""

LARGEST_LOGITS = 2**28
"""Numbers in the logits of one forward pass: 1 GiB in float32."""

MOST_NAMED = 8
"""Documents that a message names."""

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "category_ids")


@dataclass(frozen=True)
class DocumentScores:
    """Per held-out document or sample: summed negative log-likelihood in nats, predicted tokens or labels, and of
    classifiers how many of these had the largest logit. Shapes (documents,).

    ``reports``: of samples beside which a text is written, those of the texts; ``correct`` is 1 for a text that is
    written as it stands."""

    nats: np.ndarray
    tokens: np.ndarray
    correct: Optional[np.ndarray] = None
    reports: Optional[DocumentScores] = None

    def as_dict(self) -> dict[str, Any]:
        """For a file; ``read`` makes it again."""
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
        """Of a classifier: the share of all labels that were named right."""
        return float(self.correct.sum() / self.tokens.sum())


@dataclass(frozen=True)
class BootstrapInterval:
    """``value`` with the bounds of a percentile bootstrap interval over documents, and its confidence level."""

    value: float
    low: float
    high: float
    confidence: float

    def over(self, scores: DocumentScores) -> dict[str, Any]:
        """As it is written, taken over the documents of ``scores``: one cannot be resampled, and has no bounds."""
        return {**asdict(self), **({"low": None, "high": None} if len(scores.tokens) < 2 else {})}


def bpt_metrics(prediction) -> dict[str, float]:
    """For ``Trainer(compute_metrics=...)`` beside ``preprocess_logits``: token-weighted held-out bits per token.

    The stock ``eval_loss`` averages batches, whatever number of tokens they hold.
    """
    say_nonfinite(prediction.predictions[:, 0], "row")
    nats, tokens = prediction.predictions.astype(np.float64).sum(axis=0)
    bpt = nats / max(tokens, 1.0) / NATS_PER_BIT
    return {"bpt": bpt, "perplexity": 2.0**bpt}


def say_nonfinite(nats: np.ndarray, item: str) -> None:
    """Name what has no finite score: their mean, which has none either, does not tell."""
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
    batch_tokens: int = 8192,
    path: Optional[EvaluationPath] = None,
) -> DocumentScores:
    """Score every held-out window and add up by document.

    rows: dataset of input_ids, labels, document. ``batch_tokens``: padded tokens per forward pass, fewer where the
    logits are made and would exceed LARGEST_LOGITS numbers. ``path``: of the model, for who scores often and need not
    ask it every time. The model's training mode and the random state are left as they were.
    """
    with evaluating(model):
        return _scores(path or evaluation_path_of(model), rows, collate, batch_tokens)


def evaluation_path_of(model: nn.Module) -> EvaluationPath:
    """With the precision that a forward has here: less than the weights' under autocast, also where accelerate has put
    that around the model's own forward."""
    is_lower = torch.is_autocast_enabled(input_device(model).type) or hasattr(model, "_original_forward")
    return EvaluationPath(model, low_precision=is_lower)


def halving_of(model: nn.Module) -> Halving:
    """How rows that do not fit are scored in parts."""
    is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Together() if is_shared and has_sharded_weights(model) else Halving()


def _scores(path: EvaluationPath, rows, collate: Callable, batch_tokens: int) -> DocumentScores:
    device = input_device(path.model)
    documents = np.asarray(rows["document"])
    nats, tokens = np.zeros(documents.max() + 1), np.zeros(documents.max() + 1, dtype=np.int64)
    if path.makes_logits:
        words = getattr(getattr(path.model, "config", None), "vocab_size", None) or 1
        batch_tokens = min(batch_tokens, max(1, LARGEST_LOGITS // words))
    halving = halving_of(path.model)
    for indices in _batches(rows["length"], batch_tokens):

        def score(part: range, indices=indices) -> np.ndarray:
            batch = collate([rows[int(i)] for i in indices[part.start : part.stop]])
            return _batch_scores(path, batch, device)

        for part, scores in halving.run(len(indices), score):
            seen_documents = documents[indices[part.start : part.stop]]
            np.add.at(nats, seen_documents, scores[:, 0])
            np.add.at(tokens, seen_documents, scores[:, 1].astype(np.int64))
    say_nonfinite(nats, "document")
    seen = tokens > 0
    return DocumentScores(nats[seen], tokens[seen])


def _batch_scores(path: EvaluationPath, batch: dict[str, torch.Tensor], device: torch.device) -> np.ndarray:
    inputs = {name: batch[name].to(device) for name in MODEL_INPUTS if name in batch}
    return path.scores(inputs, batch["labels"].to(device)).cpu().double().numpy()


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[np.ndarray]:
    """Row numbers in batches of similar length, longest first, so that a batch too large for memory fails at once."""
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
    """Percentile bootstrap over documents (Efron, 1979) of token-weighted bits per token."""
    (drawn,) = _resampled([scores.nats], scores.tokens, resamples, seed)
    return _interval(scores.bpt, drawn / NATS_PER_BIT, confidence)


def bootstrap_accuracy(
    scores: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """The same of the share of labels that a classifier named right."""
    (drawn,) = _resampled([scores.correct], scores.tokens, resamples, seed)
    return _interval(scores.accuracy, drawn, confidence)


def bootstrap_exact(
    reports: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """The same of the share of texts that are written as they stand."""
    (drawn,) = _resampled([reports.correct], np.ones_like(reports.tokens), resamples, seed)
    return _interval(float(reports.correct.mean()), drawn, confidence)


def bootstrap_difference(
    first: DocumentScores, second: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Bits per token of ``second`` minus ``first`` on the same documents, each resample drawn for both alike."""
    _require_same(first, second)
    before, after = _resampled([first.nats, second.nats], first.tokens, resamples, seed) / NATS_PER_BIT
    return _interval(second.bpt - first.bpt, after - before, confidence)


def bootstrap_accuracy_difference(
    first: DocumentScores, second: DocumentScores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Accuracy of ``second`` minus that of ``first`` on the same samples."""
    _require_same(first, second)
    before, after = _resampled([first.correct, second.correct], first.tokens, resamples, seed)
    return _interval(second.accuracy - first.accuracy, after - before, confidence)


def _require_same(first: DocumentScores, second: DocumentScores) -> None:
    if not np.array_equal(first.tokens, second.tokens):
        raise ValueError("both models must be scored on the same documents with the same tokenizer")


def _resampled(models: Sequence[np.ndarray], tokens: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Amount per token of every resample, shape (models, resamples); the same documents are drawn for all models."""
    generator, documents = np.random.default_rng(seed), len(tokens)
    drawn = np.empty((len(models), resamples))
    rows = max(1, DRAWS_AT_ONCE // documents)
    for start in range(0, resamples, rows):
        draws = generator.integers(0, documents, size=(min(rows, resamples - start), documents))
        for of_model, amounts in zip(drawn, models, strict=True):
            of_model[start : start + len(draws)] = amounts[draws].sum(axis=1) / tokens[draws].sum(axis=1)
    return drawn


def _interval(value: float, drawn: np.ndarray, confidence: float) -> BootstrapInterval:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return BootstrapInterval(float(value), float(low), float(high), confidence)
