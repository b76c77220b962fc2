"""One-line explanations of errors that the Hub returns and of broken connections."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Optional

from scu_trainer.errors import HubError, UserError

PASSING_STATUS = (408, 409, 412, 429, 500, 502, 503, 504)
"""HTTP status codes after which the same request may succeed."""

STALL_S = 120.0
"""Seconds without a byte after which a connection counts as broken; huggingface_hub itself would wait forever."""

AGAIN = "run the same command again: files that have arrived are not sent again"


@contextlib.contextmanager
def as_hub_error(repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub raises about ``repo_id`` into a HubError with one line; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        line = None if isinstance(error, UserError) else hub_line(error, repo_id)
        if line is None:
            raise
        raise HubError(line) from error


def hub_line(error: BaseException, repo_id: str) -> Optional[str]:
    """Return what went wrong with ``repo_id`` and what to do; None for an error that does not come from the Hub."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    for cause in _causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, so nothing can be sent to the Hub; unset it"
        if isinstance(cause, HFValidationError):
            reason = "it has more than one slash; give OWNER/NAME" if repo_id.count("/") > 1 else _short(cause)
            return f"repo_id {repo_id!r} is not a valid Hub name: {reason}"
        if status_of(cause) is not None:
            return _explained_status(cause, repo_id)
        if isinstance(cause, PermissionError) and type(cause).__module__.startswith("hf_xet"):
            return f"the storage of the Hub does not accept the token for {repo_id}; use one with write access"
        if is_broken_connection(cause):
            return f"the connection to {endpoint()} broke ({_short(cause) or type(cause).__name__}); {AGAIN}"
        if isinstance(cause, json.JSONDecodeError):
            return (
                f"{endpoint()} did not answer like the Hub, but for instance with a login page; check HF_ENDPOINT, and "
                "whether this network asks for a login"
            )
        if isinstance(cause, ValueError) and "README.md" in str(cause):
            return f"the Hub refuses the model card: {_short(cause)}; fix README.md"
    return None


def without_retry_advice(line: str) -> str:
    """Return ``line`` without the advice to run the command again: after a training, that would train again."""
    return re.sub(f"(; |, then ){re.escape(AGAIN)}$", "", line)


def set_connection_timeout() -> None:
    """Set the timeout of huggingface_hub's session in this process; after some errors the library makes a new one."""
    from huggingface_hub import get_session

    get_session().timeout = STALL_S


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_transient_error(error: BaseException) -> bool:
    """Return whether the same request may succeed in a moment, as after a broken connection or with a busy server."""
    return any(status_of(cause) in PASSING_STATUS or is_broken_connection(cause) for cause in _causes(error))


def is_broken_connection(error: BaseException) -> bool:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    return isinstance(error, (httpx2.TransportError, ConnectionError))


def status_of(error: BaseException) -> Optional[int]:
    """Return the HTTP status of the Hub's response; None if there was no response."""
    response: Any = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _explained_status(error: BaseException, repo_id: str) -> str:
    status = status_of(error)
    owner = repo_id.partition("/")[0]
    known = {
        401: f"the Hub does not accept the token; make one with write access at {endpoint()}/settings/tokens, then "
        "`hf auth login`, or set HF_TOKEN",
        402: f"{owner} would have to pay for {repo_id}; push to a public repository, or to another owner",
        403: f"the token may not write to {repo_id}{_reason(error)}; use one with write access to {owner}, or push "
        "to another name",
        404: f"there is no {repo_id} that this token may see, or no such revision; check the names of both",
        409: f"another commit to the repository came first; {AGAIN}",
        412: f"another commit to the repository came first; {AGAIN}",
        413: f"the Hub refuses files of this size in {repo_id}: {_short(error)}",
        429: f"the Hub received too many requests; wait some minutes, then {AGAIN}",
    }
    if status in known:
        return known[status]
    if status >= 500:
        return f"the Hub failed ({status}); {AGAIN}"
    return f"the Hub refuses {repo_id} ({status}): {_short(error)}"


def _reason(error: BaseException) -> str:
    """Return the Hub's own reason in parentheses, or "": a full storage quota has the same status as a wrong token."""
    return f" ({_short(error)})" if getattr(error, "server_message", None) else ""


def _causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """Yield ``error`` and the errors that it was raised from; huggingface_hub wraps errors of failed uploads."""
    while error is not None:
        yield error
        error = error.__cause__


def _short(error: BaseException) -> str:
    """Return the error as one line, without request ids and URLs, which may hold signatures."""
    text = re.sub(r"\(Request ID: .*?\)|\(?https?://\S+", "", getattr(error, "server_message", None) or str(error))
    return " ".join(text.split())[:200].rstrip(" .;:")
