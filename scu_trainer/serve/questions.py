"""Translate the requests of clients for the server of transformers. Nothing is silently ignored: a field that would
have no effect is refused by name, unless its value asks for nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Optional

from transformers import GenerationConfig

from scu_trainer.data.messages import REASONING
from scu_trainer.data.records import Chat
from scu_trainer.data.text.encode import prompt_ids
from scu_trainer.data.text.rendering import rendered_away
from scu_trainer.errors import DataError, SettingsError, did_you_mean
from scu_trainer.serve.errors import BadRequest
from scu_trainer.serve.guard import CHAT
from scu_trainer.talk.answers import AnswerSettings
from scu_trainer.talk.model import Message, Talker

NUMBERS: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float, "seed": int, "max_tokens": int,
    "max_completion_tokens": int,
}  # fmt: skip
"""Numeric fields and their types. top_k and repetition_penalty are not in OpenAI's API, but in compatible servers."""

OTHERS = ("model", "messages", "prompt", "stream", "stop")
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream_options",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that can be ignored: notes of the client, hints for caches, and ``stream_options``, because a stream always
ends with the token count."""

NEUTRAL = {"n": 1, "best_of": 1, "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]}
"""Values that ask for the default behaviour. So do null, 0, false, and empty values."""

ZERO_ASKS = ("n", "best_of", "logprobs")
"""Fields with a meaningful 0: ``logprobs: 0`` asks for the probability of each token."""

DRAWS_FROM_ALL = {"top_p": 1, "top_k": 0}
"""Values that programs often send without asking for sampling."""

MOST_STOPS, LONGEST_STOP = 4, 64
"""Number of stop strings, as in OpenAI's API, and letters of each. transformers compares each letter with the whole
vocabulary, which takes 4 s for 64 letters and 128,000 words on one core."""


@dataclass(frozen=True)
class RequestedPrompt:
    """A prompt as token ids. ``gone``: set when the client has disconnected."""

    token_ids: list[int]
    gone: Event = field(default_factory=Event)


CURRENT_PROMPT: ContextVar[RequestedPrompt] = ContextVar("asked")
"""The prompt of the current request."""


@dataclass(frozen=True)
class RequestReader:
    """Checks and translates requests. ``name``: of the model in requests. ``settings``: if a request sets no others."""

    talker: Talker
    name: str
    settings: AnswerSettings

    def forwarded(self, path: str, body: Any) -> tuple[dict[str, Any], RequestedPrompt]:
        """Return the body to forward, and the prompt in it. Raises BadRequest."""
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        self.check_model(body.get("model"))
        _check_fields(body)
        numbers = {name: _number(body, name, kind) for name, kind in NUMBERS.items() if body.get(name) is not None}
        if body.get(foreign := "prompt" if path == CHAT else "messages"):
            raise BadRequest(f"{path} takes no {foreign}", foreign)
        if path == CHAT:
            forwarded = {"messages": _messages(body.get("messages"))}
            token_ids = self._encode(forwarded["messages"])
        else:
            forwarded = {"prompt": _prompt(body.get("prompt"))}
            token_ids = prompt_ids(self.talker.tokenizer, forwarded["prompt"])
        config = self._config(numbers, len(token_ids))
        stop = {} if not body.get("stop") else {"stop": _stop(body["stop"])}
        forwarded |= {"model": self.name, "stream": _stream(body), **stop, "generation_config": _as_json(config)}
        return forwarded, RequestedPrompt(token_ids)

    def check_model(self, model: Any) -> None:
        if not isinstance(model, str) or not model:
            raise BadRequest(f"model is missing; give {self.name}", "model")
        if model != self.name:
            message = f"there is no model {model!r} here, only {self.name}{did_you_mean(model, [self.name])}"
            raise BadRequest(message, "model", "model_not_found", 404)

    def _encode(self, messages: list[Message]) -> list[int]:
        try:
            token_ids = self.talker.encoded(messages)
        except DataError as error:
            raise BadRequest(str(error), "messages") from error
        self._check_rendered(messages)
        return token_ids

    def _check_rendered(self, messages: list[Message]) -> None:
        """Raise BadRequest for parts of the messages that the model would not see. A template that handles reasoning
        may leave out that of earlier turns."""
        text = self.talker.rendered(messages)
        missing = [*rendered_away(Chat(messages, prompt_turns=len(messages)), text, learns_prompt=False)]
        template = str(self.talker.tokenizer.chat_template)
        if "reasoning" in missing and any(name in template for name in (*REASONING, "</think>")):
            missing.remove("reasoning")
        unnamed = [{key: value for key, value in message.items() if key != "name"} for message in messages]
        if unnamed != messages and self.talker.rendered(unnamed) == text:
            missing.append("name")
        if missing:
            why = "its chat template leaves out" if self.talker.has_template else "it has no chat template for"
            message = f"{self.name} would not see {', '.join(missing)}: {why} that; send the messages without it"
            raise BadRequest(message, "messages")

    def _config(self, numbers: Mapping[str, Any], prompt_tokens: int) -> GenerationConfig:
        if prompt_tokens == 0:
            raise BadRequest("the prompt is empty", "prompt")
        if "temperature" not in numbers and not self.settings.config(self.talker).do_sample:
            numbers = {name: value for name, value in numbers.items() if value != DRAWS_FROM_ALL.get(name)}
        try:
            settings = _merged_settings(self.settings, numbers)
        except SettingsError as error:
            raise BadRequest(str(error).replace("max_new_tokens", "max_tokens")) from error
        left = _positions_left(self.talker, prompt_tokens)
        if left is not None:
            settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, left))
        config = settings.config(self.talker)
        if "seed" in numbers:
            config.seed = numbers["seed"]  # Answering.generate reads it
        return config


def _as_json(config: GenerationConfig) -> str:
    """Return ``config`` as JSON, without the mark of a model's config, with which transformers accepts no seed."""
    return json.dumps({name: value for name, value in config.to_diff_dict().items() if not name.startswith("_")})


def _positions_left(talker: Talker, prompt_tokens: int) -> Optional[int]:
    """Return the number of positions left for the answer; None if unlimited. Raises BadRequest if none are left."""
    if talker.positions is None:
        return None
    if prompt_tokens >= talker.positions:
        message = f"a prompt of {prompt_tokens:,} tokens leaves no room to answer within {talker.positions:,} positions"
        raise BadRequest(message, "messages", "context_length_exceeded")
    return talker.positions - prompt_tokens


def _merged_settings(before: AnswerSettings, numbers: Mapping[str, Any]) -> AnswerSettings:
    """Temperature 0 means no sampling, as in OpenAI's API. Raises SettingsError, BadRequest."""
    own = {name: numbers[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty") if name in numbers}
    lengths = {numbers[name] for name in ("max_tokens", "max_completion_tokens") if name in numbers}
    if len(lengths) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
    if lengths:
        own["max_new_tokens"] = lengths.pop()
    if own.get("temperature") == 0:
        own |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif {"temperature", "top_p", "top_k"} & own.keys():
        own["do_sample"] = True
    return replace(before, **own)


def _check_fields(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for a field that is not supported, unless its value asks for nothing."""
    known = {*NUMBERS, *OTHERS, *WITHOUT_EFFECT}
    for name, value in body.items():
        asks = value or (name in ZERO_ASKS and value is not None and value is not False)
        if name not in known and asks and value != NEUTRAL.get(name):
            raise BadRequest(f"{name} is not offered by this server; leave it out", name)


def _number(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body[name]
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number:
        raise BadRequest(f"{name} is {value!r}; it must be {'a number' if kind is float else 'a whole number'}", name)
    if name == "seed" and not -(2**63) <= value < 2**63:
        raise BadRequest("seed has more than 64 bits", name)
    if kind is float and abs(value) > sys.float_info.max:
        raise BadRequest(f"{name} is too large", name)
    return kind(value)  # transformers does not accept an integer as temperature


def _stream(body: Mapping[str, Any]) -> bool:
    value = body.get("stream") or False
    if not isinstance(value, bool):
        raise BadRequest(f"stream is {value!r}; it must be true or false", "stream")
    return value


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest("stop must be a string or a list of strings", "stop")
    if len(texts) > MOST_STOPS or max(map(len, texts)) > LONGEST_STOP:
        raise BadRequest(f"stop may have up to {MOST_STOPS} strings of up to {LONGEST_STOP} letters", "stop")
    return texts


def _prompt(value: Any) -> str:
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, str):
        raise BadRequest("prompt must be one string", "prompt")
    return text


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of one or more messages", "messages")
    return [_message(place, message) for place, message in enumerate(value)]


def _message(place: int, message: Any) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must be an object with role and content", where)
    reasoning = message.get("reasoning_content")
    known = ("role", "content", "name", *(["reasoning_content"] if isinstance(reasoning, str) else []))
    more = [name for name, value in message.items() if value and name not in known]
    if more:
        raise BadRequest(f"{where} has {', '.join(more)}; this server takes role and content", where)
    optional = {"reasoning_content": reasoning} if reasoning else {}
    if name := message.get("name"):
        if not isinstance(name, str):
            raise BadRequest(f"{where}.name must be a string", where)
        optional["name"] = name
    return {"role": message["role"], "content": _text(where, message.get("content")), **optional}


def _text(where: str, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(map(_is_text, parts)):
        raise BadRequest(f"{where}.content must be a string or a list of parts of type text", where)
    return "".join(part["text"] for part in parts)  # joined as in training


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
