"""What asks a command that works for hours to stop: signals, and output that nobody can read any more.

A terminal that is closed sends SIGHUP, and takes what is written to it from then on with an error; of a pipe whose
reader leaves only the error is seen. nohup lets a command outlive its terminal by ignoring SIGHUP.
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
    return HANGUP is None or signal.getsignal(HANGUP) == signal.SIG_IGN


@contextlib.contextmanager
def listening(receive: Callable[[int, Optional[FrameType]], None], closed: Callable[[], None]) -> Iterator[None]:
    """Inside, signals that ask to stop go to ``receive``, and ``closed`` is called for each of stdout and stderr that
    nobody can read any more; what is written there is dropped. Call it in the main thread."""
    heard = [signal.SIGTERM, signal.SIGINT, *([] if outlives_terminal() else [HANGUP])]
    before = {number: signal.signal(number, receive) for number in heard}
    try:
        with contextlib.ExitStack() as outputs:
            if sys.stdout is not None:  # as where a command was started with >&-
                outputs.enter_context(contextlib.redirect_stdout(_Output(sys.stdout, closed)))
            if sys.stderr is not None:
                outputs.enter_context(contextlib.redirect_stderr(_Output(sys.stderr, closed)))
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Asked:
    """Something that can be asked to stop, and counts how often: ``listening(self._receive, self._closed)``."""

    asked = 0

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        self.asked += number != HANGUP or not self.asked  # a terminal that is closed may say so twice

    def _closed(self) -> None:
        if not (self.asked or outlives_terminal()):
            self.asked = 1


class _Output:
    """``stream``, of which a full disk, too, may drop what it does not take: the log file of a run waits for room."""

    def __init__(self, stream: TextIO, closed: Callable[[], None]) -> None:
        self._stream, self._closed = stream, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_closed(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, act: Callable[[], object]) -> None:
        try:
            act()
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            is_closed = error.errno in (errno.EPIPE, errno.EIO)
        if is_closed:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # for what writes there by other ways, too
            os.close(nowhere)
            self._closed()
