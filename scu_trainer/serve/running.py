"""A server from its first question to its last."""

from __future__ import annotations

import socket
from threading import Event
from typing import Any

import uvicorn

GRACE_S = 2
"""For answers that are being written when it is asked to end."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ends: Event) -> None:
        super().__init__(config)
        self._ends = ends

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._ends.set()
        super().handle_exit(sig, frame)


def run(app: Any, listening: socket.socket, ends: Event) -> None:
    """Until a signal. ``ends`` is set by it."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    _Server(config, ends).run(sockets=[listening])
