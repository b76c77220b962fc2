"""What a row says: plain text, a prompt with its completion, or a conversation. Checked here, tokenized elsewhere.

The columns decide, row by row: ``messages`` or ``conversations``, then ``prompt`` with ``completion``, else the text
column. A text column that was named in the settings and is there comes first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from scu_trainer.data.records import BadRow
from scu_trainer.errors import nearest

DEFAULT_TEXT_COLUMN = "text"
CHAT_COLUMNS = ("messages", "conversations")
KNOWN_COLUMNS = (*CHAT_COLUMNS, "prompt", "completion", "tools")

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class Text(NamedTuple):
    """Every token is learned."""

    text: str


class Completion(NamedTuple):
    """With ``completion_only_loss`` the tokens of ``completion`` are learned."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """With ``assistant_only_loss`` the assistant's turns are learned.

    With ``prompt_turns`` the row was a prompt and a completion made of messages: ``completion_only_loss`` decides, and
    the turns after the first ``prompt_turns`` are learned.
    """

    messages: list[dict]
    tools: Optional[list] = None
    prompt_turns: Optional[int] = None


def understand(row: dict, text_column: str) -> Union[Text, Completion, Chat]:
    """The content of one row. Raises BadRow with the reason if it has none that can be used."""
    if text_column != DEFAULT_TEXT_COLUMN and text_column in row:
        return Text(_string(row, text_column))
    for column in CHAT_COLUMNS:
        if row.get(column) is not None:
            return Chat(_messages(row[column], column), _tools(row))
    if "prompt" in row and "completion" in row:
        return _prompt_and_completion(row)
    if text_column not in row:
        raise BadRow(_no_column(row, text_column))
    return Text(_string(row, text_column))


def _no_column(row: dict, text_column: str) -> str:
    example = next((column for column, value in row.items() if isinstance(value, str)), "X")
    return (
        f"has no column {text_column!r}; its columns: {', '.join(map(str, row)) or 'none'}"
        f"{nearest(text_column, map(str, row))}. Name the one with the text, for instance --text_column {example}, "
        "or use the columns messages, or prompt and completion"
    )


def _string(row: dict, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds {type(value).__name__}, not text")
    return value


def _prompt_and_completion(row: dict) -> Union[Completion, Chat]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return Chat(before + after, _tools(row), prompt_turns=len(before))
    return Completion(_string(row, "prompt"), _string(row, "completion"))


def _tools(row: dict) -> Optional[list]:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"column 'tools' holds {type(tools).__name__}, not a list")
    return tools


def _messages(value, column: str) -> list[dict]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise BadRow(f"column {column!r} holds {found}, not a list of messages")
    return [_message(item, f"message {number} of {column!r}") for number, item in enumerate(value, start=1)]


def _message(item, where: str) -> dict:
    if not isinstance(item, dict):
        raise BadRow(f"{where} is {type(item).__name__}, not an object with role and content")
    if isinstance(item.get("from"), str) and "value" in item:
        item = {"role": _SHAREGPT_ROLES.get(item["from"], item["from"]), "content": item["value"]}
    message = {key: value for key, value in item.items() if value is not None}  # arrow fills absent keys with None
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no role; a message is {{'role': 'user', 'content': '...'}}")
    if "content" not in message and "tool_calls" not in message:
        raise BadRow(f"{where} has no content; a message is {{'role': 'user', 'content': '...'}}")
    if not isinstance(message.get("content", ""), str):
        raise BadRow(f"content of {where} is {type(message['content']).__name__}; only text can be used")
    return message
