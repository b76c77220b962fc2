"""Answers for a page: the two models that were asked last stay loaded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scu_trainer.cli.subjects import subject_of
from scu_trainer.cli.talking.options import talker

if TYPE_CHECKING:
    from scu_trainer.talk.model import Talker

MAX_NEW_TOKENS = 256
_loading = threading.Lock()


def stream_answer(name: str, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Pieces of text. ``name``: as for ``scu-trainer chat``. ``messages``: role and content, the newest last.

    Raises a UserError where it cannot be loaded or run. Closing the iterator ends the generation.
    """
    from scu_trainer.talk.answers import AnswerSettings, fitted, stream

    with _loading:
        one = _loaded(name)
    settings = AnswerSettings(max_new_tokens=MAX_NEW_TOKENS)
    token_ids, dropped, settings = fitted(one, [dict(message) for message in messages], settings)
    if dropped:
        yield f"[the oldest {dropped} messages no longer fit and are left out]\n"
    yield from stream(one, token_ids, settings)


@functools.lru_cache(maxsize=2)
def _loaded(name: str) -> Talker:
    return talker(replace(subject_of(name), name=name.rstrip("/").rpartition("/")[2]))
