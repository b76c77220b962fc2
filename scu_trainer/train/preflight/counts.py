"""Checks of the statistics of the data: rows that are dropped, cut or masked, and the size of the held-out data."""

from __future__ import annotations

from collections.abc import Iterator

from scu_trainer.data.images.records import EMPTY_CLASS
from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

MANY_DROPPED = Check(
    "many-dropped",
    "warning",
    "a tenth or more of the rows that were read, or half or more of the rows of tokens, are left out of training",
    "look at the first example in the message, and fix the data or the setting that causes it",
)
LITTLE_LEARNED = Check(
    "little-learned",
    "warning",
    "less than one token in 200 is learned: almost all tokens are masked",
    "check completion_only_loss, assistant_only_loss and the chat template, or shorten the prompts",
)
ANSWERS_CUT = Check(
    "conversations-cut",
    "warning",
    "most documents with a prompt are longer than block_size, so the part after a cut is learned without its prompt",
    "raise block_size",
)
HELD_OUT_SEEN = Check(
    "held-out-seen",
    "warning",
    "held-out documents or samples are also in the training data, so their score is too good",
    "remove duplicates from the dataset before it is split, or fix eval_dataset",
)
HELD_OUT_TINY = Check(
    "held-out-tiny",
    "warning",
    "the held-out data is so small that its score is mostly chance",
    "raise validation_split_percentage, or set eval_dataset",
)
MOSTLY_UNKNOWN = Check(
    "words-unknown",
    "warning",
    "a third of the words or more are <unk>",
    "raise vocabulary_size or lower min_word_count, or check that text_column contains words",
)

MANY_SHARE = 0.1
SMALLEST_LEARNED_SHARE = 0.005
MOST_CUT_SHARE = 0.5
SEEN_SHARE = 0.02
UNKNOWN_SHARE = 1 / 3
FEWEST_DOCUMENTS, FEWEST_TOKENS, FEWEST_SAMPLES = 5, 2000, 20


def before_training(job: Job, parts: TrainingComponents) -> Iterator[Finding]:
    statistics = parts.data.statistics
    if isinstance(statistics, SampleStatistics):
        yield from _check_samples(job, statistics)
    else:
        yield from _check_documents(job, statistics)


def _check_samples(job: Job, statistics: SampleStatistics) -> Iterator[Finding]:
    dropped = sum(count for reason, count in statistics.dropped.items() if reason != EMPTY_CLASS)
    yield from _check_dropped(
        dropped, max(statistics.read, dropped), f"{statistics.item}s", statistics.describe_dropped()
    )
    yield from _check_overlap(statistics.heldout_duplicates, statistics.eval, f"held-out {statistics.item}s")
    if statistics.eval and job.training.eval_strategy != "no" and statistics.eval < FEWEST_SAMPLES:
        yield HELD_OUT_TINY.found(f"{statistics.eval} {statistics.item}s are held out", "validation_split_percentage")


def _check_documents(job: Job, statistics: DataStatistics) -> Iterator[Finding]:
    if statistics.streaming:
        return  # the part of a stream that was read so far is not representative
    yield from _check_dropped_rows(statistics)
    yield from _check_masking(job, statistics)
    yield from _check_overlap(statistics.heldout_duplicates or 0, statistics.eval_documents, "held-out documents")
    is_tiny = statistics.eval_documents < FEWEST_DOCUMENTS and statistics.eval_tokens < FEWEST_TOKENS
    if statistics.eval_documents and job.training.eval_strategy != "no" and is_tiny:
        what = f"{statistics.eval_documents} documents with {statistics.eval_tokens:,} tokens are held out"
        yield HELD_OUT_TINY.found(what, "validation_split_percentage")
    words = getattr(statistics, "words", 0)
    if words and statistics.unknown_words / words >= UNKNOWN_SHARE:
        what = f"{percent(statistics.unknown_words / words)} of the training words are <unk>"
        yield MOSTLY_UNKNOWN.found(what, "vocabulary_size")


def _check_dropped_rows(statistics: DataStatistics) -> Iterator[Finding]:
    """Check the dropped rows of the source and the dropped rows of tokens separately, because their units differ."""
    masked_rows = _masked_row_count(statistics)
    dropped_source_rows = sum(statistics.rows_dropped.values()) - masked_rows
    yield from _check_dropped(dropped_source_rows, statistics.rows_read, "rows read", statistics.describe_dropped())
    whole = statistics.blocks + statistics.eval_rows + masked_rows
    yield from _check_dropped(masked_rows, whole, "rows of tokens", "nothing to learn in them", MOST_CUT_SHARE)


def _masked_row_count(statistics: DataStatistics) -> int:
    """Return the number of rows of training and held-out tokens without a learned one, mostly parts of long prompts."""
    return sum(count for reason, count in statistics.rows_dropped.items() if reason.startswith("row of tokens"))


def _check_dropped(dropped: int, whole: int, unit: str, reasons: str, many: float = MANY_SHARE) -> Iterator[Finding]:
    if dropped and dropped / whole >= many:
        what = f"{dropped:,} of {whole:,} {unit} are left out ({percent(dropped / whole)}): {reasons}"
        yield MANY_DROPPED.found(what, "dataset")


def _check_masking(job: Job, statistics: DataStatistics) -> Iterator[Finding]:
    trained = statistics.documents / (statistics.documents + statistics.eval_documents)
    whole = statistics.train_tokens + int(trained * _masked_row_count(statistics)) * job.data.block_size
    learned = statistics.supervised_tokens / whole
    if learned < SMALLEST_LEARNED_SHARE:
        what = f"{statistics.supervised_tokens:,} of about {whole:,} tokens are learned ({percent(learned)})"
        yield LITTLE_LEARNED.found(what, "dataset")
    first_of_rows = statistics.blocks  # the first token of a row is never learned, not even in plain text
    masked = statistics.train_tokens - statistics.supervised_tokens - first_of_rows
    has_prompts = masked > statistics.documents
    if has_prompts and statistics.documents_cut / statistics.documents >= MOST_CUT_SHARE:
        share = percent(statistics.documents_cut / statistics.documents)
        what = f"{statistics.documents_cut:,} of {statistics.documents:,} ({share}) exceed {job.data.block_size} tokens"
        yield ANSWERS_CUT.found(what, "block_size")


def _check_overlap(seen: int, held_out: int, unit: str) -> Iterator[Finding]:
    if seen and seen / held_out >= SEEN_SHARE:
        yield HELD_OUT_SEEN.found(f"{seen:,} of {held_out:,} {unit} are also trained on", "dataset, eval_dataset")
