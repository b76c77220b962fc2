"""The pages of the board and their addresses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from scu_trainer.board import learned, one
from scu_trainer.board.acts import Acts
from scu_trainer.board.folders import NoSuchRun, can_answer, run_below, runs_below
from scu_trainer.board.listing import Listing, look_at, mood, started
from scu_trainer.board.render import STATIC, address, html_response, show, static
from scu_trainer.errors import SettingsError, UserError
from scu_trainer.report.page import html
from scu_trainer.runs import words
from scu_trainer.runs.store import Run
from scu_trainer.secrets import redact

ALONE = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
"""Of pages that are whole documents: their script may switch colours, and ask for nothing."""

MOST_BYTES = 1 << 20
"""Of what a form or a conversation sends."""

CONFLICT, NOT_FOUND, TOO_LARGE = 409, 404, 413
DEVICES = ("auto", "cpu", "gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "gpu-6", "gpu-7")
FIELDS = ("config", "name", "device", "flags")
"""Of the form that starts a run."""

ROLES = ("user", "assistant", "system")

Answer = Callable[[str, Sequence[Mapping[str, str]]], Iterator[str]]


class Board:
    """What the pages share. ``answer``: pieces of text by the folder of a model and the messages so far."""

    def __init__(self, root: Path, acts: Acts, answer: Answer) -> None:
        self.root, self.acts, self.answer = root, acts, answer
        self.listing, self.pages = Listing(root, acts.hands.machine), one.Pages()
        self._learned: dict[Path, str] = {}

    def application(self) -> Starlette:
        """Without a guard: put access.Guard before it."""
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
        routes = [Route(path, _guarded(act), methods=[method]) for path, method, act in pages]
        return Starlette(routes=routes, exception_handlers={NOT_FOUND: _nothing_here})

    # -- list ----------------------------------------------------------------------------------------------------------

    def runs(self, request: Request, _: Mapping[str, str]) -> Response:
        asked = {name: request.query_params.get(name, "") for name in ("name", "state", "page")}
        page = int(asked["page"]) if asked["page"].isdecimal() and len(asked["page"]) < 8 else 1
        choice = self.listing.choose(asked["name"], asked["state"], page)

        def page_address(number: int) -> str:
            return "/?" + urlencode({"name": asked["name"], "state": asked["state"], "page": number})

        return show(
            "list.html", choice=choice, asked=asked, root=str(self.root), page_address=page_address, words=words,
            mood=mood, started=started,
        )  # fmt: skip

    # -- one run -------------------------------------------------------------------------------------------------------

    def run(self, request: Request, _: Mapping[str, str]) -> Response:
        return self._shown(run_below(self.root, request.path_params["name"]))

    def _shown(self, run: Run, error: str = "", code: int = 200) -> Response:
        found = look_at(run, self.acts.hands.machine)
        facts = list(words.facts(found)) if found.state.status != "unreadable" else [("status", found.state.detail)]
        return show(
            "run.html", code, run=run, found=found, facts=facts, mood=mood(found.state.status), error=error,
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
            return self._shown(run, str(error), CONFLICT)
        return RedirectResponse(address(run.name), 303)

    def report(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        return _alone(html(self.pages.page(look_at(run, self.acts.hands.machine))))

    def learned(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        made = self._learned.get(run.path)
        return show("learned.html", run=run, error="") if made is None else _alone(made)

    def learn(self, request: Request, _: Mapping[str, str]) -> Response:
        run = run_below(self.root, request.path_params["name"])
        try:
            self._learned[run.path] = learned.learned_page(run)
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
        """The first piece is waited for: what goes wrong until then is an error, with its code."""
        try:
            run = run_below(self.root, form.get("name", ""))
            pieces = self.answer(str(run.path.absolute()), _messages(form.get("messages", "")))
            first = next(pieces, "")
        except UserError as error:
            return PlainTextResponse(redact(str(error)), CONFLICT)
        return StreamingResponse(_to_the_end(first, pieces), media_type="text/plain; charset=utf-8")


def _messages(text: str) -> list[dict[str, str]]:
    try:
        found = [{"role": one["role"], "content": one["content"]} for one in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError("messages is not a list of objects with role and content") from error
    if not found or not all(one["role"] in ROLES and isinstance(one["content"], str) for one in found):
        raise SettingsError(f"messages needs one or more, each with a role ({', '.join(ROLES)}) and a text")
    return found


def _to_the_end(first: str, pieces: Iterator[str]) -> Iterator[str]:
    try:
        yield from itertools.chain([first], pieces)
    except UserError as error:
        yield f"\n[error: {redact(str(error))}]"


# -- all pages ---------------------------------------------------------------------------------------------------------


def _guarded(act: Callable[[Request, Mapping[str, str]], Response]) -> Callable[[Request], Any]:
    """``act`` in a thread, with the fields of the form; what the user can fix becomes a page that says it."""

    async def answer(request: Request) -> Response:
        form = await _form(request)
        if form is None:
            return _said("what was sent is too large", TOO_LARGE)
        try:
            return await run_in_threadpool(act, request, form)
        except NoSuchRun as error:
            return _said(str(error), NOT_FOUND)
        except UserError as error:
            return _said(str(error), CONFLICT)

    return answer


async def _form(request: Request) -> Mapping[str, str] | None:
    """Fields of a form; None for one that is too large."""
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            return None
    return {name: values[-1] for name, values in parse_qs(content.decode("utf-8", "replace"), True).items()}


def _said(what: str, code: int) -> Response:
    return show("said.html", code, what=what)


def _nothing_here(request: Request, error: Exception) -> Response:
    return _said("there is no such page", NOT_FOUND)


def _alone(page: str) -> Response:
    return html_response(page, headers={"Content-Security-Policy": ALONE})


def _static(request: Request, _: Mapping[str, str]) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return _said("there is no such page", NOT_FOUND)
    return Response(static(name), media_type=STATIC[name])
