"""Whatever the Hub answers is one line that says what to do."""

from __future__ import annotations

import json
from types import SimpleNamespace

import hf_xet
import httpx2
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from scu_trainer.errors import HubError, ModelError
from scu_trainer.models.loading.hub_errors import as_hub_error, hub_line, is_transient_error


def answer(status: int, text: str = "no", **more: str) -> Exception:
    error = OSError(f"{status} Client Error. (Request ID: Root=1-2;3) {text} for url: https://host/x?signature=abc")
    error.response = SimpleNamespace(status_code=status)
    vars(error).update(more)
    return error


@pytest.mark.parametrize(
    ("error", "line", "passes"),
    [
        (answer(400, "bad base_model"), "the Hub refuses me/x (400): 400 Client Error. bad base_model for url", False),
        (answer(401), "the Hub does not accept the token", False),
        (answer(402), "me would have to pay for me/x", False),
        (answer(403), "the token may not write to me/x", False),
        (answer(403, server_message="Storage limit reached"), "to me/x (Storage limit reached); use one", False),
        (answer(404), "there is no me/x that this token may see, or no such revision", False),
        (answer(409), "another commit to the repository came first; run the same command again", True),
        (answer(412), "another commit to the repository came first; run the same command again", True),
        (answer(413), "the Hub refuses files of this size in me/x", False),
        (answer(429), "the Hub received too many requests", True),
        (answer(503), "the Hub failed (503); run the same command again", True),
        (httpx2.ReadTimeout("timed out"), "broke (timed out); run the same command again", True),
        (ConnectionResetError(104, "reset by peer"), "broke ([Errno 104] reset by peer)", True),
        (OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set", False),
        (HFValidationError("no such name"), "repo_id 'me/x' is not a valid Hub name: no such name", False),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "did not answer like the Hub", False),
        (ValueError("Invalid metadata in README.md.\n- license"), "the Hub refuses the model card: Invalid", False),
        (hf_xet.XetAuthenticationError("401"), "the storage of the Hub does not accept the token", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_in_one_line(error, line, passes):
    found = hub_line(error, "me/x")
    assert line in found and "\n" not in found and "signature" not in found and "Request ID" not in found
    assert is_transient_error(error) == passes
    assert "--" not in found  # train says it too, whose options have other names than those of push


def test_the_library_wraps_uploads_that_failed():
    try:
        try:
            raise answer(403)
        except OSError as cause:
            raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.") from cause
    except RuntimeError as error:
        assert hub_line(error, "me/x").startswith("the token may not write to me/x")


def test_what_has_nothing_to_do_with_the_hub_stays_as_it_is():
    assert hub_line(ZeroDivisionError("x"), "me/x") is None
    for error in (ZeroDivisionError("ours"), ModelError("told already")):
        with pytest.raises(type(error)), as_hub_error("me/x"):
            raise error
    with pytest.raises(HubError, match="does not accept the token"), as_hub_error("me/x"):
        raise answer(401)
