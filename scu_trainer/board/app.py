"""The pages of the board and their addresses. Their templates are used with those of the report: same colours, tables
and drawings."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from scu_trainer.board import one
from scu_trainer.board.acts import RunActions
from scu_trainer.board.folders import NoSuchRun, can_answer, run_below, runs_below
from scu_trainer.board.listing import Listing, pill_class, report_or_unreadable, started
from scu_trainer.errors import SettingsError, UserError
from scu_trainer.report.page import environment, html
from scu_trainer.runs import words
from scu_trainer.runs.store import Run
from scu_trainer.secrets import redact

STATIC = {"board.css": "text/css", "page.css": "text/css", "theme.css": "text/css", "board.js": "text/javascript",
          "chat.js": "text/javascript", "page.js": "text/javascript"}  # fmt: skip

STANDALONE_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
"""Content-Security-Policy of pages that are complete documents: their script may switch colours but load nothing."""

MOST_BYTES = 1 << 20
"""Most bytes in the body of a request."""

CONFLICT, NOT_FOUND, TOO_LARGE = 409, 404, 413
DEVICES = ("auto", "cpu", "gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "gpu-6", "gpu-7")
FIELDS = ("config", "name", "device", "flags")
"""Fields of the form that starts a run."""

ROLES = ("user", "assistant", "system")

Answer = Callable[[str, Sequence[Mapping[str, str]]], Iterator[str]]


def show(template: str, code: int = 200, **values: Any) -> Response:
    """Render a template to a response. Values are escaped, and secrets in them are redacted."""
    text = _environment().get_template(template).render(**values)
    return html_response(text, code)


def html_response(text: str, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = redact(text).encode("utf-8", "backslashreplace")  # a folder name may be invalid UTF-8
    return HTMLResponse(content, code, headers)


def address(name: str, *parts: str) -> str:
    """Return the path of a page of the run ``name``."""
    return "/".join(("/run", quote(name.encode("utf-8", "surrogateescape"), safe=""), *parts))


@functools.cache
def _environment() -> Any:
    templates = environment("scu_trainer.board", "scu_trainer.report")
    templates.globals["address"] = address
    return templates


@functools.cache
def static(name: str) -> bytes:
    return _environment().get_template(name).render().encode()


class Board:
    """The pages and their shared state. ``answer``: yields pieces of an answer, given a model's folder and messages."""

    def __init__(self, root: Path, acts: RunActions, answer: Answer) -> None:
        self.root, self.acts, self.answer = root, acts, answer
        self.listing, self.pages = Listing(root, acts.backend.machine), one.Pages()
        self._learned: dict[Path, str] = {}

    def application(self) -> Starlette:
        """Return the ASGI application. It has no access control: wrap it in access.AccessGuard."""
        pages = (
            ("/", "GET", self.runs),
            ("/start", "GET", self.start_page),
            ("/start", "POST", self.start),
            ("/run/{name}", "GET", self.run),
            ("/run/{name}/stop", "POST", self.stop),
            ("/run/{name}/resume", "POST", self.resume),
            ("/run/{name}/report", "GET", self.report),
            ("/run/{name}/rows", "GET", self.learned),
            ("/run/{name}/rows", "POST", self.learn),
            ("/chat", "GET", self.chat_page),
            ("/chat/answer", "POST", self.chat_answer),
            ("/static/{name}", "GET", _static),
        )
        routes = [Route(path, _in_thread(act), methods=[method]) for path, method, act in pages]
        return Starlette(routes=routes, exception_handlers={NOT_FOUND: _no_such_page})

    # -- list ----------------------------------------------------------------------------------------------------------

    def runs(self, request: Request, _: Mapping[str, str]) -> Response:
        asked = {name: request.query_params.get(name, "") for name in ("name", "state", "page")}
        page = int(asked["page"]) if asked["page"].isdecimal() and len(asked["page"]) < 8 else 1
        choice = self.listing.choose(asked["name"], asked["state"], page)

        def page_address(number: int) -> str:
            return "/?" + urlencode({"name": asked["name"], "state": asked["state"], "page": number})

        return show(
            "list.html", choice=choice, asked=asked, root=str(self.root), page_address=page_address, words=words,
            mood=pill_class, started=started,
        )  # fmt: skip

    # -- one run -------------------------------------------------------------------------------------------------------

    def run(self, request: Request, _: Mapping[str, str]) -> Response:
        return self._run_page(run_below(self.root, request.path_params["name"]))

    def _run_page(self, run: Run, error: str = "", code: int = 200) -> Response:
        found = report_or_unreadable(run, self.acts.backend.machine)
        facts = list(words.facts(found)) if found.state.status != "unreadable" else [("status", found.state.detail)]
        return show(
            "run.html", code, run=run, found=found, facts=facts, mood=pill_class(found.state.status), error=error,
            page=self.pages.page(found), log="\n".join(one.log_lines(run)), is_ours=found.record is not None,
        )  # fmt: skip

    def stop(self, request: Request, _: Mapping[str, str]) -> Response:
        return self._act(request, self.acts.stop)

    def resume(self, request: Request, _: Mapping[str, str]) -> Response:
        return self._act(request, self.acts.resume)

    def _act(self, request: Request, act: Callable[[Run], None]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        try:
            act(run)
        except UserError as error:
            return self._run_page(run, str(error), CONFLICT)
        return RedirectResponse(address(run.name), 303)

    def report(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        return _standalone(html(self.pages.page(report_or_unreadable(run, self.acts.backend.machine))))

    def learned(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        page = self._learned.get(run.path)
        return show("learned.html", run=run, error="") if page is None else _standalone(page)

    def learn(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        try:
            self._learned[run.path] = one.learned_page(run)
        except UserError as error:
            return show("learned.html", CONFLICT, run=run, error=str(error))
        return RedirectResponse(address(run.name, "rows"), 303)

    # -- start ---------------------------------------------------------------------------------------------------------

    def start_page(self, request: Request, _: Mapping[str, str]) -> Response:
        return self._start_form(dict.fromkeys(FIELDS, ""))

    def _start_form(self, given: Mapping[str, str], error: str = "", code: int = 200) -> Response:
        return show("start.html", code, choices=self.acts.choices(), devices=DEVICES, given=given, error=error)

    def start(self, request: Request, form: Mapping[str, str]) -> Response:
        given = {name: form.get(name, "").strip() for name in FIELDS}
        try:
            if given["device"] not in DEVICES:
                raise SettingsError(f"device is {given['device']!r}; allowed: {', '.join(DEVICES)}")
            name = self.acts.start(**given)
        except UserError as error:
            return self._start_form(given, str(error), CONFLICT)
        return RedirectResponse(address(name), 303)

    # -- chat ----------------------------------------------------------------------------------------------------------

    def chat_page(self, request: Request, _: Mapping[str, str]) -> Response:
        names = {run.name for run in runs_below(self.root) if can_answer(run)}
        return show("chat.html", names=[row.run.name for row in self.listing.rows() if row.run.name in names])

    def chat_answer(self, request: Request, form: Mapping[str, str]) -> Response:
        """Stream an answer. The response starts with the first piece, so that an earlier error gets an error code."""
        try:
            run = run_below(self.root, form.get("name", ""))
            pieces = self.answer(str(run.path.absolute()), _messages(form.get("messages", "")))
            first = next(pieces, "")
        except UserError as error:
            return PlainTextResponse(redact(str(error)), CONFLICT)
        return StreamingResponse(_with_error(first, pieces), media_type="text/plain; charset=utf-8")


def _messages(text: str) -> list[dict[str, str]]:
    try:
        messages = [{"role": item["role"], "content": item["content"]} for item in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError("messages is not a list of objects with role and content") from error
    if not messages or not all(item["role"] in ROLES and isinstance(item["content"], str) for item in messages):
        raise SettingsError(f"messages needs one or more items, each with a role ({', '.join(ROLES)}) and a text")
    return messages


def _with_error(first: str, pieces: Iterator[str]) -> Iterator[str]:
    """Yield all pieces and, if generating them fails, the error as a last piece."""
    try:
        yield from itertools.chain([first], pieces)
    except UserError as error:
        yield f"\n[error: {redact(str(error))}]"


# -- all pages ---------------------------------------------------------------------------------------------------------


def _in_thread(act: Callable[[Request, Mapping[str, str]], Response]) -> Callable[[Request], Any]:
    """Return a handler that runs ``act`` in a thread with the fields of the form, and shows a UserError as a page."""

    async def answer(request: Request) -> Response:
        form = await _form(request)
        if form is None:
            return _error_page("the request is too large", TOO_LARGE)
        try:
            return await run_in_threadpool(act, request, form)
        except NoSuchRun as error:
            return _error_page(str(error), NOT_FOUND)
        except UserError as error:
            return _error_page(str(error), CONFLICT)

    return answer


async def _form(request: Request) -> Mapping[str, str] | None:
    """Return the fields of a form; None if the request is too large."""
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            return None
    return {name: values[-1] for name, values in parse_qs(content.decode("utf-8", "replace"), True).items()}


def _error_page(what: str, code: int) -> Response:
    return show("error.html", code, what=what)


def _no_such_page(request: Request, error: Exception) -> Response:
    return _error_page("there is no such page", NOT_FOUND)


def _standalone(page: str) -> Response:
    return html_response(page, headers={"Content-Security-Policy": STANDALONE_POLICY})


def _static(request: Request, _: Mapping[str, str]) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return _error_page("there is no such page", NOT_FOUND)
    return Response(static(name), media_type=STATIC[name])
