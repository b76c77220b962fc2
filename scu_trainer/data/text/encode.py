"""Encode records as documents: token ids, and labels that say which tokens are learned."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Optional, TypeVar

import numpy
import xxhash

from scu_trainer.data.formats import Columns, read_content
from scu_trainer.data.messages import KNOWN_ROLES, has_content, is_answer
from scu_trainer.data.records import AS_PLAIN_TEXT, BadRow, Chat, Completion, Content, Pair, Record, Text
from scu_trainer.data.store import digest_of
from scu_trainer.data.text.chat import chat_template_of, encode_chat, keys_left_out
from scu_trainer.data.text.rendering import rendered_away
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings

Item = TypeVar("Item")

NOT_LEARNED = -100
RULES = ("completion_only_loss", "assistant_only_loss", "skip_bad_rows")
UNREADABLE, NOTHING_TO_LEARN = "unreadable row", "no token to learn"
EMPTY, NO_ANSWER = "empty text", "empty answer"

BATCH_CHARACTERS = 2_000_000  # bounds memory: a token costs some 36 bytes while it is a Python int
BATCH_RECORDS = 512


class Reading(NamedTuple):
    """How a row was read: its format, the columns that were not used, and what the chat template left out.
    ``unknown_roles``: the role of each turn that is not learned because its role is unknown. ``empty_answers``: how
    many answers are not learned because they are empty, in a row with other answers."""

    format: str
    not_used: tuple[str, ...]
    rendered_away: tuple[str, ...] = ()
    unknown_roles: tuple[str, ...] = ()
    empty_answers: int = 0


class Document(NamedTuple):
    """``input_ids`` and ``labels``: int32 of shape (tokens,), ended with eos; labels are -100 where not learned."""

    input_ids: numpy.ndarray
    labels: numpy.ndarray
    name: str
    utf8_bytes: int
    read: Optional[Reading] = None

    @property
    def digest(self) -> int:
        """Equal for documents with the same tokens."""
        return xxhash.xxh3_64_intdigest(self.input_ids.tobytes()) - 2**63


class Dropped(NamedTuple):
    """A row that did not become a document, and why."""

    reason: str
    example: str


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the rules of the settings. It can be sent to another process."""

    settings: DataSettings
    tokenizer: object
    model_name: str

    @functools.cached_property
    def columns(self) -> Columns:
        return Columns.of(self.settings)

    @property
    def identity(self) -> str:
        """A digest that changes whenever the same rows would give other tokens."""
        return digest_of(
            self.columns, [getattr(self.settings, name) for name in RULES], _tokenizer_state(self.tokenizer)
        )

    def encode(self, records: list[Record]) -> list[Document | Dropped]:
        """Return one result per record."""
        rows = [self._understand(record) for record in records]
        texts = [row[0].text for row in rows if not isinstance(row, Dropped) and isinstance(row[0], Text)]
        ids = iter(self._tokenize(texts))
        return [
            row if isinstance(row, Dropped) else self._encode_content(record, *row, ids)
            for record, row in zip(records, rows, strict=True)
        ]

    def _understand(self, record: Record) -> tuple[Content, Reading] | Dropped:
        """A question with its answer becomes a conversation or, without a chat template, a prompt and completion."""
        try:
            if record.problem:
                raise BadRow(record.problem)
            content, name, not_used = read_content(record.value, self.columns)
        except BadRow as error:
            return Dropped(UNREADABLE, f"{record.place}: {error}")
        if isinstance(content, Pair):
            has_template = getattr(self.tokenizer, "chat_template", None) is not None
            content = content.as_chat() if has_template else content.as_completion()
            name += " by the chat template" if has_template else AS_PLAIN_TEXT
        if not _has_something_to_learn(content):
            return Dropped(EMPTY if isinstance(content, Text) else NO_ANSWER, record.place)
        return content, Reading(name, not_used)

    def _encode_content(
        self, record: Record, content: Content, read: Reading, ids_of_texts: Iterator[list[int]]
    ) -> Document | Dropped:
        if isinstance(content, Text):
            ids = next(ids_of_texts)
            return self._finish_document(ids, [True] * len(ids), record, content.text, read)
        if isinstance(content, Completion):
            return self._encode_completion(record, content, read)
        try:
            return self._encode_chat(record, content, read)
        except BadRow as error:
            return Dropped(UNREADABLE, f"{record.place}: {error}")

    def _encode_completion(self, record: Record, content: Completion, read: Reading) -> Document | Dropped:
        # Tokenized separately, as the prompt is at inference: no token may span the boundary.
        prompt = prompt_ids(self.tokenizer, content.prompt)
        completion = self._tokenize([content.completion], add_special_tokens=False)[0]
        learned = [not self.settings.completion_only_loss] * len(prompt) + [True] * len(completion)
        return self._finish_document(prompt + completion, learned, record, content.prompt + content.completion, read)

    def _encode_chat(self, record: Record, content: Chat, read: Reading) -> Document | Dropped:
        template = chat_template_of(self.tokenizer, self.model_name)
        part = self._learned_part(content)
        empty = [] if part == "all" else [message for message in _answers(content) if not has_content(message)]
        for message in empty:
            message["weight"] = 0
        ids, learned, text, left_out = encode_chat(self.tokenizer, template, content, part)
        missing = rendered_away(content, text, learns_prompt=all(learned)) + left_out
        turns = content.messages if part == "assistant" else ()
        unknown = tuple(turn["role"] for turn in turns if turn["role"] not in KNOWN_ROLES)
        unread = [f"{key} of messages" for key in keys_left_out(self.tokenizer, content, text)]
        read = read._replace(
            not_used=(*read.not_used, *unread),
            rendered_away=missing,
            unknown_roles=unknown,
            empty_answers=len(empty),
        )
        # Templates add a line break after their last end marker, so eos may be the last token but one.
        document = self._finish_document(ids, learned, record, text, read, end_within=2)
        if isinstance(document, Dropped) and unknown:
            names = ", ".join(map(repr, dict.fromkeys(unknown)))
            return document._replace(example=f"{record.place}, which has an unknown role: {names}")
        return document

    def _learned_part(self, content: Chat) -> str:
        if content.is_pair:
            return "assistant" if self.settings.completion_only_loss else "all"
        if content.prompt_turns is not None:
            return "completion" if self.settings.completion_only_loss else "all"
        return "assistant" if self.settings.assistant_only_loss else "all"

    def _tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _finish_document(
        self,
        ids: list[int],
        learned: list[bool],
        record: Record,
        text: str,
        read: Reading,
        end_within: int = 1,
    ) -> Document | Dropped:
        """Append eos unless it is among the last ``end_within`` tokens. It is learned if it follows a learned token."""
        end = self.tokenizer.eos_token_id
        if end is not None and end not in ids[-end_within:]:
            ids, learned = [*ids, end], [*learned, bool(learned) and learned[-1]]
        input_ids = numpy.asarray(ids, dtype=numpy.int32)
        labels = numpy.where(learned, input_ids, numpy.int32(NOT_LEARNED)).astype(numpy.int32)
        if not (labels[1:] != NOT_LEARNED).any():  # the first token has nothing before it to be predicted from
            return Dropped(NOTHING_TO_LEARN, record.place)
        return Document(input_ids, labels, record.place, len(text.encode("utf-8", "surrogatepass")), read)


def _has_something_to_learn(content: Content) -> bool:
    """Whether the text, the completion or an answer is not empty. A conversation may also have no answers at all."""
    if not isinstance(content, Chat):
        return bool((content.text if isinstance(content, Text) else content.completion).strip())
    if content.is_pair:
        return bool(content.messages[-1]["content"].strip())
    answers = _answers(content)
    return not answers or any(map(has_content, answers))


def _answers(chat: Chat) -> list[dict]:
    """Return the answers to learn, without those in the prompt."""
    return [message for message in chat.messages[chat.prompt_turns or 0 :] if is_answer(message)]


def prompt_ids(tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that will be continued, without the end token that some tokenizers add to every
    text. An end token that is part of ``text`` stays."""
    encoding = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, is_added = encoding["input_ids"], encoding["special_tokens_mask"]
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    return ids[:-1] if ids and is_added[-1] and ids[-1] in ends else ids


def _tokenizer_state(tokenizer) -> list:
    """Return a JSON-like description of everything that decides the token ids of a text."""
    template = getattr(tokenizer, "chat_template", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if not tokenizer.is_fast:
        return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special, template]
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return [{**backend, "padding": None, "truncation": None}, special, template]  # calls change these two


def encode_records(records: Iterable[Record], encoder: Encoder, processes: int = 1) -> Iterator[Document | Dropped]:
    """Yield one result per record, in order. Only a few batches are in memory."""
    batches = batched(records, lambda record: _count_characters(record.value), BATCH_RECORDS, BATCH_CHARACTERS)
    begun = list(islice(batches, 2)) if processes > 1 else []
    if len(begun) > 1:  # workers take a second or more to start and cannot share a single batch
        yield from _encoded_by_workers(chain(begun, batches), encoder, processes)
        return
    for batch in chain(begun, batches):
        yield from encoder.encode(batch)


def _encoded_by_workers(batches: Iterator[list[Record]], encoder: Encoder, processes: int):
    """Submit batches in rounds: ``map`` would read the whole source first. Raises DataError if a worker has died."""
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    # Spawned, not forked: this process may hold threads of torch and tokenizers.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, context, _start_worker, (encoder,)) as pool:
            while round_of_batches := list(islice(batches, 4 * processes)):
                for results in pool.map(_encode_in_worker, round_of_batches):
                    yield from results
    except BrokenProcessPool as error:
        raise DataError(
            f"one of the {processes} processes of preprocessing_num_workers died: it was killed, usually because "
            'memory ran out, or it ran the calling script again, which has no `if __name__ == "__main__":`; set '
            "preprocessing_num_workers: 1, or put the code of the script under that line"
        ) from error


def _start_worker(encoder: Encoder) -> None:
    """Store the encoder once per process: a tokenizer with a large vocabulary takes megabytes to send."""
    from multiprocessing import parent_process

    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    # A parent that was killed ends none, so each worker watches it.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def _encode_in_worker(batch: list[Record]) -> list[Document | Dropped]:
    return _worker_encoder.encode(batch)


def batched(
    items: Iterable[Item], size_of: Callable[[Item], int], most_items: int, most_size: int
) -> Iterator[list[Item]]:
    """Yield ``items`` in lists. A list ends with ``most_items`` items, or when its total size reaches ``most_size``."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) == most_items or size >= most_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _count_characters(value) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_characters, value.values()))
    return sum(map(_count_characters, value)) if isinstance(value, list) else 0
