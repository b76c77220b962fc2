"""ASGI middleware between the guard and the server of transformers. It checks requests and translates them for that
server, and translates the server's errors to the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from typing import Any

from starlette.requests import ClientDisconnect, Request

from scu_trainer.serve.errors import FAILED, BadRequest, error_body
from scu_trainer.serve.questions import CURRENT_PROMPT, RequestedPrompt, RequestReader

MOST_BYTES = 4 << 20
"""Largest size of a request."""

ERROR_EVENT, EVENT_END = b'data: {"error": "', b'"}\n\n'
"""Text before and after an error message in a stream of transformers. The message's quotes are not escaped."""

DONE = b"data: [DONE]\n\n"


class RequestTranslator:
    """Checks and translates POST requests to ``app``, and its responses. ``reader`` reads the requests."""

    def __init__(self, app: Any, reader: RequestReader) -> None:
        self.app, self.reader = app, reader

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        try:
            body, question = await self._read(Request(scope, receive))
        except BadRequest as refused:
            return await refused.response()(scope, receive, send)
        except ClientDisconnect:
            return None
        CURRENT_PROMPT.set(question)
        watching = asyncio.create_task(_watch(receive, question.gone))
        try:
            await self.app(_with_length(scope, len(body)), _replay(body, receive), _ResponseSender(send))
        finally:
            watching.cancel()

    async def _read(self, request: Request) -> tuple[bytes, RequestedPrompt]:
        """Return the body to forward, and the prompt in it. Raises BadRequest."""
        content = b""
        async for piece in request.stream():
            content += piece
            if len(content) > MOST_BYTES:
                raise BadRequest(f"more than {MOST_BYTES:,} bytes were sent", status=413)
        try:
            asked = json.loads(content)
            json.dumps(asked, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = "a text in the body contains half of a character (a lone surrogate such as \\ud83d)"
            raise BadRequest(message) from error
        except (ValueError, RecursionError) as error:
            raise BadRequest("the body is not JSON") from error
        body, question = self.reader.forwarded(request.url.path, asked)
        return json.dumps(body).encode(), question


async def _watch(receive: Any, gone: Event) -> None:
    """Set ``gone`` when the client disconnects. The server of transformers notices this only while it streams."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _with_length(scope: Any, length: int) -> Any:
    headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-type")]
    new_headers = [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": [*headers, *new_headers]}


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI ``receive`` that first returns ``body`` and then the next messages, such as a disconnect."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return messages.pop() if messages else await receive()

    return read


class _ResponseSender:
    """An ASGI ``send`` that ends streams with the marker that clients wait for, and sends errors in OpenAI's format."""

    def __init__(self, send: Any) -> None:
        self._send, self._failed, self._content = send, None, b""
        self._is_stream = self._is_broken = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._failed is not None:
            await self._end_failed(message)
        elif message["type"] == "http.response.body" and self._is_stream:
            await self._send(self._translate_stream(message))
        else:
            await self._send(message)

    async def _begin(self, message: Any) -> None:
        if message["status"] >= 400:
            self._failed = message  # sent later, together with the new body, because the length changes
            return
        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        await self._send(message)

    async def _end_failed(self, message: Any) -> None:
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return
        status = self._failed["status"]
        body = json.dumps(error_body(_error_message(self._content), status)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**self._failed, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _translate_stream(self, message: Any) -> Any:
        body = message.get("body", b"")
        before, mark, after = body.partition(ERROR_EVENT)
        if mark:
            self._is_broken = True
            text = after.removesuffix(EVENT_END).decode("utf-8", "replace")
            body = before + f"data: {json.dumps(error_body(text, 500))}\n\n".encode()
        if not message.get("more_body") and not self._is_broken:
            body += DONE
        return {**message, "body": body}


def _error_message(content: bytes) -> str:
    """Return the message in an error body of FastAPI, {"detail": ...}."""
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, TypeError, KeyError):
        return FAILED
    return detail if isinstance(detail, str) else FAILED
