"""Run the server until a signal ends it."""

from __future__ import annotations

import signal
import socket
from threading import Event
from typing import Any

import uvicorn

GRACE_S = 2
"""Seconds that responses in progress have to end after a signal."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ends: Event) -> None:
        super().__init__(config)
        self._ends, self.is_interrupted = ends, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._ends.set()
        self.is_interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)


def run(app: Any, listening: socket.socket, ends: Event) -> None:
    """Serve ``app`` until a signal, which sets ``ends``. Raises KeyboardInterrupt for Ctrl-C, also where the event loop
    swallows it while it shuts down."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    server = _Server(config, ends)
    server.run(sockets=[listening])
    if server.is_interrupted:
        raise KeyboardInterrupt
