"""Templates of the board, over those of the report: same colours, same tables, same drawings."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

from scu_trainer.report.page import environment
from scu_trainer.secrets import redact

STATIC = {"board.css": "text/css", "page.css": "text/css", "theme.css": "text/css", "board.js": "text/javascript",
          "chat.js": "text/javascript", "page.js": "text/javascript"}  # fmt: skip


def show(template: str, code: int = 200, **values: Any) -> Response:
    """Every word of a run is escaped, and a secret in it hidden."""
    text = _environment().get_template(template).render(**values)
    return html_response(text, code)


def html_response(text: str, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = redact(text).encode("utf-8", "backslashreplace")  # a name of a folder may be no text
    return HTMLResponse(content, code, headers)


def address(name: str, *parts: str) -> str:
    """Of a page of the run ``name``."""
    return "/".join(("/run", quote(name.encode("utf-8", "surrogateescape"), safe=""), *parts))


@functools.cache
def _environment() -> Any:
    found = environment("scu_trainer.board", "scu_trainer.report")
    found.globals["address"] = address
    return found


@functools.cache
def static(name: str) -> bytes:
    """One of STATIC."""
    return _environment().get_template(name).render().encode()
