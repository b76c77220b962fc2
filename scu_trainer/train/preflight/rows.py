"""Checks of the rows of tokens: ends that are not learned, repeated documents or tokens, and data that is not text."""

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
from scu_trainer.train.preflight.tokens import SpecialTokens, TokenCounts, scan

TOKENS_OUT_OF_RANGE = Check(
    "tokens-out-of-range",
    "error",
    "a row contains a token without an embedding in the model, so the forward pass would fail",
    "use the tokenizer of the model, and delete the cached data in cache_dir",
)
END_NOT_LEARNED = Check(
    "end-not-learned",
    "warning",
    "documents end, but no end token is learned, so the model never learns to stop",
    "put the end of the assistant's turn inside {% generation %} in the chat template, or set assistant_only_loss: "
    "false",
)
ONLY_ENDS = Check(
    "only-ends-learned",
    "error",
    "only the ends of documents are learned, because the answers are empty or masked",
    "check the completions or the assistant's messages, and the chat template",
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
    "a tenth of the tokens or more are unknown: the tokenizer was not made for this text",
    "use a model and tokenizer for this language, or check the encoding of the file",
)
ONE_TOKEN = Check(
    "tokens-repeat",
    "warning",
    "one token is repeated a hundred times or more in a row, and the model would learn to do that",
    "look for these sequences in the data, and remove them, or mask them if they are padding",
)
REPEATED = Check(
    "documents-repeated",
    "warning",
    "a fifth of the documents or more are exact copies of others, which only adds to the repetition by epochs",
    "remove duplicates, or check that text_column is the right one",
)
NOT_TEXT = Check(
    "text-is-no-text",
    "warning",
    "nearly all texts are paths, addresses, numbers, or conversations written as JSON",
    "set text_column to the column with the text; put conversations as lists into the column messages",
)
SMALL_TOKENIZER = Check(
    "tokenizer-much-smaller",
    "warning",
    "the tokenizer has far fewer tokens than the model has embeddings, so they probably do not belong together",
    "use the tokenizer of the model",
)

FEWEST_ENDS, FEWEST_DOCUMENTS = 3, 20
DOUBLED_SHARE, UNKNOWN_SHARE, REPEATED_SHARE, NO_TEXT_SHARE = 0.5, 0.1, 0.2, 0.9
ENDS_PER_DOCUMENT = 1.5
SMALLEST_VOCABULARY_SHARE = 0.7
"""Smallest usual ratio of tokens to embeddings, whose number is often rounded up, to a multiple of 64 or by a sixth,
but never by half."""


def before_training(job: Job, parts: TrainingComponents, facts: TokenCounts) -> Iterator[Finding]:
    yield from _check_vocabulary(job, parts, facts)
    yield from _check_learned(job, facts)
    yield from _check_starts(facts)
    if facts.tokens and facts.unknown / facts.tokens >= UNKNOWN_SHARE:
        what = f"{percent(facts.unknown / facts.tokens)} of the tokens are unknown, {facts.sample_phrase()}"
        yield UNKNOWN_TOKENS.found(what, "model_name_or_path, dataset")
    if facts.run_tokens:
        places, token = facts.longest_run
        longest = f"{json.dumps(parts.processor.decode([token])[:40], ensure_ascii=False)} {places:,} times"
        what = f"{facts.run_tokens:,} learned tokens in such sequences, {facts.sample_phrase()}; the longest: {longest}"
        yield ONE_TOKEN.found(what, "dataset")
    if is_cut_into_documents(facts, parts.data.statistics):
        yield from _check_repeated(facts)
        yield from _check_texts(job, parts.processor, facts)


def is_cut_into_documents(facts: TokenCounts, statistics: DataStatistics) -> bool:
    """Whether end tokens occur only at the ends of documents; in conversations each turn may have one."""
    if facts.all_rows is None:
        return False
    return facts.ends * facts.all_rows <= ENDS_PER_DOCUMENT * statistics.documents * facts.rows


def _check_repeated(facts: TokenCounts) -> Iterator[Finding]:
    if facts.documents >= FEWEST_DOCUMENTS and facts.repeated / facts.documents >= REPEATED_SHARE:
        what = f"{facts.repeated:,} of {facts.documents:,} documents repeat others, {facts.sample_phrase()}"
        yield REPEATED.found(what, "dataset")


def facts_of(parts: TrainingComponents) -> TokenCounts:
    """Return the counts over the tokens of the training rows."""
    return scan(parts.data.train, special_tokens_of(parts.processor, parts.model))


def special_tokens_of(tokenizer: Any, model: Any) -> SpecialTokens:
    """Return the tokens that end a document (tokenizer) or generation (model), the start token and the unknown one."""
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(generation if isinstance(generation, list) else [generation])} - {None}
    others = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    start, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    return SpecialTokens(
        frozenset(ends),
        None if start in others else start,
        None if unknown in {*others, start} else unknown,  # GPT-2 uses one token for all of them
    )


def _check_vocabulary(job: Job, parts: TrainingComponents, facts: TokenCounts) -> Iterator[Finding]:
    rows = embedding_rows(parts.model)
    if rows is None:
        return
    if facts.largest_id >= rows:
        what = f"token {facts.largest_id:,} {facts.sample_phrase()}; the model has {rows:,} embeddings"
        yield TOKENS_OUT_OF_RANGE.found(what, "model_name_or_path, cache_dir")
    known = len(parts.processor)
    if job.task.task == TEXT and known < SMALLEST_VOCABULARY_SHARE * rows:
        what = f"the tokenizer has {known:,} tokens, the model {rows:,} embeddings"
        yield SMALL_TOKENIZER.found(what, "model_name_or_path")


def _check_learned(job: Job, facts: TokenCounts) -> Iterator[Finding]:
    where = "assistant_only_loss, chat_template" if job.task.task == TEXT else "dataset"
    if facts.learned and facts.ends_learned == facts.learned:
        yield ONLY_ENDS.found(f"all {facts.learned:,} learned tokens are end tokens, {facts.sample_phrase()}", where)
    elif facts.ends >= FEWEST_ENDS and not facts.ends_learned:
        yield END_NOT_LEARNED.found(f"none of {facts.ends:,} end tokens is learned, {facts.sample_phrase()}", where)


def _check_starts(facts: TokenCounts) -> Iterator[Finding]:
    if facts.ends and facts.doubled_starts / facts.ends >= DOUBLED_SHARE:
        what = f"{facts.doubled_starts:,} doubled start tokens and {facts.ends:,} end tokens, {facts.sample_phrase()}"
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


def _check_texts(job: Job, tokenizer: Any, facts: TokenCounts) -> Iterator[Finding]:
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
