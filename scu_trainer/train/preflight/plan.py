"""The plan of the run, always printed: steps, epochs and tokens per step; rows that are cut, left out and learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent
from scu_trainer.train.preflight.length import rows_per_step

STEPS = Check("plan-of-steps", "note", "optimizer steps, rows and tokens per step, epochs", "")
ROWS = Check("plan-of-rows", "note", "rows that are cut or left out, and the share of the tokens that is learned", "")
EPOCHS_IGNORED = Check(
    "epochs-ignored",
    "note",
    "max_steps and num_train_epochs are both given; max_steps is used",
    "drop max_steps to train by epochs",
)

STOCK_EPOCHS = 3.0


def before_loading(job: Job) -> Iterator[Finding]:
    training = job.training
    default_epochs = float(job.task.defaults.get("num_train_epochs", STOCK_EPOCHS))
    if training.max_steps > 0 and training.num_train_epochs not in (default_epochs, STOCK_EPOCHS):
        what = f"max_steps {training.max_steps:,} is used, not num_train_epochs {training.num_train_epochs:g}"
        yield EPOCHS_IGNORED.found(what, "max_steps, num_train_epochs")


def before_training(
    job: Job, parts: TrainingComponents, rows: Optional[int], steps: Optional[int]
) -> Iterator[Finding]:
    statistics, training = parts.data.statistics, job.training
    how = f"{training.train_batch_size} x {training.gradient_accumulation_steps} accumulated"
    how += f" x {training.world_size} ranks" if training.world_size > 1 else ""
    what, per_step = _steps_text(steps, rows_per_step(job), how, rows, training.world_size, _trained_rows(job, rows))
    if isinstance(statistics, DataStatistics) and statistics.blocks and not statistics.streaming:
        tokens = per_step * statistics.train_tokens / statistics.blocks
        what += f", about {tokens:,.0f} tokens per step"
    yield STEPS.found(what)
    if isinstance(statistics, SampleStatistics):
        yield ROWS.found(f"left out: {sum(statistics.dropped.values()):,} of {statistics.read:,} {statistics.item}s")
    elif not statistics.streaming:
        yield ROWS.found(_documents_text(statistics))


def _trained_rows(job: Job, rows: Optional[int]) -> Optional[int]:
    """Return how many rows all ranks together train on in an epoch of ``rows``.

    The curriculum divides the rows among the ranks and repeats rows only for ranks that would have none in a step. The
    data loaders of the stock Trainer drop the last batches, or fill them with repeated rows.
    """
    training, launched = job.training, job.training.accelerator_config
    rows_at_once = training.train_batch_size * training.world_size
    if not rows or launched.split_batches or launched.dispatch_batches:
        return rows
    if job.acting_curriculum is not None:
        batches = -(-rows // training.train_batch_size)
        return max(rows, -(-batches // training.world_size) * training.world_size)
    if training.dataloader_drop_last:
        return rows // rows_at_once * rows_at_once
    return -(-rows // rows_at_once) * rows_at_once if training.world_size > 1 and launched.even_batches else rows


def _steps_text(
    steps: int, per_step: int, how: str, rows: Optional[int], ranks: int = 1, trained: Optional[int] = None
) -> tuple[str, float]:
    """Return (a text about steps, rows and epochs; the mean number of rows per step).

    ``rows``: rows of an epoch, None if not known. ``trained``: how many rows an epoch trains on, repeated ones
    included; None: all, once each. A step never continues into the next epoch: the last step of an epoch has the
    remaining rows, or the last steps share them if each of the ``ranks`` needs some.
    """
    what = f"{steps:,} steps of {per_step:,} rows ({how})"
    if not rows:
        return what, per_step
    trained = trained or rows
    per_epoch, last = -(-trained // per_step), trained % per_step or per_step
    whole, begun = divmod(steps, per_epoch)
    seen = whole * trained + begun * per_step
    if per_epoch == 1 and last < per_step:
        all_rows = f"{trained:,} rows" + (", which is all of them" if trained == rows else "")
        what = f"{steps:,} steps of {all_rows}: {how} would take {per_step:,}"
    elif last < per_step:
        fewer = f"the last step of an epoch has {last:,}" if ranks == 1 else "the last steps of an epoch may have fewer"
        what = f"{steps:,} steps of {per_step:,} rows ({how}; {fewer})"
    difference = f" and {trained - rows:,} repeated to fill the batches of all ranks" if trained > rows else ""
    difference = f", {rows - trained:,} of them left out by dataloader_drop_last" if trained < rows else difference
    return f"{what}, {seen / trained:.1f} epochs of {rows:,} rows{difference}", seen / steps


def _documents_text(statistics: DataStatistics) -> str:
    learned = percent(statistics.supervised_tokens / statistics.train_tokens)
    return (
        f"{learned} of the tokens are learned; longer than a row: {statistics.documents_cut:,} of "
        f"{statistics.documents:,} documents (they continue in the next rows); "
        f"left out: {sum(statistics.rows_dropped.values()):,}"
    )
