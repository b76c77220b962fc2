"""Templates of the board, over those of the report: same colours, same tables, same drawings."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

from scu_trainer.report.render import FONTS, THEMES
from scu_trainer.secrets import redact

PACKAGES = ("scu_trainer.board", "scu_trainer.report")
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
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in PACKAGES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["address"] = address
    return environment


@functools.cache
def static(name: str) -> bytes:
    """One of STATIC."""
    if name == "theme.css":
        return _environment().get_template("theme.css").render(themes=THEMES, fonts=FONTS).encode()
    folders = (importlib.resources.files(package) / "templates" for package in PACKAGES)
    return next(path for folder in folders if (path := folder / name).is_file()).read_bytes()
