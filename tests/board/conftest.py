"""A board over real run directories, in this process: asked directly (``ask``), or on a port (``opened``)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import httpx
import pytest
import uvicorn

from scu_trainer.board.access import AccessGuard
from scu_trainer.board.acts import RunActions
from scu_trainer.board.app import Board
from scu_trainer.cli.looking import board as command
from scu_trainer.runs.control import RunBackend
from tests.report.made_runs import drawn_once

TOKEN, HOST, COOKIE = "a-token-of-this-test", "127.0.0.1:7860", "scu_board_7860"
ORIGIN = f"http://{HOST}"


@pytest.fixture(scope="module", autouse=True)
def _drawn_once():
    """Most runs of these tests are the same one."""
    with drawn_once():
        yield


@dataclass
class Site:
    """A board that is asked without a network."""

    board: Board
    token: str = TOKEN

    def ask(self, path: str, method: str = "GET", **given: Any) -> httpx.Response:
        """With the cookie and the headers of a browser on the board's own page, unless ``headers`` says otherwise."""
        headers = {"Host": HOST, "Cookie": f"{COOKIE}={self.token}", **({"Origin": ORIGIN} if method == "POST" else {})}
        return self.bare(path, method, {**headers, **given.pop("headers", {})}, **given)

    def bare(self, path: str, method: str = "GET", headers: Optional[dict] = None, **given: Any) -> httpx.Response:
        app = AccessGuard(self.board.application(), self.token, [HOST, "localhost:7860"], COOKIE)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN) as client:
                return await client.request(method, path, headers={**(headers or {"Host": HOST})}, **given)

        return asyncio.run(ask())


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def site(root, tmp_path) -> Site:
    (tmp_path / "recipe.yaml").write_text("output_dir: runs/short\n")
    hands = RunBackend()
    acts = RunActions([tmp_path / "recipe.yaml"], command._start_function(root, hands), hands)
    return Site(Board(root, acts, command.stream_answer))


@contextlib.contextmanager
def opened(root: Path, configurations: list[Path], hands: Optional[RunBackend] = None) -> Iterator[str]:
    """The real command on a free port; its address, as it prints it."""
    servers, is_up = [], threading.Event()

    def serve(app: Any, listening: Any) -> None:
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)))
        is_up.set()
        asyncio.run(servers[0].serve(sockets=[listening]))

    words = ["--runs_dir", str(root), "--port", "0", "--configs", *map(str, configurations)]
    thread = threading.Thread(target=command.main, args=(words, serve, hands))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        thread.start()
        assert is_up.wait(30)
    yield said.getvalue().split(": ", 1)[1].split()[0]
    servers[0].should_exit = True
    thread.join(10)
