"""A record: one row of a source as it was read, before anybody knows whether it is usable; and what a row can say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional, Union


class Record(NamedTuple):
    """``value`` holds the columns, or is None and ``problem`` says why the row cannot be read.

    ``place`` names the row for a person, for instance "notes.jsonl row 3". Rows count from 1.
    """

    place: str
    value: Optional[dict]
    problem: Optional[str] = None


def table_records(name: str, rows: Iterable[dict]) -> Iterator[Record]:
    """Of the rows of an Arrow table, whose objects have keys with nothing in them because another one has these."""
    for number, row in enumerate(rows, start=1):
        yield Record(f"{name} row {number}", {column: _without_padding(value) for column, value in row.items()})


def _without_padding(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_padding(inner) for key, inner in value.items() if inner is not None}
    return [_without_padding(inner) for inner in value] if isinstance(value, list) else value


AS_PLAIN_TEXT = " as plain text, because there is no chat template"
"""Behind the name of a format whose questions were laid out by ``plain_prompt``."""


class BadRow(Exception):
    """One row that cannot be used; its message says why. It stays in this room: counted, or turned into a DataError."""


class BadSample(BadRow):
    """An image or a recording. ``reason``: the same for all with this fault; the message has the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Text(NamedTuple):
    """Every token is learned."""

    text: str


class Completion(NamedTuple):
    """With ``completion_only_loss`` the tokens of ``completion`` are learned."""

    prompt: str
    completion: str


def plain_prompt(texts: Iterable[str]) -> str:
    """A conversation without a chat template, up to the answer: a blank line behind each part."""
    return "".join(f"{text}\n\n" for text in texts if text.strip())


class Pair(NamedTuple):
    """A question and its answer, after earlier ones: a conversation where the tokenizer has a template, else text.

    With ``completion_only_loss`` the answers are learned. ``history``: (question, answer) of earlier turns.
    """

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
    """With ``assistant_only_loss`` the assistant's turns are learned.

    With ``prompt_turns`` the row was a prompt and a completion made of messages: ``completion_only_loss`` decides, and
    the turns after the first ``prompt_turns`` are learned. ``is_pair``: it was a question with its answer, for which
    ``completion_only_loss`` decides too.
    """

    messages: list[dict]
    tools: Optional[list] = None
    prompt_turns: Optional[int] = None
    is_pair: bool = False


Content = Union[Text, Completion, Pair, Chat]
