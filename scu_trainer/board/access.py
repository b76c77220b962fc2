"""Access control of the board. A request needs the token that was printed at the start.

The token keeps out other users and other programs on this machine. The checks of Host and Origin
(``scu_trainer/listening.py``) keep out web sites that are open in the same browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from scu_trainer.listening import FOREIGN_HOST, FOREIGN_ORIGIN, is_same_secret, refusal_status

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Inline styles are allowed because our drawings contain them."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would not send the origin of our own forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
READING = ("GET", "HEAD")
STRANGERS = {
    FOREIGN_HOST: "the board has another host name: open the address that it printed",
    FOREIGN_ORIGIN: "this request came from another web page",
}


class AccessGuard:
    """ASGI middleware that protects an application. ``hosts``: allowed headers Host, such as "127.0.0.1:7860"."""

    def __init__(self, app: Any, token: str, hosts: Iterable[str], cookie: str) -> None:
        self.app, self.cookie = app, cookie
        self._token = token.encode()
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        app = self._refusal_or_redirect(scope, Headers(scope=scope)) or self.app
        await app(scope, receive, _with_headers(send))

    def _refusal_or_redirect(self, scope: Any, headers: Headers) -> Optional[Response]:
        """Return what to send instead of the page; None if the request may see it."""
        code = refusal_status(self._hosts, headers)
        if code is not None:
            return _refusal(STRANGERS[code], code)
        if self._is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            return None  # a program, because no browser sends this header on its own
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and scope["method"] in READING and self._is_token(given):
            return self._redirect_with_cookie()
        if not self._is_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, "")):
            return _refusal("open the board with the address that it printed when it started, including the token", 401)
        if scope["method"] not in READING and "origin" not in headers:
            return _refusal("a change needs the header Origin, or the token as Authorization: Bearer", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return is_same_secret(given, self._token)

    def _redirect_with_cookie(self) -> Response:
        """Store the token in a cookie and remove it from the address, where a screenshot would show it."""
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.cookie, self._token.decode(), httponly=True, samesite="strict", path="/")
        return answer


def _refusal(why: str, code: int) -> Response:
    return PlainTextResponse(f"{why}\n", code)


def _with_headers(send: Any) -> Any:
    async def answer(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return answer
