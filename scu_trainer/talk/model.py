"""A model to talk to: loaded as its run trained it, with its chat template and the tokens that end its answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.data.records import plain_prompt
from scu_trainer.data.text.chat import special_ids
from scu_trainer.data.text.encode import prompt_ids
from scu_trainer.errors import DataError, ModelError
from scu_trainer.models.fit import max_positions_of
from scu_trainer.models.loading.adapters import generation_obstacle
from scu_trainer.models.loading.load import load_for_evaluation, load_tokenizer
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.settings import ModelSettings

Message = dict[str, str]
PLACEHOLDER = "\u2301 an answer \u2301"
"""A placeholder answer to test a chat template with. No template contains this text itself."""


@dataclass
class Talker:
    """``around``: a context for generation, for example without the adapter. ``precision``: dtype of autocast.
    ``stops``: ids of the tokens that end an answer. ``lock``: allows one answer at a time, because the model is
    switched between answers. ``answers_plain_text``: it has learned to answer questions without a template."""

    name: str
    model: nn.Module
    tokenizer: Any
    precision: Optional[torch.dtype] = None
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    stops: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    answers_plain_text: bool = False

    def __post_init__(self) -> None:
        if obstacle := generation_obstacle(self.model):
            raise ModelError(f"{self.name}: {obstacle}")
        self.stops = self.stops or stop_tokens(self.model, self.tokenizer)

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Hold the lock, and set up autocast and the context ``around``."""
        autocast = torch.autocast(self.device.type, self.precision, enabled=self.precision is not None)
        with self.lock, self.around(), torch.no_grad(), autocast:
            yield

    @property
    def positions(self) -> Optional[int]:
        """The largest number of tokens of prompt and answer together; None if it is unknown."""
        return max_positions_of(self.model)

    def notes(self, name: str) -> list[str]:
        """Return notes for the user about how the model, called ``name``, is prompted."""
        if self.has_template:
            return []
        how = "a blank line follows the question" if self.answers_plain_text else "it continues the text"
        return [f"{name} has no chat template: {how}"]

    def encoded(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt. Without a template the texts are concatenated, and the model continues them
        or, if it was trained to, answers them. Raises DataError if the template refuses the conversation."""
        if not self.has_template:
            return prompt_ids(self.tokenizer, self.rendered(messages))
        try:
            encoding = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program and may raise any exception
            raise DataError(f"the chat template of {self.name} refuses this conversation: {error}") from error
        return list(encoding["input_ids"])

    def rendered(self, messages: Sequence[Message]) -> str:
        """Return the text of a prompt that ``encoded`` accepts."""
        if not self.has_template:
            texts = [message["content"] for message in messages]
            return plain_prompt(texts) if self.answers_plain_text else "\n".join(texts)
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)

    def trimmed(self, messages: Sequence[Message], max_new_tokens: int) -> tuple[list[int], int]:
        """Drop the oldest messages until there is room for the answer, but keep a system message. Returns the token ids
        and the number of dropped messages. Raises DataError if the newest message is too long."""
        kept, dropped = list(messages), 0
        while True:
            token_ids = self.encoded(kept)
            if self.positions is None or len(token_ids) + max_new_tokens <= self.positions:
                return token_ids, dropped
            first = 1 if kept[0]["role"] == "system" else 0
            if len(kept) - first < 2:
                raise DataError(
                    f"a prompt of {len(token_ids):,} tokens and an answer of {max_new_tokens:,} are more than the "
                    f"{self.positions:,} positions of {self.name}; shorten the prompt, or lower --max_new_tokens"
                )
            following = next((n for n in range(first + 1, len(kept)) if kept[n]["role"] == "user"), len(kept) - 1)
            dropped += following - first
            del kept[first:following]


def load_talker(
    name: str, settings: ModelSettings, precision: Optional[torch.dtype] = None, answers_plain_text: bool = False
) -> Talker:
    """``settings``: those of its run, with ``model_name_or_path`` set to its folder or Hub id. Raises ModelError."""
    tokenizer, model = load_tokenizer(settings), load_for_evaluation(settings.model_name_or_path, settings)
    return Talker(name, model, tokenizer, precision, answers_plain_text=answers_plain_text)


def base_talker(talker: Talker, name: str) -> Talker:
    """Return the base model of an adapter, in the same memory."""
    without = talker.model.disable_adapter
    return replace(talker, name=name, around=without)


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the ids of all tokens that end an answer: those of the model's generation config and of the tokenizer, and
    the special token that the chat template puts after an answer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stops = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    if getattr(tokenizer, "chat_template", None):
        stops.add(_end_of_turn(tokenizer))
    return sorted(token for token in stops if token is not None)


def _end_of_turn(tokenizer: Any) -> Optional[int]:
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": PLACEHOLDER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template refuses this conversation, so only the other stop tokens are known
        return None
    after = tokenizer(text.rpartition(PLACEHOLDER)[2], add_special_tokens=False)["input_ids"]
    return next((token for token in after[:2] if token in special_ids(tokenizer)), None)
