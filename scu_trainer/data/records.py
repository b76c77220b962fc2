"""Records, which are rows as they were read and may be unusable, and the kinds of content that a row can hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional, Union


class Record(NamedTuple):
    """A row as it was read. ``value`` holds its columns; if it is None, ``problem`` says why the row cannot be read.
    ``place`` names the row in messages, for instance "notes.jsonl row 3". Rows count from 1."""

    place: str
    value: Optional[dict]
    problem: Optional[str] = None


def table_records(name: str, rows: Iterable[dict]) -> Iterator[Record]:
    """Turn rows of an Arrow table into records, without keys that Arrow adds to an object because another has them."""
    for number, row in enumerate(rows, start=1):
        yield Record(f"{name} row {number}", {column: _without_padding(value) for column, value in row.items()})


def _without_padding(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_padding(inner) for key, inner in value.items() if inner is not None}
    return [_without_padding(inner) for inner in value] if isinstance(value, list) else value


AS_PLAIN_TEXT = " as plain text, because there is no chat template"
"""Follows the name of a format if its questions were rendered by ``plain_prompt``."""


class BadRow(Exception):
    """A row that cannot be used; the message says why. Whoever reads rows counts it as dropped or raises DataError."""


class BadSample(BadRow):
    """An unusable image or recording. ``reason`` is the same for all with this fault; the message has the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Text(NamedTuple):
    """Plain text. Every token is learned."""

    text: str


class Completion(NamedTuple):
    """A prompt and its completion. With ``completion_only_loss`` only the tokens of ``completion`` are learned."""

    prompt: str
    completion: str


def plain_prompt(texts: Iterable[str]) -> str:
    """Render a conversation up to the answer without a chat template: each part is followed by a blank line."""
    return "".join(f"{text}\n\n" for text in texts if text.strip())


class Pair(NamedTuple):
    """A question and its answer, with earlier turns (``history``: their questions and answers). It becomes a
    conversation if the tokenizer has a chat template, else a prompt and completion. With ``completion_only_loss`` only
    answers are learned: of a conversation all, else the last."""

    prompt: str
    answer: str
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()

    def as_chat(self) -> Chat:
        turns = [
            turn for question, answer in (*self.history, (self.prompt, self.answer)) for turn in (question, answer)
        ]
        messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
        system = [{"role": "system", "content": self.system}] if self.system.strip() else []
        return Chat([*system, *messages], is_pair=True)

    def as_completion(self) -> Completion:
        before = [self.system, *(text for turn in self.history for text in turn), self.prompt]
        return Completion(plain_prompt(before), self.answer)


class Chat(NamedTuple):
    """A conversation. With ``assistant_only_loss`` only the assistant's turns are learned. If the row was a prompt and
    a completion made of messages, ``completion_only_loss`` decides instead, and turns after the first ``prompt_turns``
    are learned. It also decides for a question and its answer (``is_pair``)."""

    messages: list[dict]
    tools: Optional[list] = None
    prompt_turns: Optional[int] = None
    is_pair: bool = False


Content = Union[Text, Completion, Pair, Chat]
