"""The run in two lines, said always: steps, epochs, tokens per step; what is cut, left out, learned."""

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
ROWS = Check("plan-of-rows", "note", "rows cut, left out, and the share of tokens that is learned", "")
EPOCHS_IGNORED = Check(
    "epochs-ignored",
    "note",
    "max_steps and num_train_epochs are both given, and max_steps decides",
    "drop max_steps to train by epochs",
)

STOCK_EPOCHS = 3.0


def before_loading(job: Job) -> Iterator[Finding]:
    training = job.training
    unasked = float(job.task.defaults.get("num_train_epochs", STOCK_EPOCHS))
    if training.max_steps > 0 and training.num_train_epochs not in (unasked, STOCK_EPOCHS):
        what = f"max_steps {training.max_steps:,} decides, not num_train_epochs {training.num_train_epochs:g}"
        yield EPOCHS_IGNORED.found(what, "max_steps, num_train_epochs")


def before_training(
    job: Job, parts: TrainingComponents, rows: Optional[int], steps: Optional[int]
) -> Iterator[Finding]:
    statistics, training = parts.data.statistics, job.training
    how = f"{training.train_batch_size} x {training.gradient_accumulation_steps} accumulated"
    how += f" x {training.world_size} ranks" if training.world_size > 1 else ""
    what, per_step = _of_steps(steps, rows_per_step(job), how, rows, training.world_size, _shown(job, rows))
    if isinstance(statistics, DataStatistics) and statistics.blocks and not statistics.streaming:
        tokens = per_step * statistics.train_tokens / statistics.blocks
        what += f", about {tokens:,.0f} tokens per step"
    yield STEPS.found(what)
    if isinstance(statistics, SampleStatistics):
        yield ROWS.found(f"left out: {sum(statistics.dropped.values()):,} of {statistics.read:,} {statistics.item}s")
    elif not statistics.streaming:
        yield ROWS.found(_of_documents(statistics))


def _shown(job: Job, rows: Optional[int]) -> Optional[int]:
    """Rows that all ranks together train on in an epoch of ``rows``. The curriculum shares out what there is, and
    repeats rows only for ranks that had none in a step; the loaders of the stock Trainer drop the last batches, or fill
    them."""
    training, launched = job.training, job.training.accelerator_config
    at_once = training.train_batch_size * training.world_size
    if not rows or launched.split_batches or launched.dispatch_batches:
        return rows
    if job.acting_curriculum is not None:
        batches = -(-rows // training.train_batch_size)
        return max(rows, -(-batches // training.world_size) * training.world_size)
    if training.dataloader_drop_last:
        return rows // at_once * at_once
    return -(-rows // at_once) * at_once if training.world_size > 1 and launched.even_batches else rows


def _of_steps(
    steps: int, per_step: int, how: str, rows: Optional[int], ranks: int = 1, shown: Optional[int] = None
) -> tuple[str, float]:
    """(steps, their rows and epochs in words; rows of a step on average). ``rows``: of an epoch, None if not known;
    ``shown``: how many an epoch trains on, repeated ones included; None: all, each once. No step reaches into the next
    epoch: the last one of each has the rows that are left, or shares them with those before it where each of the
    ``ranks`` needs some."""
    what = f"{steps:,} steps of {per_step:,} rows ({how})"
    if not rows:
        return what, per_step
    shown = shown or rows
    per_epoch, last = -(-shown // per_step), shown % per_step or per_step
    whole, begun = divmod(steps, per_epoch)
    seen = whole * shown + begun * per_step
    if per_epoch == 1 and last < per_step:
        all_rows = f"{shown:,} rows" + (", which is all of them" if shown == rows else "")
        what = f"{steps:,} steps of {all_rows}: {how} would take {per_step:,}"
    elif last < per_step:
        fewer = f"the last step of an epoch has {last:,}" if ranks == 1 else "the last steps of an epoch may have fewer"
        what = f"{steps:,} steps of {per_step:,} rows ({how}; {fewer})"
    apart = f" and {shown - rows:,} repeated to fill the batches of all ranks" if shown > rows else ""
    apart = f", {rows - shown:,} of them left out by dataloader_drop_last" if shown < rows else apart
    return f"{what}, {seen / shown:.1f} epochs of {rows:,} rows{apart}", seen / steps


def _of_documents(statistics: DataStatistics) -> str:
    learned = percent(statistics.supervised_tokens / statistics.train_tokens)
    return (
        f"{learned} of the tokens are learned; longer than a row: {statistics.documents_cut:,} of "
        f"{statistics.documents:,} documents (they continue in the next rows); "
        f"left out: {sum(statistics.rows_dropped.values()):,}"
    )
