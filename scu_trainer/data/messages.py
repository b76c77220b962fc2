"""Normalize the messages of conversations in datasets to the form that chat templates expect.

The input is messages of OpenAI (content is a string, null or a list of parts; tool_calls; function_call; reasoning) or
of ShareGPT (``from`` and ``value``). A normalized message has a role of ``KNOWN_ROLES`` (or an unknown role as it was),
content as text, arguments of calls as objects, and reasoning under the names that templates use.
"""

from __future__ import annotations

import json
from typing import Any, Optional

from scu_trainer.data.records import BadRow

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "ai", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
"""Role by the name of a speaker in datasets, in lower case. Other names are kept: the chat template may know them."""

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")

CALLS = ("function_call", "tool_call")
"""Speakers in ShareGPT that mark the message as one or more function calls."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
REASONING_PARTS = ("thinking", "reasoning")
REASONING = ("reasoning_content", "reasoning", "thinking")
NOT_LEARNED = ("train", "training", "loss", "weight")
"""Keys that exclude a turn from learning if their value is false or 0. OpenAI uses a weight of 0."""

READ_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING, *NOT_LEARNED)
"""Keys of a message that are read here. All others are only for the chat template. Tool results follow the order of
their calls, so ``tool_call_id`` adds nothing."""

MEDIA = ("image", "audio", "video", "file")


def messages_of(value: Any, column: str) -> list[dict]:
    """Return the normalized messages of a column. Raises BadRow if it holds something else."""
    value = (_json_or_none(value) or value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        actual = "an empty list" if value == [] else type(value).__name__
        if isinstance(value, str) and value.lstrip().startswith("["):
            actual = "text that is not JSON (a table writes such a list with json.dumps, not str)"
        raise BadRow(f"column {column!r} holds {actual}, not a list of messages")
    turns = [turn for item in value for turn in _split_turns(item)]
    return [_normalized(item, f"message {number} of {column!r}") for number, item in enumerate(turns, start=1)]


def _split_turns(item: Any) -> list[Any]:
    """Split an object with a question and its answer, as in Capybara, into two messages; keep any other object."""
    if not isinstance(item, dict) or set(item) != {"input", "output"}:
        return [item]
    return [{"role": "user", "content": item["input"]}, {"role": "assistant", "content": item["output"]}]


def is_answer(message: dict) -> bool:
    """Whether the assistant wrote the message and it should be learned."""
    return message["role"] == "assistant" and message.get("weight") != 0


def has_content(message: dict) -> bool:
    return bool(message["content"].strip() or {"tool_calls", "reasoning_content"} & {*message})


def tools_of(value: Any) -> Optional[list]:
    """Return the tools that a conversation may call, as JSON schemas; None if there are none. Raises BadRow."""
    tools = _json_or_none(value) if isinstance(value, str) else value
    if isinstance(tools, dict):
        tools = [tools]
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"column 'tools' holds {type(value).__name__}, not a list of tools or such a list as JSON")
    return [_as_tool(_json_or_none(tool) if isinstance(tool, str) else tool) for tool in tools]


def _as_tool(tool: Any) -> dict:
    if not isinstance(tool, dict):
        raise BadRow("column 'tools' is not a list of objects that describe functions")
    is_bare = "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if is_bare else tool


def _normalized(item: Any, where: str) -> dict:
    if not isinstance(item, dict):
        raise BadRow(f"{where} is {type(item).__name__}, not an object with role and content")
    if isinstance(item.get("from"), str) and "value" in item:
        item = {**{key: item[key] for key in item if key not in ("from", "value")}, **_from_sharegpt(item, where)}
    message = {key: value for key, value in item.items() if value is not None}  # arrow fills absent keys with None
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no role; a message is {{'role': 'user', 'content': '...'}}")
    plain = message["role"].strip().lower()
    message["role"] = plain if plain in KNOWN_ROLES else ROLES.get(plain, message["role"])
    media = next((name for name in message if name.removesuffix("s") in MEDIA and message[name]), None)
    if media is not None:
        raise BadRow(f"{where} refers to media in {media!r}; this task can use only text")
    if any(str(message.get(name)).lower() in ("false", "0", "0.0") for name in NOT_LEARNED):
        message["weight"] = 0
    elif message["role"] == "assistant" and str(message.get("weight", 1)).lower() not in ("1", "1.0", "true"):
        raise BadRow(f"the weight of {where} is {message['weight']!r}; allowed: 0 (not learned) and 1")
    return _normalize_content(_normalize_reasoning(_normalize_calls(message, where)), where)


def _from_sharegpt(item: dict, where: str) -> dict:
    """Turn ``from`` and ``value`` of a ShareGPT message into role and content, or into tool calls."""
    if item["from"].strip().lower() in CALLS:
        calls = _json_or_none(item["value"]) if isinstance(item["value"], str) else item["value"]
        if not isinstance(calls, (dict, list)):
            raise BadRow(f"{where} is a {item['from']}, but its value is not a JSON object with name and arguments")
        return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {"role": item["from"], "content": item["value"]}


def _normalize_calls(message: dict, where: str) -> dict:
    calls = message.pop("tool_calls", None)
    calls = _json_or_none(calls) if isinstance(calls, str) else calls
    single = message.pop("function_call", None)
    calls = [single] if single and not calls else calls
    if not calls:
        return message
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls of {where} is {type(calls).__name__}, not a list of calls")
    return {**message, "tool_calls": [_normalized_call(call, where) for call in calls]}


def _normalized_call(call: Any, where: str) -> dict:
    """Return the call with its arguments as an object: a template that writes JSON would encode a string twice."""
    call = _json_or_none(call) if isinstance(call, str) else call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"a call in {where} has no name; a call is {{'function': {{'name': ..., 'arguments': ...}}}}")
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = _json_or_none(arguments)
    if not isinstance(arguments, dict):
        raise BadRow(f"the arguments of {function['name']} in {where} are not a JSON object")
    outer = {key: value for key, value in call.items() if key == "id" and value}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _normalize_reasoning(message: dict) -> dict:
    """Store the reasoning, which may also be a part of the content, under each name that templates read."""
    texts = [message.pop(name) for name in REASONING if isinstance(message.get(name), str)]
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") in REASONING_PARTS]
        texts += [str(part.get(part["type"]) or part.get("text") or "") for part in parts]
        message["content"] = [part for part in content if part not in parts]
    reasoning = next((text for text in texts if text.strip()), None)
    return message if reasoning is None else {**message, "reasoning_content": reasoning, "thinking": reasoning}


def _normalize_content(message: dict, where: str) -> dict:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part, where) for part in content)
    if content is None:
        if "tool_calls" not in message and "reasoning_content" not in message:
            raise BadRow(f"{where} has no content; a message is {{'role': 'user', 'content': '...'}}")
        content = ""
    if isinstance(content, dict) and message["role"] == "tool":
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise BadRow(f"content of {where} is {type(content).__name__}; only text can be used")
    return {**message, "content": content}


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text", part.get(kind)), str):
        return part.get("text", part.get(kind))
    if isinstance(kind, str) and any(name in kind for name in MEDIA):
        raise BadRow(f"content of {where} has a part of type {kind!r}; this task can use only text")
    raise BadRow(f"content of {where} has a part of type {kind!r}; known types: {', '.join(TEXT_PARTS)}")


def _json_or_none(text: str) -> Any:
    """Return the value of a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return None
