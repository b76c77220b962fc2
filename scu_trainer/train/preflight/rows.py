"""What the rows of tokens say: ends that are not learned, repeated documents or tokens, text that is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from scu_trainer.data.statistics import DataStatistics
from scu_trainer.models.fit import embedding_rows
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent
from scu_trainer.train.preflight.tokens import Marks, TokenFacts, scan

TOKENS_OUT_OF_RANGE = Check(
    "tokens-out-of-range",
    "error",
    "a row holds a token that the model has no embedding for: the forward pass would fail",
    "use the tokenizer that belongs to the model, and delete the cached data in cache_dir",
)
END_NOT_LEARNED = Check(
    "end-not-learned",
    "warning",
    "documents end, but no end is learned, so the model never learns to stop",
    "put the end of the assistant's turn inside {% generation %} in the chat template, or set assistant_only_loss: "
    "false",
)
ONLY_ENDS = Check(
    "only-ends-learned",
    "error",
    "only the ends of documents are learned: the answers are empty or masked",
    "look at the completions or the assistant's messages, and at the chat template",
)
DOUBLED_START = Check(
    "start-doubled",
    "warning",
    "most documents begin with two start tokens: one is in the text, and the tokenizer adds another",
    "remove the start token from the texts",
)
UNKNOWN_TOKENS = Check(
    "tokens-unknown",
    "warning",
    "a tenth of the tokens or more are unknown ones: the tokenizer was not made for this text",
    "use a model and tokenizer of this language, or look at the encoding of the file",
)
ONE_TOKEN = Check(
    "tokens-repeat",
    "warning",
    "one token repeats a hundred times or more in a row, and the model would learn to do that",
    "look for these stretches in the data: remove them, or mask them if they are padding",
)
REPEATED = Check(
    "documents-repeated",
    "warning",
    "a fifth of the documents or more repeat others word for word; epochs already do that",
    "remove duplicates, or check that text_column is the right one",
)
NOT_TEXT = Check(
    "text-is-no-text",
    "warning",
    "nearly all texts are paths, addresses, numbers, or conversations written as JSON",
    "name the column that holds the text with text_column; conversations belong as lists into the column messages",
)
SMALL_TOKENIZER = Check(
    "tokenizer-much-smaller",
    "warning",
    "the tokenizer knows far fewer tokens than the model has embeddings: probably they do not belong together",
    "use the tokenizer that belongs to the model",
)

FEWEST_ENDS, FEWEST_DOCUMENTS = 3, 20
DOUBLED_SHARE, UNKNOWN_SHARE, REPEATED_SHARE, NO_TEXT_SHARE = 0.5, 0.1, 0.2, 0.9
ENDS_PER_DOCUMENT = 1.5
SMALLEST_VOCABULARY_SHARE = 0.7
"""Embeddings are rounded up, to multiples of 64 or by a sixth; never by half."""


def before_training(job: Job, parts: TrainingComponents, facts: TokenFacts) -> Iterator[Finding]:
    yield from _vocabulary(job, parts, facts)
    yield from _learned(job, facts)
    yield from _starts(facts)
    if facts.tokens and facts.unknown / facts.tokens >= UNKNOWN_SHARE:
        what = f"{percent(facts.unknown / facts.tokens)} of the tokens are unknown, {facts.among()}"
        yield UNKNOWN_TOKENS.found(what, "model_name_or_path, dataset")
    if facts.run_tokens:
        places, token = facts.longest_run
        longest = f"{json.dumps(parts.processor.decode([token])[:40], ensure_ascii=False)} {places:,} times"
        what = f"{facts.run_tokens:,} learned tokens in such stretches, {facts.among()}; the longest: {longest}"
        yield ONE_TOKEN.found(what, "dataset")
    if is_cut_into_documents(facts, parts.data.statistics):
        yield from _repeated(facts)
        yield from _texts(job, parts.processor, facts)


def is_cut_into_documents(facts: TokenFacts, statistics: DataStatistics) -> bool:
    """Whether ends stand at the end of documents alone; in conversations each turn may have one."""
    if facts.all_rows is None:
        return False
    return facts.ends * facts.all_rows <= ENDS_PER_DOCUMENT * statistics.documents * facts.rows


def _repeated(facts: TokenFacts) -> Iterator[Finding]:
    if facts.documents >= FEWEST_DOCUMENTS and facts.repeated / facts.documents >= REPEATED_SHARE:
        what = f"{facts.repeated:,} of {facts.documents:,} documents repeat others, {facts.among()}"
        yield REPEATED.found(what, "dataset")


def facts_of(parts: TrainingComponents) -> TokenFacts:
    """Of the training rows."""
    return scan(parts.data.train, marks_of(parts.processor, parts.model))


def marks_of(tokenizer: Any, model: Any) -> Marks:
    """What ends a document for the tokenizer, or generation for the model."""
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(generation if isinstance(generation, list) else [generation])} - {None}
    others = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    start, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    return Marks(
        frozenset(ends),
        None if start in others else start,
        None if unknown in {*others, start} else unknown,  # GPT-2 has one token for all of them
    )


def _vocabulary(job: Job, parts: TrainingComponents, facts: TokenFacts) -> Iterator[Finding]:
    rows = embedding_rows(parts.model)
    if rows is None:
        return
    if facts.largest_id >= rows:
        what = f"token {facts.largest_id:,} {facts.among()}; the model has {rows:,} embeddings"
        yield TOKENS_OUT_OF_RANGE.found(what, "model_name_or_path, cache_dir")
    known = len(parts.processor)
    if job.task.task == TEXT and known < SMALLEST_VOCABULARY_SHARE * rows:
        what = f"the tokenizer has {known:,} tokens, the model {rows:,} embeddings"
        yield SMALL_TOKENIZER.found(what, "model_name_or_path")


def _learned(job: Job, facts: TokenFacts) -> Iterator[Finding]:
    where = "assistant_only_loss, chat_template" if job.task.task == TEXT else "dataset"
    if facts.learned and facts.ends_learned == facts.learned:
        yield ONLY_ENDS.found(f"all {facts.learned:,} learned tokens are ends, {facts.among()}", where)
    elif facts.ends >= FEWEST_ENDS and not facts.ends_learned:
        yield END_NOT_LEARNED.found(f"none of {facts.ends:,} ends is learned, {facts.among()}", where)


def _starts(facts: TokenFacts) -> Iterator[Finding]:
    if facts.ends and facts.doubled_starts / facts.ends >= DOUBLED_SHARE:
        what = f"{facts.doubled_starts:,} doubled start tokens beside {facts.ends:,} ends, {facts.among()}"
        yield DOUBLED_START.found(what, "dataset")


# -- is it text? -------------------------------------------------------------------------------------------------------

_PATH = re.compile(r"(https?://|/|\./|~/|[A-Za-z]:\\)\S+|\S+\.(png|jpe?g|wav|mp3|mp4|txt|json|pdf|csv|parquet)", re.I)
_NUMBER = re.compile(r"[+-]?[\d.,]*\d[\d.,]*([eE][+-]?\d+)?")
_CONVERSATION = re.compile(r'[\[{].{0,200}"(messages|conversations|prompt|completion|instruction|role)"\s*:', re.S)
KINDS: dict[str, Callable[[str], bool]] = {
    "paths or addresses": lambda text: _PATH.fullmatch(text) is not None,
    "numbers": lambda text: _NUMBER.fullmatch(text) is not None,
    "conversations as JSON": lambda text: _CONVERSATION.match(text) is not None,
}


def _texts(job: Job, tokenizer: Any, facts: TokenFacts) -> Iterator[Finding]:
    if job.task.task != TEXT:
        return
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in facts.examples]
    texts = [text for text in texts if text]
    if len(texts) < FEWEST_DOCUMENTS:
        return
    for kind, belongs in KINDS.items():
        share = sum(map(belongs, texts)) / len(texts)
        if share >= NO_TEXT_SHARE:
            what = f"{percent(share)} of {len(texts)} texts are {kind}, such as {json.dumps(texts[0][:40])}"
            yield NOT_TEXT.found(what, f"text_column {job.data.text_column}")
