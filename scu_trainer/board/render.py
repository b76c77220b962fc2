"""Render the templates of the board, which use those of the report: same colours, tables and drawings."""

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
    """Render a template to a response. Values are escaped, and secrets in them are redacted."""
    text = _environment().get_template(template).render(**values)
    return html_response(text, code)


def html_response(text: str, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = redact(text).encode("utf-8", "backslashreplace")  # a folder name may be invalid UTF-8
    return HTMLResponse(content, code, headers)


def address(name: str, *parts: str) -> str:
    """Return the path of a page of the run ``name``."""
    return "/".join(("/run", quote(name.encode("utf-8", "surrogateescape"), safe=""), *parts))


@functools.cache
def _environment() -> Any:
    templates = environment("scu_trainer.board", "scu_trainer.report")
    templates.globals["address"] = address
    return templates


@functools.cache
def static(name: str) -> bytes:
    return _environment().get_template(name).render().encode()
