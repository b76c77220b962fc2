"""Evaluation and prediction that survive out-of-memory: the same rows in smaller parts, joined again.

The size that fits in evaluation is kept apart and never changes the micro-batches of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Optional, TypeVar

import torch
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_pt_utils import nested_concat

from scu_trainer.data.random_states import restore_rng_states
from scu_trainer.train.loss.analysis import analyze
from scu_trainer.train.loss.analysis.exchange import exchange_in
from scu_trainer.train.loss.analysis.measuring import training_loss
from scu_trainer.train.loss.rows.model_loss import defined_between, reward_objects_of, trainer_that_counts
from scu_trainer.train.step.batches.media import find_entries
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import Batch, layout_for, rows_of, take
from scu_trainer.train.step.distributed.sharded import needs_all_ranks
from scu_trainer.train.step.recovery.halving import AllRowsAtOnce, Halving
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory, is_out_of_memory_in_loader
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import generators, plain_attributes, replaced, restore_attributes

logger = logging.getLogger("scu_trainer")

Result = TypeVar("Result")

FEWER_LOGITS = (
    "Lower per_device_eval_batch_size; in Python, prediction_loss_only=True or preprocess_logits_for_metrics also keep "
    "less of the logits"
)


class Prediction:
    """Runs ``prediction_step`` of one trainer in parts. ``items``: what the stock count of labels returns meanwhile."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.halving = Halving()
        self.items: Optional[tuple[Any]] = None
        self._reductions: dict[bool, Reduction] = {}
        self._has_row_losses = True  # as far as the trials of a custom step have seen vectors

    def step(self, inputs: Any, predict: Callable[[Any], tuple], loss_only: bool) -> tuple:
        """Return (loss, logits, labels) of ``inputs``. ``predict`` computes them for as many rows as fit at once."""
        predict = partial(self._predicted, predict)
        find_entries(self.trainer.model, inputs)
        batch = rows_of(self.trainer.model, inputs)
        if needs_all_ranks(self.trainer):
            return AllRowsAtOnce().run(batch.rows, lambda _: predict(inputs))[0][1]
        is_whole = batch.obstacle is not None or batch.rows == 0
        if is_whole and not self._prepares_as_stock:  # preparing may generate and compute rewards, so do it only once
            return self._whole(batch, inputs, predict)
        # Count once for the whole batch: the count is a collective call, and ranks may need different numbers of parts.
        count = self.trainer._get_num_items_in_batch([self._prepared(inputs)], self.trainer.args.device)
        with replaced(self, "items", (count,)):
            if is_whole:
                return self._whole(batch, inputs, predict)
            attempt = partial(self._part_result, batch, predict)
            get_reduction = partial(self._reduction, predict, batch, count, loss_only)
            parts = self.halving.run(batch.rows, attempt, partial(self._obstacle, batch, get_reduction))
            if len(parts) == 1:
                return parts[0][1]
            join = partial(self._joined, batch, parts, get_reduction, loss_only)
            return second_try(join, "putting the parts of an evaluated batch together", FEWER_LOGITS)

    def _predicted(self, predict: Callable[[Any], Result], inputs: Any) -> Result:
        """Return ``predict(inputs)``. If it fails, restore random states and what the trainer and its rewards count,
        because the rows run again."""
        restore = self._make_restore()
        try:
            return predict(inputs)
        except (RuntimeError, MemoryError, OSError):
            restore()
            raise

    def _make_restore(self) -> Callable[[], None]:
        """Return a function that restores the random states and counts of this moment."""
        trainer = self.trainer
        drawn = generators([trainer.args.device])
        counted = plain_attributes(reward_objects_of(trainer), trainer_that_counts(trainer))

        def restore() -> None:
            restore_rng_states(drawn)
            restore_attributes(counted)

        return restore

    def _whole(self, batch: Batch, inputs: Any, predict: Callable[[Any], tuple]) -> tuple:
        doing = f"evaluation of a batch that cannot be cut by rows ({batch.obstacle or 'it has none'})"
        return second_try(partial(predict, inputs), doing, "Lower per_device_eval_batch_size")

    @property
    def _prepares_as_stock(self) -> bool:
        return type(self.trainer)._prepare_inputs is Trainer._prepare_inputs

    def _prepared(self, inputs: Any) -> Any:
        """Return ``inputs`` as the stock step counts them: prepared, if user code prepares them."""
        return inputs if self._prepares_as_stock else self.trainer._prepare_inputs(inputs)

    def evaluated(self, evaluate: Callable[[], Result], loader: Any) -> Result:
        """Return ``evaluate()``, a pass over ``loader``. If something between batches (collecting logits, metrics, the
        loader) runs out of memory, start over once from the first batch, with the random states from before."""
        if not self._can_start_over(loader):
            return evaluate()
        restore = self._make_restore()
        try:
            return evaluate()
        except (RuntimeError, MemoryError, OSError) as error:
            if not (is_out_of_memory(error) or is_out_of_memory_in_loader(error)):
                raise
            text = str(error).partition("\n")[0]
            forget_traceback(error)
        free_memory()
        restore()
        logger.warning("evaluation ran out of memory between two batches and starts over (only once): %s", text)
        return evaluate()

    def _can_start_over(self, loader: Any) -> bool:
        """Return whether rows can be read twice, metrics have not received batches yet, and no other rank waits."""
        dataset, trainer = getattr(loader, "dataset", None), self.trainer
        can_be_read_again = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        return can_be_read_again and not trainer.args.batch_eval_metrics and trainer.accelerator.num_processes == 1

    def _obstacle(self, batch: Batch, get_reduction: Callable[[], Reduction]) -> Optional[str]:
        """Return why parts of ``batch`` would give other metrics, or None. A sample may be several rows to the loss,
        such as a pair; or each part, and finding out, would need an exchange with the other ranks."""
        trainer = self.trainer
        obstacle = layout_for(trainer.model, batch.inputs).obstacle
        if obstacle is not None:
            return obstacle
        if trainer_that_counts(trainer) is None:
            return None
        if trainer.accelerator.num_processes > 1:
            return exchange_in(trainer)
        has_labels = all(batch.inputs.get(name) is not None for name in trainer.label_names)
        if not has_labels and defined_between(trainer, "prediction_step") is None:  # no loss is computed
            return None
        reduction = second_try(get_reduction, "finding out how the loss adds up", FEWER_LOGITS)
        return None if reduction.may_be_cut else reduction.mixes

    def _part_result(self, batch: Batch, predict: Callable[[Any], tuple], part: range) -> tuple:
        loss, logits, labels = predict(_part(batch, part))
        if len(part) == batch.rows or self.trainer.accelerator.num_processes > 1:  # ranks gather results on the device
            return loss, logits, labels
        # Memory is short, so keep and join the parts on the host.
        return loss, send_to_device(logits, "cpu"), send_to_device(labels, "cpu")

    def _joined(
        self, batch: Batch, parts: list[tuple[range, tuple]], get_reduction: Callable, loss_only: bool
    ) -> tuple:
        losses = [result[0] for _, result in parts]
        loss = None if losses[0] is None else self._loss(batch, parts, losses, get_reduction, loss_only)
        if loss_only:
            return loss, None, None
        logits, labels = (_concatenated([result[i] for _, result in parts]) for i in (1, 2))
        return loss, logits, labels

    def _loss(
        self, batch: Batch, parts, losses: list[torch.Tensor], get_reduction: Callable, loss_only: bool
    ) -> torch.Tensor:
        reduction = get_reduction()
        if losses[0].ndim and self._has_row_losses:
            return torch.cat(losses)
        if reduction.is_exact:
            layout = layout_for(self.trainer.model, batch.inputs)
            self._store_reduction(replace(reduction, mixes=reduction.obstacle_in(layout)), loss_only)
        if not reduction.is_mean:
            return torch.stack(losses).sum()
        items = [sum(reduction.row_items(_part(batch, part), len(part))) for part, _ in parts]
        shares = [(share, loss) for share, loss in zip(items, losses, strict=True) if share]
        total = sum(items)
        return sum(share / total * loss for share, loss in shares) if total else losses[0]

    def _reduction(self, predict: Callable[[Any], tuple], batch: Batch, count: Any, loss_only: bool) -> Reduction:
        """Return how the loss adds up over rows, analyzed once for each ``loss_only``."""
        if loss_only not in self._reductions:
            trainer = self.trainer
            is_own = defined_between(trainer, "prediction_step") is not None
            loss_of = partial(self._own_loss, predict, {True, False}) if is_own else partial(training_loss, trainer)
            low_precision = trainer.accelerator.mixed_precision != "no"
            rows = [layout_for(trainer.model, batch.inputs)]
            how = {"training": False, "low_precision": low_precision, "most_rows": 2, "owner": trainer}
            reduction = analyze(loss_of, trainer.model, rows, count, 0, **how)
            self._store_reduction(
                reduction or Reduction("rows", mixes="its rows do not show how it adds up"), loss_only
            )
        return self._reductions[loss_only]

    def _own_loss(self, predict: Callable[[Any], tuple], ways: set[bool], inputs: Any, items: Any) -> torch.Tensor:
        """Return the loss of a custom ``prediction_step``, which may differ from the training loss or pass it no count.

        If it equals the training loss, return that with its gradient, which tells the analysis more. ``ways``: whether
        the training loss is called with the count. A way that gave another loss is removed, so that all trials of the
        analysis use the same one.
        """
        with replaced(self, "items", (items,)):
            loss = predict(type(inputs)(inputs))[0]
        if loss.ndim:  # the stock loop takes the mean of a vector
            self._has_row_losses &= len(loss) == rows_of(self.trainer.model, inputs).rows
            return loss.mean()
        for has_count in sorted(ways, reverse=True):
            try:
                trained = training_loss(self.trainer, type(inputs)(inputs), items if has_count else None)
                if torch.allclose(trained, loss, rtol=1e-6, atol=0.0):
                    return trained
            except Exception as error:  # the training loss may not accept this
                if is_out_of_memory(error):
                    raise
            ways.remove(has_count)
        return loss

    def _store_reduction(self, reduction: Reduction, loss_only: bool) -> None:
        self._reductions[loss_only] = reduction
        if not reduction.is_exact and reduction.may_be_cut:
            how = "a mean" if reduction.is_mean else "the sum"
            logger.warning("eval_loss is %s over parts of a batch: %s", how, reduction.mixes)


def _part(batch: Batch, part: range) -> Any:
    return take([batch], [(0, row) for row in part], trim=False)


def _concatenated(parts: list[Any]) -> Any:
    return None if parts[0] is None else reduce(partial(nested_concat, padding_index=-100), parts)
