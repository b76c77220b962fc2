"""Compute the losses of a causal language model's held-out rows without logits and without padding, as in training.

``agreement.py`` checks on two short rows before the first batch that this gives the same losses; otherwise they are
computed from the logits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import nn
from transformers import Trainer

from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.loss.agreement import agrees_on_rows
from scu_trainer.train.loss.loss_path import LARGE_VOCABULARY
from scu_trainer.train.loss.rows.model_loss import (
    computes_causal_loss,
    has_causal_loss,
    has_sharded_weights,
    head_of,
    headless,
    is_read_by_stock_alone,
    obstacle_in_head,
    obstacle_in_layers,
    opened,
    sliding_window_of,
    user_forward_of,
    weights_dtype,
)
from scu_trainer.train.loss.rows.padding_free import EndToEnd, end_to_end
from scu_trainer.train.loss.rows.products import compiles_shapes
from scu_trainer.train.loss.rows.row_readings import RowLosses, preprocess_logits, row_scores
from scu_trainer.train.step.batches.rows import with_host_copies
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

Predict = Callable[[Any], tuple]
"""Inputs -> (loss, logits, labels), like the Trainer's ``prediction_step``."""


class EvaluationPath:
    """Compute the losses of rows for one model.

    ``fewest_words``: vocabulary size from which logits are not materialized; None: they always are. ``low_precision``:
    whether the model computes with fewer bits than its weights have.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fewest_words: Optional[int] = LARGE_VOCABULARY,
        padding_free: bool = True,
        low_precision: bool = False,
    ) -> None:
        self.model, self._low_precision = model, low_precision
        self._fewest_words, self._wants_padding_free = fewest_words, padding_free

    def scores(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Return the scores of rows, (rows, 2) as in ``row_scores``. ``labels``: (rows, time) on the model's device."""
        batch = {**inputs, "labels": labels}
        with self.collect_row_losses(batch) as seen:
            if seen is None:
                logits = self.model(**inputs, use_cache=False).logits
                return row_scores(logits[:, -labels.shape[1] :], labels)  # prompt tuning prepends learned tokens
            self.model(**batch, use_cache=False)
        return seen[-1].scores

    @contextlib.contextmanager
    def collect_row_losses(self, batch: Mapping[str, Any]) -> Iterator[Optional[list[RowLosses]]]:
        """Let a forward of the model on ``batch``, which includes labels, append the losses of its rows to a list.
        Inside the context, the model returns no usable logits. Yields None if the model must run as usual."""
        rows = self._end_to_end(with_host_copies(batch)) if self._may_leave_padding else None
        if self.makes_logits and rows is None:
            yield None
            return
        seen: list[RowLosses] = []
        with self._context(self.model, None, seen.append, rows):
            yield seen

    def _end_to_end(self, batch: Mapping[str, Any]) -> Optional[EndToEnd]:
        most_tokens = sliding_window_of(self.model)
        # Prefixes are shared on the CPU only, as in training.
        rows = end_to_end(batch, most_tokens, input_device(self.model).type == "cpu")
        if rows is None or not self._leaves_padding:
            return None
        if rows.prefixes is not None and not self._shares_prefixes:
            rows = end_to_end(batch, most_tokens)
        return None if rows is None else replace(rows, wants_few_sizes=self._wants_few_sizes)

    @property
    def _context(self) -> Callable[..., contextlib.AbstractContextManager[None]]:
        return opened if self.makes_logits else headless

    @functools.cached_property
    def makes_logits(self) -> bool:
        if self._fewest_words is None or not self._has_known_loss or obstacle_in_head(self.model):
            return True
        is_small = head_of(self.model).out_features < self._fewest_words
        return is_small or not self._agrees(headless, "the logits are made")

    @functools.cached_property
    def _may_leave_padding(self) -> bool:
        has_head = self._has_known_loss and hasattr(head_of(self.model), "out_features")
        return self._wants_padding_free and has_head and not obstacle_in_layers(self.model)

    @functools.cached_property
    def _leaves_padding(self) -> bool:
        return self._agrees(self._context, "padding is kept", padding_free=True)

    @functools.cached_property
    def _shares_prefixes(self) -> bool:
        instead = "prefixes that rows share are computed once per row"
        return self._agrees(self._context, instead, padding_free=True, shares_prefixes=True)

    @functools.cached_property
    def _wants_few_sizes(self) -> bool:
        dtype = torch.bfloat16 if self._low_precision else weights_dtype(self.model)
        return compiles_shapes(input_device(self.model).type, dtype)  # as in training

    @functools.cached_property
    def _has_known_loss(self) -> bool:
        is_known = computes_causal_loss(self.model) and user_forward_of(self.model) is None
        return is_known and not has_sharded_weights(self.model)

    def _agrees(self, kind: Callable, instead: str, padding_free: bool = False, shares_prefixes: bool = False) -> bool:
        """``kind``: ``opened`` or ``headless``. ``instead``: what is done if the losses differ, for the log."""
        agrees, reason = agrees_on_rows(self.model, kind, self._low_precision, padding_free, shares_prefixes)
        if reason is not None:
            logger.info("in evaluation %s: %s", instead, reason)
        return bool(agrees)


class LeanPrediction:
    """Run a trainer's ``prediction_step`` without logits and padding. Only where no code but the stock Trainer sees
    what the model returns, and it does not need the logits. ``chunked`` and ``padding_free``: as in ``LossPath``."""

    def __init__(self, trainer: Trainer, chunked: str, padding_free: Optional[bool]) -> None:
        self.trainer = trainer
        fewest_words = {"never": None, "always": 0, "auto": LARGE_VOCABULARY}[chunked]
        self._path_options = {"fewest_words": fewest_words, "padding_free": padding_free is not False}
        self._path: Optional[EvaluationPath] = None
        self._is_predicting = False
        self._scores: Optional[torch.Tensor] = None

    def begin(self) -> None:
        """Begin an evaluation: check its model again, because it has changed since the last one."""
        self._path = None

    def make_lean(self, predict: Predict, loss_only: bool) -> Predict:
        """Return ``predict`` so that it computes only the loss, or also the scores of rows (``preprocess_logits``).
        Where other code needs the outputs, ``predict`` is returned unchanged."""
        trainer = self.trainer
        scores_rows = not loss_only and trainer.preprocess_logits_for_metrics is preprocess_logits
        if not (loss_only or scores_rows) or not has_causal_loss(trainer) or not is_read_by_stock_alone(trainer):
            return predict

        def lean(part: Any) -> tuple:
            self._scores = None
            with replaced(self, "_is_predicting", True):
                loss, logits, labels = predict(part)
            if scores_rows and labels is not None:  # in every batch, because results of ranks and parts are joined
                logits = preprocess_logits(logits, labels) if self._scores is None else self._scores
            return loss, logits, labels

        return lean

    @contextlib.contextmanager
    def around_forward(self, inputs: Any) -> Iterator[None]:
        """Wrap the forward that a ``predict`` returned by ``make_lean`` runs on ``inputs``."""
        if not self._is_predicting or not isinstance(inputs, Mapping):
            yield
            return
        with self._path_of_model.collect_row_losses(inputs) as seen:
            yield
        self._scores = None if seen is None else seen[-1].scores

    @property
    def _path_of_model(self) -> EvaluationPath:
        """Return the path of the trainer's current model, which ``model_init`` may have replaced."""
        model = self.trainer.model
        if self._path is None or self._path.model is not model:
            low_precision = self.trainer.accelerator.mixed_precision != "no"
            self._path = EvaluationPath(model, low_precision=low_precision, **self._path_options)
        return self._path
