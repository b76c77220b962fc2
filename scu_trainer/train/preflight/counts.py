"""What the books of the data say: rows dropped, cut, held out, held out twice."""

from __future__ import annotations

from collections.abc import Iterator

from scu_trainer.data.books import DataBooks
from scu_trainer.data.samples import SampleBooks
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

MANY_DROPPED = Check(
    "many-dropped",
    "warning",
    "a tenth of the rows that were read is left out of training, or half of the rows of tokens, or more",
    "look at the first example that is named, and mend the data or the setting behind it",
)
LITTLE_LEARNED = Check(
    "little-learned",
    "warning",
    "less than one token in 200 is learned: masking leaves next to nothing of the rows",
    "look at completion_only_loss, assistant_only_loss and the chat template, or shorten the prompts",
)
ANSWERS_CUT = Check(
    "conversations-cut",
    "warning",
    "rows with a prompt are longer than block_size in most cases: what follows a cut is learned without its prompt",
    "raise block_size",
)
HELD_OUT_SEEN = Check(
    "held-out-seen",
    "warning",
    "held-out documents or samples are also trained on, so their score flatters",
    "remove duplicates from the dataset before it is split, or mend eval_dataset",
)
HELD_OUT_TINY = Check(
    "held-out-tiny",
    "warning",
    "so little is held out that its score is mostly chance",
    "raise validation_split_percentage, or give an eval_dataset",
)
MOSTLY_UNKNOWN = Check(
    "words-unknown",
    "warning",
    "a third of the words or more are <unk>",
    "raise vocabulary_size or lower min_word_count, or look whether text_column holds words",
)

MANY_SHARE = 0.1
SMALLEST_LEARNED_SHARE = 0.005
MOST_CUT_SHARE = 0.5
SEEN_SHARE = 0.02
UNKNOWN_SHARE = 1 / 3
FEWEST_DOCUMENTS, FEWEST_TOKENS, FEWEST_SAMPLES = 5, 2000, 20


def before_training(job: Job, parts: TrainingComponents) -> Iterator[Finding]:
    books = parts.data.books
    if isinstance(books, SampleBooks):
        yield from _samples(job, books)
    else:
        yield from _documents(job, books)


def _samples(job: Job, books: SampleBooks) -> Iterator[Finding]:
    dropped = sum(books.dropped.values())
    yield from _dropped(dropped, max(books.read, dropped), f"{books.item}s", books.dropped_in_words())
    yield from _seen(books.heldout_duplicates, books.eval, f"held-out {books.item}s")
    if books.eval and job.training.eval_strategy != "no" and books.eval < FEWEST_SAMPLES:
        yield HELD_OUT_TINY.found(f"{books.eval} {books.item}s are held out", "validation_split_percentage")


def _documents(job: Job, books: DataBooks) -> Iterator[Finding]:
    if books.streaming:
        return  # what was read so far stands for nothing
    yield from _dropped_documents(books)
    yield from _masking(job, books)
    yield from _seen(books.heldout_duplicates or 0, books.eval_documents, "held-out documents")
    is_tiny = books.eval_documents < FEWEST_DOCUMENTS and books.eval_tokens < FEWEST_TOKENS
    if books.eval_documents and job.training.eval_strategy != "no" and is_tiny:
        what = f"{books.eval_documents} documents with {books.eval_tokens:,} tokens are held out"
        yield HELD_OUT_TINY.found(what, "validation_split_percentage")
    words = getattr(books, "words", 0)
    if words and books.unknown_words / words >= UNKNOWN_SHARE:
        what = f"{percent(books.unknown_words / words)} of the training words are <unk>"
        yield MOSTLY_UNKNOWN.found(what, "vocabulary_size")


def _dropped_documents(books: DataBooks) -> Iterator[Finding]:
    """Rows of the source, and rows of tokens, which are counted in other units."""
    of_tokens = _rows_of_masked_tokens(books)
    of_source = sum(books.rows_dropped.values()) - of_tokens
    yield from _dropped(of_source, books.rows_read, "rows read", books.dropped_in_words())
    whole = books.blocks + books.eval_rows + of_tokens
    yield from _dropped(of_tokens, whole, "rows of tokens", "nothing to learn in them", MOST_CUT_SHARE)


def _rows_of_masked_tokens(books: DataBooks) -> int:
    """Of training and held-out documents together: parts of long prompts, mostly."""
    return sum(count for reason, count in books.rows_dropped.items() if reason.startswith("row of tokens"))


def _dropped(dropped: int, whole: int, unit: str, reasons: str, many: float = MANY_SHARE) -> Iterator[Finding]:
    if dropped and dropped / whole >= many:
        what = f"{dropped:,} of {whole:,} {unit} are left out ({percent(dropped / whole)}): {reasons}"
        yield MANY_DROPPED.found(what, "dataset")


def _masking(job: Job, books: DataBooks) -> Iterator[Finding]:
    trained = books.documents / (books.documents + books.eval_documents)
    whole = books.train_tokens + int(trained * _rows_of_masked_tokens(books)) * job.data.block_size
    learned = books.supervised_tokens / whole
    if learned < SMALLEST_LEARNED_SHARE:
        what = f"{books.supervised_tokens:,} of about {whole:,} tokens are learned ({percent(learned)})"
        yield LITTLE_LEARNED.found(what, "dataset")
    first_of_rows = books.blocks  # never learned, in plain text either
    masked = books.train_tokens - books.supervised_tokens - first_of_rows
    has_prompts = masked > books.documents
    if has_prompts and books.documents_cut / books.documents >= MOST_CUT_SHARE:
        share = percent(books.documents_cut / books.documents)
        what = f"{books.documents_cut:,} of {books.documents:,} ({share}) exceed {job.data.block_size} tokens"
        yield ANSWERS_CUT.found(what, "block_size")


def _seen(seen: int, held_out: int, unit: str) -> Iterator[Finding]:
    if seen and seen / held_out >= SEEN_SHARE:
        yield HELD_OUT_SEEN.found(f"{seen:,} of {held_out:,} {unit} are also trained on", "dataset, eval_dataset")
