"""How an optimizer step and an evaluation step are computed: as the stock Trainer does, or with recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader
from transformers import Trainer

from scu_trainer.train.step.batches.rows import are_on_host
from scu_trainer.train.step.needless import availability_checks_cached, redundant_casts_skipped
from scu_trainer.train.step.recovery.loader_workers import loader_with_retries
from scu_trainer.train.step.recovery.second_try import out_of_memory_reported, second_try
from scu_trainer.train.step.recovery.snapshot import replaced


class StockEngine:
    """Computes everything as ``transformers.Trainer`` does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def loss(self, model: torch.nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run forward and backward of one accumulation batch; return its loss as the stock ``training_step`` does."""
        return self.trainer.stock_training_step(model, inputs, num_items)

    def next_to_run(self, inputs: Any) -> Sequence[Any]:
        """Return the accumulation batches that ``loss(inputs)`` will run through the model."""
        return (inputs,)

    def clip_gradients(self, clip: Callable[[], Any]) -> Any:
        """Return ``clip()``, which computes the gradient norm and may change the gradients."""
        return clip()

    def prepare_loader(self, loader: DataLoader) -> DataLoader:
        """Return ``loader``, prepared for this engine."""
        return loader

    def run_prediction(self, predict: Callable[[Any], tuple], inputs: Any, loss_only: bool) -> tuple:
        """Return (loss, logits, labels) of ``inputs``."""
        return predict(inputs)

    def forward_context(self, inputs: Any) -> AbstractContextManager:
        """Return a context manager for a forward of ``inputs`` that trains nothing."""
        return contextlib.nullcontext()

    def run_epoch(self, run: Callable[[], None], loader: DataLoader) -> None:
        """Call ``run``, which trains for an epoch on ``loader``."""
        run()

    def count_labels(self, count: Callable[[Any], Any], batches: Sequence[Any], device: torch.device) -> Any:
        """Return the number of labels that ``count`` finds in ``batches``, on ``device``."""
        return count(device)

    def run_evaluation(self, evaluate: Callable[[], Any], loader: DataLoader, loss_only: bool) -> Any:
        """Return ``evaluate()``, a pass over ``loader``."""
        return evaluate()

    def error_context(self, what: Callable[[], str]) -> AbstractContextManager:
        """Return a context manager for work that ``what`` describes."""
        return contextlib.nullcontext()


class MicroBatchEngine(StockEngine):
    """Runs accumulation windows in micro-batches. With a ``prediction`` of the trainer it also recovers from
    out-of-memory, in training and evaluation. ``lean``: a ``LeanPrediction``, which computes in an evaluation only what
    is asked for."""

    def __init__(self, trainer: Trainer, lean: Any) -> None:
        super().__init__(trainer)
        self.micro_batches, self.prediction, self.lean = trainer.micro_batches, trainer.prediction, lean

    def loss(self, model: torch.nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        return self.micro_batches.loss(model, inputs, num_items)

    def next_to_run(self, inputs: Any) -> Sequence[Any]:
        return self.micro_batches.next_to_run(inputs)

    def clip_gradients(self, clip: Callable[[], Any]) -> Any:
        """Return ``clip()``. If it runs out of memory, call it once more: it changes the gradients only at its end."""
        if not self.micro_batches.ranks.recoverable:
            return clip()
        gradients = [p.grad for p in self.micro_batches.parameters if p.grad is not None]
        accelerator = self.trainer.accelerator
        with contextlib.ExitStack() as stack:
            if accelerator.scaler is not None and accelerator.scaler.is_enabled():
                # clip begins with this, and torch refuses to do it a second time, so clip could not be repeated.
                doing = "dividing the gradients by the loss scale"
                second_try(accelerator.unscale_gradients, doing, unchanged=gradients)
                stack.enter_context(replaced(accelerator, "unscale_gradients", lambda optimizer=None: None))
            return second_try(clip, "clipping the gradients, or taking their norm,", unchanged=gradients)

    def prepare_loader(self, loader: DataLoader) -> DataLoader:
        return loader if self.prediction is None else loader_with_retries(loader)

    def run_prediction(self, predict: Callable[[Any], tuple], inputs: Any, loss_only: bool) -> tuple:
        """Predict with its own micro-batch sizes, in the same way as training."""
        predict = self.lean.make_lean(predict, loss_only)
        return predict(inputs) if self.prediction is None else self.prediction.step(inputs, predict, loss_only)

    def forward_context(self, inputs: Any) -> AbstractContextManager:
        return self.lean.around_forward(inputs)

    def run_epoch(self, run: Callable[[], None], loader: DataLoader) -> None:
        """Keep batches on the host, where lengths are read without a wait; micro-batches are moved to the device."""
        on_host = replaced(loader, "device", None) if isinstance(loader, DataLoaderShard) else contextlib.nullcontext()
        with availability_checks_cached(), redundant_casts_skipped(), on_host:
            run()

    def count_labels(self, count: Callable[[Any], Any], batches: Sequence[Any], device: torch.device) -> Any:
        if self.prediction is not None and self.prediction.items is not None:
            return self.prediction.items[0]
        if self.trainer.accelerator.num_processes > 1:  # the count is a collective call, which cannot be repeated
            return count(device)

        def count_in_place() -> Any:
            items = count("cpu" if are_on_host(batches) else device)
            return items.to(device, non_blocking=True) if torch.is_tensor(items) else items

        if self.prediction is None:
            return count_in_place()
        return second_try(count_in_place, "counting the labels of a step")

    def run_evaluation(self, evaluate: Callable[[], Any], loader: DataLoader, loss_only: bool) -> Any:
        self.lean.begin()
        if self.prediction is None:
            return evaluate()
        args = self.trainer.args
        keeps_setting = loss_only or args.eval_accumulation_steps is not None
        # Move logits to the host batch by batch, so that they do not pile up on the device.
        with contextlib.nullcontext() if keeps_setting else replaced(args, "eval_accumulation_steps", 1):
            return self.prediction.evaluated(evaluate, loader)

    def error_context(self, what: Callable[[], str]) -> AbstractContextManager:
        """Report an out-of-memory error that could not be recovered from in one line."""
        return contextlib.nullcontext() if self.prediction is None else out_of_memory_reported(what)
