"""The outermost ASGI layer: who may send requests, and to which paths. No other code sees a refused request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Optional

from starlette.datastructures import Headers

from scu_trainer.listening import FOREIGN_HOST, FOREIGN_ORIGIN, is_same_secret, refusal_status
from scu_trainer.serve.errors import BadRequest

CHAT, COMPLETIONS, MODELS, HEALTH = "/v1/chat/completions", "/v1/completions", "/v1/models", "/health"
ROUTES = {CHAT: "POST", COMPLETIONS: "POST", MODELS: "GET", HEALTH: "GET"}
"""All paths that are served. The server of transformers has more, to load any model of the Hub or to unload ours."""

STRANGERS = {
    FOREIGN_HOST: "the header Host names another server",
    FOREIGN_ORIGIN: "this request came from a web page of another site",
}

POLICY_VIOLATION = 1008
"""Close code of a WebSocket."""


class RequestGuard:
    """``hosts``: allowed values of the header Host, such as "127.0.0.1:8000"; None allows any, for access from other
    machines. ``key``: the key that clients must send, or None. HEALTH needs no key."""

    def __init__(self, app: Any, hosts: Optional[Collection[str]], key: Optional[str]) -> None:
        self.app, self._hosts = app, hosts
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        try:
            self._check(scope, Headers(scope=scope))
        except BadRequest as refused:
            return await refused.response()(scope, receive, send)
        await self.app({**scope, "method": _method(scope)}, receive, send)

    def _check(self, scope: Any, headers: Headers) -> None:
        status = None if self._hosts is None else refusal_status(self._hosts, headers)
        if status is not None:
            ours = " or ".join(sorted(self._hosts))
            raise BadRequest(f"{STRANGERS[status]}; this server is {ours}", status=status)
        if self._key is not None and scope["path"] != HEALTH:
            self._check_key(headers.get("authorization", ""))
        route = MODELS if scope["path"].startswith(f"{MODELS}/") else scope["path"]  # /v1/models/NAME
        if route not in ROUTES:
            raise BadRequest(f"{scope['path']} is not served; available: {', '.join(ROUTES)}", status=404)
        if _method(scope) != ROUTES[route]:
            raise BadRequest(f"{scope['path']} takes only {ROUTES[route]}", status=405)

    def _check_key(self, header: str) -> None:
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer" or not is_same_secret(given.strip(), self._key):
            problem = "the key does not match the key of this server" if given else "this server requires a key"
            raise BadRequest(
                f"{problem}; send it in the header Authorization, after the word Bearer",
                code="invalid_api_key",
                status=401,
            )


def _method(scope: Any) -> str:
    """Return the method of a request. HEAD is treated as GET, because uvicorn omits the body."""
    return "GET" if scope["method"] == "HEAD" else scope["method"]
