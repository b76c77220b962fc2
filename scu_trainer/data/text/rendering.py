"""Find parts of a conversation that the chat template left out. A template silently drops what it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from scu_trainer.data.messages import is_answer
from scu_trainer.data.records import BadRow, Chat

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
ANYWHERE = ("system", "developer")
"""Roles of messages that templates may move to another place."""


class MessagePart(NamedTuple):
    """``what`` a message says, as ``texts`` that must all be in the rendered text. ``is_target``: it is learned.
    ``is_in_order``: it must follow the parts before it."""

    what: str
    texts: list[str]
    is_target: bool
    message: int = 0
    is_in_order: bool = True


def rendered_away(chat: Chat, text: str, learns_prompt: bool) -> tuple[str, ...]:
    """Describe the parts of ``chat`` that are missing in ``text``. Raises BadRow if one of them should be learned.
    ``learns_prompt``: every token is learned, also of turns that are not the assistant's."""
    missing, place = [], 0
    for part in _parts(chat, learns_prompt):
        ends = [_end_of(piece, text, place if part.is_in_order else 0) for piece in part.texts]
        if None not in ends:
            place = max([place, *ends]) if part.is_in_order else place
        elif part.is_target:
            raise BadRow(
                f"the chat template leaves out the {part.what} of message {part.message}, which should be learned; "
                "give a template that renders it (--chat_template qwen renders tools, calls and reasoning), or remove "
                "it from the row"
            )
        else:
            missing.append(part.what)
    return tuple(dict.fromkeys(missing))


def _parts(chat: Chat, learns_prompt: bool) -> Iterator[MessagePart]:
    for tool in chat.tools or ():
        described = tool.get("function", tool) if isinstance(tool, dict) else {}
        yield MessagePart("tools", [str(described.get("name", ""))], False, is_in_order=False)
    last_question = max((n for n, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(chat.messages):
        is_learned = learns_prompt or (is_answer(message) and number >= (chat.prompt_turns or 0))
        yield from _parts_of(message, number + 1, is_learned, number > last_question)


def _parts_of(message: dict, number: int, is_learned: bool, is_last_answer: bool) -> Iterator[MessagePart]:
    """Yield the parts of one message. Reasoning is a target only after the last question: templates may drop that of
    earlier turns, as models do at inference, which is only counted."""
    if "reasoning_content" in message:
        yield MessagePart("reasoning", [message["reasoning_content"]], is_learned and is_last_answer, number)
    content = message.get("content", "")
    if "<think>" in content:
        thoughts = _THOUGHT.findall(content)
        yield MessagePart("reasoning", [thought[7:-8] for thought in thoughts], is_learned and is_last_answer, number)
        content = content.rpartition("</think>")[2]
    role = message["role"]
    what = f"words of the role {role!r}"
    yield MessagePart(what, [content], is_learned, number, is_in_order=role not in ANYWHERE)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield MessagePart("tool calls", [function["name"], *_leaves(function["arguments"])], is_learned, number, False)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the names and values in an argument, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _end_of(piece: str, text: str, start: int) -> int | None:
    """Return where ``piece`` ends in ``text`` after ``start``, as it is or escaped as JSON; None if it is missing."""
    piece = piece.strip()
    if not piece:
        return start
    forms = (piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1])
    for form in dict.fromkeys(forms):
        place = text.find(form, start)
        if place >= 0:
            return place + len(form)
    return None
