"""Detect requests to stop a long command: signals, and output that nobody can read any more.

A closed terminal sends SIGHUP, and writing to it raises an error from then on. A pipe without a reader only raises the
error. nohup makes a command outlive its terminal by ignoring SIGHUP.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional, TextIO

HANGUP = getattr(signal, "SIGHUP", None)


def outlives_terminal() -> bool:
    """Whether this process ignores the end of its terminal, as it does under nohup."""
    return HANGUP is None or signal.getsignal(HANGUP) == signal.SIG_IGN


@contextlib.contextmanager
def stop_signals_to(receive: Callable[[int, Optional[FrameType]], None], closed: Callable[[], None]) -> Iterator[None]:
    """Pass signals that ask to stop to ``receive`` in this context. Call ``closed`` for each of stdout and stderr that
    nobody can read any more, and drop what is written there. Must be used in the main thread."""
    numbers = [signal.SIGTERM, signal.SIGINT, *([] if outlives_terminal() else [HANGUP])]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        with contextlib.ExitStack() as outputs:
            if sys.stdout is not None:  # it is None if the command was started with >&-
                outputs.enter_context(contextlib.redirect_stdout(_Output(sys.stdout, closed)))
            if sys.stderr is not None:
                outputs.enter_context(contextlib.redirect_stderr(_Output(sys.stderr, closed)))
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopCounter:
    """Base class that counts how often it was asked to stop: ``stop_signals_to(self._receive, self._closed)``."""

    asked = 0

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        self.asked += number != HANGUP or not self.asked  # a closed terminal may send SIGHUP twice

    def _closed(self) -> None:
        if not (self.asked or outlives_terminal()):
            self.asked = 1


class _Output:
    """Wraps ``stream`` and calls ``closed`` once nobody can read it any more. Text that a full disk does not take is
    dropped here too; the log file of a run keeps it until there is space."""

    def __init__(self, stream: TextIO, closed: Callable[[], None]) -> None:
        self._stream, self._closed = stream, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._run_unless_closed(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._run_unless_closed(self._stream.flush)

    def _run_unless_closed(self, act: Callable[[], object]) -> None:
        try:
            act()
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            is_closed = error.errno in (errno.EPIPE, errno.EIO)
        if is_closed:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for code that writes to the descriptor directly
            os.close(nowhere)
            self._closed()
