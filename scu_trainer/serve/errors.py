"""Errors of a client's request, in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any, Optional

from starlette.responses import JSONResponse, Response

from scu_trainer.errors import UserError
from scu_trainer.secrets import redact

FAILED = "the server failed to answer; its output says why"


class BadRequest(UserError):
    """A refused request. ``status``: HTTP status. ``code`` and ``param`` (the wrong field) are as in OpenAI's API."""

    def __init__(
        self, message: str, param: Optional[str] = None, code: Optional[str] = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def response(self) -> Response:
        return JSONResponse(error_body(str(self), self.status, self.param, self.code), self.status)


def error_body(
    message: str, status: int, param: Optional[str] = None, code: Optional[str] = None
) -> dict[str, dict[str, Any]]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": redact(message), "type": kind, "param": param, "code": code}}
