"""Between the guard and the server behind (ASGI): questions are checked and said in its words, and what it says of an
error is said in OpenAI's."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from typing import Any

from starlette.requests import ClientDisconnect, Request

from scu_trainer.serve.errors import FAILED, BadRequest, error_body
from scu_trainer.serve.questions import ASKED, AskedPrompt, Asker

MOST_BYTES = 4 << 20
"""Of a question."""

ERROR_EVENT, EVENT_END = b'data: {"error": "', b'"}\n\n'
"""Around the text of an error in a stream of transformers, whose quotes are not escaped."""

DONE = b"data: [DONE]\n\n"


class Front:
    def __init__(self, app: Any, asker: Asker) -> None:
        self.app, self.asker = app, asker

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        try:
            body, question = await self._asked(Request(scope, receive))
        except BadRequest as refused:
            return await refused.response()(scope, receive, send)
        except ClientDisconnect:
            return None
        ASKED.set(question)
        watching = asyncio.create_task(_watch(receive, question.gone))
        try:
            await self.app(_with_length(scope, len(body)), _replayed(body, receive), _Answer(send))
        finally:
            watching.cancel()

    async def _asked(self, request: Request) -> tuple[bytes, AskedPrompt]:
        """The body as it goes on, and what it asks."""
        content = b""
        async for piece in request.stream():
            content += piece
            if len(content) > MOST_BYTES:
                raise BadRequest(f"more than {MOST_BYTES:,} bytes were sent", status=413)
        try:
            asked = json.loads(content)
            json.dumps(asked, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = "a text in the body holds half of a character (a lone surrogate such as \\ud83d)"
            raise BadRequest(message) from error
        except (ValueError, RecursionError) as error:
            raise BadRequest("the body is not JSON") from error
        body, question = self.asker.forwarded(request.url.path, asked)
        return json.dumps(body).encode(), question


async def _watch(receive: Any, gone: Event) -> None:
    """The server behind hears only where it streams that a client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _with_length(scope: Any, length: int) -> Any:
    headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-type")]
    own = [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": [*headers, *own]}


def _replayed(body: bytes, receive: Any) -> Any:
    """What was read already, and after it whatever comes: that the client is gone."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return messages.pop() if messages else await receive()

    return read


class _Answer:
    """``send`` of ASGI. A stream gets the mark at its end that clients wait for; errors get OpenAI's form."""

    def __init__(self, send: Any) -> None:
        self._send, self._failed, self._content = send, None, b""
        self._is_stream = self._is_broken = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._failed is not None:
            await self._end_failed(message)
        elif message["type"] == "http.response.body" and self._is_stream:
            await self._send(self._streamed(message))
        else:
            await self._send(message)

    async def _begin(self, message: Any) -> None:
        if message["status"] >= 400:
            self._failed = message  # sent with its body, whose length is another one
            return
        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        await self._send(message)

    async def _end_failed(self, message: Any) -> None:
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return
        status = self._failed["status"]
        body = json.dumps(error_body(_said(self._content), status)).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**self._failed, "headers": own})
        await self._send({"type": "http.response.body", "body": body})

    def _streamed(self, message: Any) -> Any:
        body = message.get("body", b"")
        before, mark, after = body.partition(ERROR_EVENT)
        if mark:
            self._is_broken = True
            text = after.removesuffix(EVENT_END).decode("utf-8", "replace")
            body = before + f"data: {json.dumps(error_body(text, 500))}\n\n".encode()
        if not message.get("more_body") and not self._is_broken:
            body += DONE
        return {**message, "body": body}


def _said(content: bytes) -> str:
    """Of what FastAPI sends: {"detail": ...}."""
    try:
        found = json.loads(content)["detail"]
    except (ValueError, TypeError, KeyError):
        return FAILED
    return found if isinstance(found, str) else FAILED
