"""What the Hub answers and connections that break, in one line each."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Optional

from scu_trainer.errors import HubError, UserError

PASSING_STATUS = (408, 409, 412, 429, 500, 502, 503, 504)
"""Answers after which the same request may succeed."""

STALL_S = 120.0
"""Seconds without a byte after which a connection counts as broken; the library itself would wait for ever."""

AGAIN = "run the same command again: what has arrived is not sent twice"


@contextlib.contextmanager
def as_hub_error(repo_id: str) -> Iterator[None]:
    """What huggingface_hub raises about ``repo_id`` becomes one HubError."""
    try:
        yield
    except Exception as error:
        line = None if isinstance(error, UserError) else hub_line(error, repo_id)
        if line is None:
            raise
        raise HubError(line) from error


def hub_line(error: BaseException, repo_id: str) -> Optional[str]:
    """What went wrong with ``repo_id`` and what to do; None for an error that has nothing to do with the Hub."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    for cause in _causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, so nothing can be sent to the Hub; unset it"
        if isinstance(cause, HFValidationError):
            more = "it has more than one slash; give OWNER/NAME" if repo_id.count("/") > 1 else _short(cause)
            return f"repo_id {repo_id!r} is not a valid Hub name: {more}"
        if status_of(cause) is not None:
            return _answer(cause, repo_id)
        if isinstance(cause, PermissionError) and type(cause).__module__.startswith("hf_xet"):
            return f"the storage of the Hub does not accept the token for {repo_id}; use one with write access"
        if is_broken_connection(cause):
            return f"the connection to {endpoint()} broke ({_short(cause) or type(cause).__name__}); {AGAIN}"
        if isinstance(cause, json.JSONDecodeError):
            return (
                f"{endpoint()} answered with something else than the Hub does, such as the page of a login; check "
                "HF_ENDPOINT, and what this network asks for"
            )
        if isinstance(cause, ValueError) and "README.md" in str(cause):
            return f"the Hub refuses the model card: {_short(cause)}; fix README.md"
    return None


def without_again(line: str) -> str:
    """Of a push that belongs to a training: the same command would train again."""
    return re.sub(f"(; |, then ){re.escape(AGAIN)}$", "", line)


def end_stalls() -> None:
    """Give the connections of huggingface_hub in this process an end; it makes new ones after some errors."""
    from huggingface_hub import get_session

    get_session().timeout = STALL_S


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: a broken connection, a server that is busy."""
    return any(status_of(cause) in PASSING_STATUS or is_broken_connection(cause) for cause in _causes(error))


def is_broken_connection(error: BaseException) -> bool:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    return isinstance(error, (httpx2.TransportError, ConnectionError))


def status_of(error: BaseException) -> Optional[int]:
    """The number of an answer of the Hub; None where there was none."""
    response: Any = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _answer(error: BaseException, repo_id: str) -> str:
    status = status_of(error)
    owner = repo_id.partition("/")[0]
    known = {
        401: f"the Hub does not accept the token; make one with write access at {endpoint()}/settings/tokens, then "
        "`hf auth login`, or set HF_TOKEN",
        402: f"{owner} would have to pay for {repo_id}; push to a public repository or to another owner",
        403: f"the token may not write to {repo_id}{_reason(error)}; use one with write access to {owner}, or push "
        "to another name",
        404: f"there is no {repo_id} that this token may see, or no such revision; check the names of both",
        409: f"another commit to the repository came first; {AGAIN}",
        412: f"another commit to the repository came first; {AGAIN}",
        413: f"the Hub refuses files of this size in {repo_id}: {_short(error)}",
        429: f"the Hub has had too many requests; wait some minutes, then {AGAIN}",
    }
    if status in known:
        return known[status]
    if status >= 500:
        return f"the Hub failed ({status}); {AGAIN}"
    return f"the Hub refuses {repo_id} ({status}): {_short(error)}"


def _reason(error: BaseException) -> str:
    """In the words of the Hub: a token is not the only one, there is a limit of space too."""
    return f" ({_short(error)})" if getattr(error, "server_message", None) else ""


def _causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """``error`` and what it was raised from: the library wraps uploads that failed."""
    while error is not None:
        yield error
        error = error.__cause__


def _short(error: BaseException) -> str:
    """One line, without request ids and addresses, which carry signatures."""
    text = re.sub(r"\(Request ID: .*?\)|\(?https?://\S+", "", getattr(error, "server_message", None) or str(error))
    return " ".join(text.split())[:200].rstrip(" .;:")
