"""Upload a run in a single commit, which contains all files or none, and retry after broken connections.

huggingface_hub sends the large files first, and never sends a file again that has arrived, in this call or a later one;
the commit that names all files comes last. Requests that the library does not retry are retried here a few times.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, TypeVar
from urllib.parse import urlsplit

from scu_trainer.errors import HubError
from scu_trainer.figures import count_text
from scu_trainer.hub.card import CARD, is_replaceable_card
from scu_trainer.hub.files import Upload, superseded_files
from scu_trainer.models.loading.hub_errors import (
    as_hub_error,
    endpoint,
    hub_line,
    is_transient_error,
    set_connection_timeout,
    status_of,
)
from scu_trainer.secrets import redact, secret

T = TypeVar("T")

CARD_KEPT = (
    "card: README.md on the Hub was written or edited by hand and is kept; to replace it, edit the local README.md, "
    "which is then pushed instead"
)

WAITS_S = (1, 4, 15)
"""Seconds to wait before each retry of a request that failed with a broken connection or a busy server."""


def require_repo_id(repo_id: str) -> None:
    """Raise HubError if ``repo_id`` is not a valid OWNER/NAME, without a request to the Hub."""
    from huggingface_hub.utils import validate_repo_id

    if "://" in repo_id:
        name = "/".join(urlsplit(repo_id).path.strip("/").split("/")[:2])
        raise HubError(f"repo_id {repo_id!r} is a URL; give OWNER/NAME" + (f", such as {name}" if name else ""))
    with as_hub_error(repo_id):
        validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise HubError(f"repo_id {repo_id!r} names no owner; give OWNER/{repo_id}")


def require_revision(name: Optional[str], typed: str) -> None:
    """Raise HubError if the option ``typed`` has an invalid branch name, before the Hub creates a repository."""
    if name is not None and not re.fullmatch(r"(?!.*(\.\.|//|@\{))[^\s~^:?*\[\\/.-][^\s~^:?*\[\\]*(?<![/.])", name):
        raise HubError(f"{typed} {name!r} is not a valid branch name; give one such as main, or drop it")


def token_for(given: Optional[str]) -> str:
    """Return the token that was given, set or stored; from here on it is hidden wherever it would be printed. Raises
    HubError if there is none, or if it has invalid characters."""
    from huggingface_hub import get_token

    token = secret((given or get_token() or "").strip())
    if not token:
        raise HubError("there is no token to push with; run `hf auth login` or set HF_TOKEN")
    if not re.fullmatch(r"[!-~]+", token):  # other characters cannot be in an HTTP header
        raise HubError(
            "the token holds a space, a line break or a letter that no token has; copy it again from "
            f"{endpoint()}/settings/tokens"
        )
    return token


def require_push_access(repo_id: str, token: str, private: bool) -> None:
    """Raise HubError if the Hub would refuse a later push, as far as can be checked without writing. It checks the
    token, write access to the repository, and that it is private if ``private``."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    with as_hub_error(repo_id):
        set_connection_timeout()
        if "/" not in repo_id:
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        try:
            api.auth_check(repo_id, write=True)
        except HfHubHTTPError as error:
            if status_of(error) != 404:
                raise
            return  # the push will create the repository
        if private:
            _require_private(api.model_info(repo_id))


def push(
    upload: Upload,
    repo_id: str,
    *,
    token: str,
    private: bool,
    revision: Optional[str],
    message: str,
    base_id: Optional[str],
) -> dict[str, Any]:
    """Send ``upload`` as one commit.

    Returns repo_id, url, commit, files and size_bytes; ``removed``: files of an earlier push that were deleted;
    ``replaced``: names that already existed; ``before``: the revision with these files as they were; ``is_changed``:
    False if the Hub already had everything; ``is_card_kept``: see CARD_KEPT. Raises HubError with one line.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=token)
    with as_hub_error(repo_id), _retries_reported():
        if base_id is not None:
            _require_base(api, base_id)
        repo_id = _retried(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True)).repo_id
        if private:
            _require_private(_retried(lambda: api.model_info(repo_id)))
        if revision is not None:
            _retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        before = _retried(lambda: api.model_info(repo_id, revision=revision))
        is_card_kept = not upload.edited and _retried(lambda: _has_edited_card(api, before))
        if is_card_kept:
            upload = replace(upload, items=[item for item in upload.items if item.path_in_repo != CARD])
        commit = _retried(lambda: _commit(api, upload, repo_id, revision, message))
    return {
        "repo_id": repo_id,
        "url": f"{endpoint()}/{repo_id}",
        "commit": commit.oid,
        "is_changed": commit.oid != before.sha,
        "removed": superseded_files(_names(before), upload),
        "replaced": sorted({item.path_in_repo for item in upload.items} & _names(before)),
        "before": before.sha,
        "is_card_kept": is_card_kept,
        "files": len(upload.items),
        "size_bytes": upload.size_bytes,
    }


def sent_notes(sent: dict[str, Any]) -> list[str]:
    """Return notes on files that the repository had before; ``sent`` is the result of ``push``."""
    notes, kept = [CARD_KEPT] if sent["is_card_kept"] else [], f"revision {sent['before']} has them as they were"
    if sent["is_changed"] and sent["replaced"]:
        notes.append(
            f"{count_text(len(sent['replaced']), 'file was', 'files were')} there before under these names: {kept}"
        )
    if sent["removed"]:
        names = ", ".join(sent["removed"])
        notes.append(f"removed, because they would be loaded instead of the pushed files: {names}; {kept}")
    return notes


def _commit(api: Any, upload: Upload, repo_id: str, revision: Optional[str], message: str) -> Any:
    """Make the commit. Each retry needs new operations, because they remember the state of the Hub."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    gone = superseded_files(_names(api.model_info(repo_id, revision=revision)), upload)
    operations = [CommitOperationAdd(item.path_in_repo, item.source) for item in upload.items]
    operations += [CommitOperationDelete(name) for name in gone]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _has_edited_card(api: Any, info: Any) -> bool:
    """Return whether the card on the Hub was edited by hand, usually in a browser."""
    if CARD not in _names(info):
        return False
    return not is_replaceable_card(Path(api.hf_hub_download(info.id, CARD, revision=info.sha)))


def _names(info: Any) -> set[str]:
    return {file.rfilename for file in info.siblings or ()}


def _require_base(api: Any, base_id: str) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        _retried(lambda: api.model_info(base_id))
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401:
            raise
        raise HubError(
            f"the base {base_id} is not on the Hub, or this token has no access to it: people who download the adapter "
            f"need it. Add --merged to push the full weights, or name the base with --base_model OWNER/NAME"
        ) from error


def _require_private(info: Any) -> None:
    if not info.private:
        raise HubError(
            f"{info.id} already exists and is public, but the push was meant to be private; make it private in its "
            "settings on the Hub, or push to another name"
        )


# -- retries -----------------------------------------------------------------------------------------------------------


def _retried(request: Callable[[], T]) -> T:
    """Return the result of ``request``; retry it after errors that may pass, as often as WAITS_S has entries."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    for wait_s in (*WAITS_S, None):
        try:
            set_connection_timeout()
            return request()
        except (HfHubHTTPError, OSError, RuntimeError, httpx2.TransportError) as error:
            if wait_s is None or not is_transient_error(error):
                raise
            line = hub_line(error, "")
        print(f"{redact(line).partition(';')[0]}; again in {wait_s} s", file=sys.stderr)
        time.sleep(wait_s)
    raise AssertionError("the last repetition returns or raises")


class _RetryPrinter(logging.Handler):
    """Prints the library's messages about its own retries, without the query of URLs, which may hold signatures."""

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"https?://\S+", lambda found: found[0].partition("?")[0], record.getMessage())
        if not text.startswith("No files have been modified"):  # ``is_changed`` reports that
            print(redact(" ".join(text.split())), file=sys.stderr)


@contextlib.contextmanager
def _retries_reported() -> Iterator[None]:
    logger, handler = logging.getLogger("huggingface_hub"), _RetryPrinter(logging.WARNING)
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
