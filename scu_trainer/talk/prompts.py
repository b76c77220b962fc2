"""Read a file of prompts, in any of the supported formats, as one conversation per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data.formats import (
    CHAT_COLUMNS,
    SYSTEMS,
    TOOLS,
    are_messages,
    media_column,
    question_messages,
    with_system_prompt,
)
from scu_trainer.data.messages import messages_of, tools_of
from scu_trainer.data.readers import kind_of, read_file
from scu_trainer.data.records import BadRow
from scu_trainer.errors import DataError
from scu_trainer.settings.base import short

QUESTIONS = ("prompt", "instruction", "question", "problem", "query", "text")
ALLOWED = (
    "a column messages or conversations (turns, the last one by the user), or one of prompt, instruction, question, "
    "problem, query (optionally with input or context, system and history), text; a .txt file has one prompt per line"
)


@dataclass(frozen=True)
class PromptRow:
    """A prompt. ``place``: names the row in messages, for example "questions.jsonl row 3"."""

    place: str
    messages: list[dict[str, str]]


def read_prompts(path: Path) -> list[PromptRow]:
    """Return all prompts of a file. No row is skipped: raises DataError, with its place, for a row without a prompt."""
    if kind_of(path) == ".txt":
        rows = [PromptRow(f"{path.name} line {number}", _as_messages(line.strip())) for number, line in _lines(path)]
    else:
        rows = [PromptRow(record.place, _messages_of(record)) for record in read_file(path, "text")]
    if not rows:
        raise DataError(f"{path} has no prompt; give {ALLOWED}")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    text = "".join(record.value["text"] for record in read_file(path, "text"))
    yield from ((number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip())


def _as_messages(text: str, system: str = "") -> list[dict[str, str]]:
    begin = [{"role": "system", "content": system}] if system else []
    return [*begin, {"role": "user", "content": text}]


def _messages_of(record: Any) -> list[dict[str, str]]:
    if record.value is None:
        raise DataError(f"{record.place}: {record.problem}")
    row = record.value
    turns = next((name for name in CHAT_COLUMNS if row.get(name)), None)
    turns = turns or ("prompt" if are_messages(row.get("prompt")) else None)
    if turns is not None:
        return _without_answer(record.place, row, turns)
    name = next((name for name in QUESTIONS if _text_or_none(row.get(name))), None)
    if name is None:
        columns = ", ".join(map(str, row)) or "none"
        empty = next((f", but {name} is {short(row[name])}" for name in QUESTIONS if name in row), "")
        advice = "write a prompt there, or remove the row" if empty else f"give {ALLOWED}"
        raise DataError(f"{record.place} has the columns {columns}{empty}; {advice}")
    try:
        if name != "text":
            _refuse_unseen(row)
        if name == "text" or (name == "prompt" and "completion" in row):  # these formats have no context column
            return _as_messages(row[name], next(filter(_text_or_none, map(row.get, SYSTEMS)), ""))
        return question_messages(row, name)
    except BadRow as error:
        raise DataError(f"{record.place}: {error}") from error


def _text_or_none(value: Any) -> Optional[str]:
    return value if isinstance(value, str) and value.strip() else None


def _refuse_unseen(row: dict) -> None:
    """Raise BadRow if the row has tools or media, because the prompt would be answered without them."""
    tools, media = next((name for name in TOOLS if tools_of(row.get(name))), None), media_column(row)
    if tools is not None or media is not None:
        unseen = f"the tools in {tools!r}" if tools is not None else f"the media in {media!r}"
        raise BadRow(f"the model would not see {unseen}; remove the column")


def _without_answer(place: str, row: dict, column: str) -> list[dict[str, str]]:
    """Return the messages of the row without the answer at the end, if there is one. Raises DataError."""
    try:
        messages, _ = with_system_prompt(row, messages_of(row[column], column), None)
        _refuse_unseen(row)
    except BadRow as error:
        raise DataError(f"{place}: {error}") from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{place}: {column} has no turn before the answer")
    if not any(_text_or_none(message["content"]) for message in messages):
        raise DataError(f"{place}: {column} has no turn with text; write a prompt, or remove the row")
    return messages
