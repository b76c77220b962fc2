"""An answer of a model, piece by piece. The board calls ``stream_answer`` and knows nothing else of models."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scu_trainer.errors import ModelError

MOST_NEW_TOKENS = 256
MODEL_FILES = ("adapter_config.json", "config.json")


def can_answer(folder: Path) -> bool:
    """Whether ``folder`` holds a model or an adapter."""
    return any((folder / name).is_file() for name in MODEL_FILES)


def stream_answer(name: str, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Pieces of text. ``name``: folder of a model or adapter. ``messages``: role and content, the newest last.

    Raises ModelError where it cannot be loaded or run. Closing the iterator ends the generation.
    """
    from transformers import StoppingCriteriaList, TextIteratorStreamer

    model, tokenizer = _loaded(name)
    inputs = _encoded(tokenizer, messages).to(model.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    is_left, errors = threading.Event(), []
    stops = StoppingCriteriaList([lambda *_, **__: is_left.is_set()])

    def generate() -> None:
        try:
            model.generate(
                **inputs, streamer=streamer, stopping_criteria=stops, do_sample=False, max_new_tokens=MOST_NEW_TOKENS
            )
        except Exception as error:  # in a thread of its own; raised below, where somebody listens
            errors.append(error)
            streamer.end()

    threading.Thread(target=generate, daemon=True).start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        is_left.set()
    if errors:
        raise ModelError(f"{name} cannot answer: {errors[0]}") from errors[0]


@functools.lru_cache(maxsize=2)
def _loaded(name: str) -> tuple[Any, Any]:
    """Two models, as many as are talked to side by side."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error


def _encoded(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Any:
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(list(messages), **options)
    # A base model goes on with the text.
    return tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
