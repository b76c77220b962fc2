"""What people bring that a toolkit could learn wrongly without a word; each must be named. See seeded_mistakes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TEMPLATE = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Knows two roles, and neither tools nor reasoning."""

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Kyiv"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

Rows = Callable[[int], dict[str, Any]]


def _pair(**more: Any) -> Rows:
    return lambda i: {"question": f"Which number is {i}?", "answer": f"The number {i}.", **more}


def _chat(*turns: dict[str, Any], **more: Any) -> Rows:
    def row(i: int) -> dict[str, Any]:
        end = {"role": "assistant", "content": f"Number {i}."}
        return {"messages": [{"role": "user", "content": f"Which? {i}"}, *turns, end], **more}

    return row


def _last(**message: Any) -> Rows:
    def row(i: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}.", **message}]
        }

    return row


# (id, what the user did, rows, flags, expected, refused)
ROWS: tuple[tuple[str, str, Rows, dict[str, Any], str, bool], ...] = (
    (
        "bad-answers-of-kto",
        "half of the answers marked as bad",
        lambda i: {"prompt": f"{i}?", "completion": f"{i}.", "label": i % 2 == 0},
        {},
        "bad answer",
        True,
    ),
    (
        "bad-answers-of-kto-as-chats",
        "the same as conversations of LLaMA-Factory",
        _chat(kto_tag=False),
        {},
        "bad answer",
        True,
    ),
    (
        "preference-pairs",
        "pairs for DPO",
        lambda i: {"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "No."},
        {},
        "chosen and a rejected",
        True,
    ),
    (
        "preference-conversations",
        "pairs of conversations",
        lambda i: {"chosen": _last()(i)["messages"], "rejected": _last()(i)["messages"]},
        {},
        "chosen and a rejected",
        True,
    ),
    (
        "rejected-beside-text",
        "plain text with the rejected one beside it",
        lambda i: {"text": f"Shelf {i} holds books.", "rejected": "No."},
        {},
        "preference-not-read",
        False,
    ),
    (
        "pictures-of-chats",
        "conversations about images",
        _chat(images=["a.png"]),
        {},
        "refers to media in its column 'images'",
        True,
    ),
    (
        "picture-parts",
        "messages with an image inside",
        _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}),
        {},
        "'image_url'",
        True,
    ),
    (
        "pictures-beside-captions",
        "captions, with the images beside them",
        lambda i: {"caption": f"A shelf with {i} books.", "image": "a.png"},
        {"text_column": "caption"},
        "media-not-read",
        False,
    ),
    (
        "tool-calls-dropped",
        "calls of tools, and a template that does not know them",
        _chat({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}),
        {"chat_template": TEMPLATE},
        "leaves out the tool calls",
        True,
    ),
    (
        "tools-dropped",
        "tools, and a template that does not know them",
        _chat(tools=[TOOL]),
        {"chat_template": TEMPLATE},
        "rendered-away",
        False,
    ),
    (
        "tools-as-text-dropped",
        "the same, as JSON in a string",
        _chat(tools='[{"name": "weather"}]'),
        {"chat_template": TEMPLATE},
        "rendered-away",
        False,
    ),
    (
        "answers-of-tools-dropped",
        "answers of tools, and a template that does not know the role",
        _chat({"role": "tool", "content": "rain"}, {"role": "user", "content": "And now?"}),
        {"chat_template": TEMPLATE},
        "rendered-away",
        False,
    ),
    (
        "unknown-role-dropped",
        "a role that the template does not know",
        _chat({"role": "narrator", "content": "It rains."}),
        {"chat_template": TEMPLATE},
        "rendered-away",
        False,
    ),
    (
        "system-dropped",
        "system messages, and a template without them",
        _chat(system="Be brief."),
        {"chat_template": TEMPLATE},
        "rendered-away",
        False,
    ),
    (
        "reasoning-dropped",
        "reasoning beside the answers, and a template that does not know it",
        _last(reasoning_content="Counting."),
        {"chat_template": TEMPLATE},
        "leaves out the reasoning",
        True,
    ),
    (
        "reasoning-parts-dropped",
        "the same as a part of the content",
        _last(content=[{"type": "thinking", "thinking": "Counting."}, {"type": "text", "text": "One."}]),
        {"chat_template": TEMPLATE},
        "leaves out the reasoning",
        True,
    ),
    (
        "reasoning-in-a-column",
        "reasoning in a column of its own",
        _pair(reasoning="Counting."),
        {},
        "answer-not-read",
        False,
    ),
    (
        "two-answers",
        "a short answer beside the long solution",
        lambda i: {"problem": f"{i}?", "solution": f"It is {i}.", "answer": f"{i}"},
        {},
        "several columns",
        True,
    ),
    ("ratings", "ratings of the answers", _pair(rating=1), {}, "label-not-read", False),
    ("weights-of-rows", "weights of the rows", _pair(weight=0.5), {}, "weight-not-read", False),
    (
        "labels-of-texts",
        "texts of a classification, with their labels",
        lambda i: {"text": f"Shelf {i} holds books about birds.", "label": i % 2},
        {},
        "label-not-read",
        False,
    ),
    (
        "answers-not-read",
        "questions as text, with the answers beside them",
        lambda i: {"text": f"Which number is {i}?", "answer": f"{i}."},
        {},
        "answer-not-read",
        False,
    ),
    (
        "contexts-not-read",
        "answers as text, with what they are about beside them",
        lambda i: {"text": f"It is {i}.", "context": f"The shelf has the number {i}."},
        {},
        "question-not-read",
        False,
    ),
    ("questions-alone", "text_column: question", _pair(), {"text_column": "question"}, "answer-not-read", False),
    (
        "arguments-that-are-no-json",
        "arguments of a call as plain words",
        _chat({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "now"}}]}),
        {},
        "not a JSON object",
        True,
    ),
    (
        "two-ways-of-saying",
        "messages that are no list",
        lambda i: {"messages": f"user: {i}?"},
        {},
        "not a list of messages",
        True,
    ),
)
