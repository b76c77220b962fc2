"""Answers for the board. The two models that were used last stay loaded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from scu_trainer.cli.subjects import subject_of
from scu_trainer.cli.talking.options import talker
from scu_trainer.report.files import STATUS_FILE

if TYPE_CHECKING:
    from scu_trainer.talk.model import Talker

MAX_NEW_TOKENS = 256
_loading = threading.Lock()


def stream_answer(name: str, messages: Sequence[Mapping[str, str]], **consent: bool) -> Iterator[str]:
    """Yield an answer in pieces of text. ``name``: as for ``scu-trainer chat``. ``messages``: role and content, the
    newest last. ``consent``: trust_remote_code, allow_pickle. Raises UserError if the model cannot be loaded or run.
    Closing the iterator ends the generation."""
    from scu_trainer.talk.answers import AnswerSettings, fit_to_positions, stream

    with _loading:
        model = _loaded(name, **consent)
    settings = AnswerSettings(max_new_tokens=MAX_NEW_TOKENS)
    token_ids, dropped, settings = fit_to_positions(model, [dict(message) for message in messages], settings)
    if dropped:
        yield f"[the oldest {dropped} messages no longer fit and are left out]\n"
    yield from stream(model, token_ids, settings)


def _loaded(name: str, **consent: bool) -> Talker:
    status = Path(name) / STATUS_FILE
    return _cached_talker(name, status.stat().st_mtime_ns if status.is_file() else None, **consent)


@functools.lru_cache(maxsize=2)
def _cached_talker(name: str, changed_ns: Optional[int], **consent: bool) -> Talker:
    """Return a loaded model. It is loaded again if its run has changed, because a run that continues or starts over in
    the same folder is another model."""
    resolved = subject_of(name)
    return talker(replace(resolved, name=Path(name).name, model=replace(resolved.model, **consent)))
