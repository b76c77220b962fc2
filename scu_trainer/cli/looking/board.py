"""``scu-trainer board``: shows and controls the runs of this machine in a browser."""

from __future__ import annotations

import argparse
import functools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer import shipped
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser, add_consent
from scu_trainer.cli.subjects import subject_of
from scu_trainer.cli.talking.options import talker
from scu_trainer.errors import SettingsError, require_packages
from scu_trainer.listening import (
    HOST,
    allowed_hosts,
    check_address,
    is_every_address,
    is_loopback,
    listening_socket,
    url_host,
)
from scu_trainer.models.loading.names import nearest_folder_hint
from scu_trainer.report.files import STATUS_FILE
from scu_trainer.runs.control import RunBackend
from scu_trainer.runs.store import ROOT
from scu_trainer.secrets import remember

if TYPE_CHECKING:
    from scu_trainer.talk.model import Talker

DESCRIPTION = """\
Shows the runs of this machine in a browser: list and queue, live curves, memory, notices, the data. Starts, stops and
resumes runs, and lets you chat with two models side by side. Contacts nothing outside this machine."""

PORT = 7860
MAX_NEW_TOKENS = 256
_loading = threading.Lock()

Serve = Callable[[Any, socket.socket], None]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scu-trainer board", description=DESCRIPTION)
    parser.add_argument("--runs_dir", type=Path, default=ROOT, help="directory that holds the runs (runs)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on this machine ({PORT}); 0 picks a free one")
    parser.add_argument(
        "--configs", type=Path, nargs="+", default=[shipped.here("recipes")], metavar="PATH",
        help="configuration files, or folders with such files, that a run may be started from (recipes)",
    )  # fmt: skip
    parser.add_argument("--host", default=HOST, help=f"address to listen on ({HOST}); any address other than "
                        "loopback needs --allow_network")  # fmt: skip
    parser.add_argument("--allow_network", action="store_true",
                        help="let other machines reach --host: anyone with the printed address can start "
                        "programs here, and the connection is not encrypted")  # fmt: skip
    add_consent(parser)
    return parser


@guarded
def main(argv: list[str], serve: Optional[Serve] = None, backend: Optional[RunBackend] = None) -> int:
    options = _parser().parse_args(argv)
    _check_options(options)
    require_packages("the board", "board", ("jinja2", "matplotlib", "starlette", "uvicorn"), loads=True)
    from scu_trainer.board.access import AccessGuard
    from scu_trainer.board.acts import RunActions
    from scu_trainer.board.app import Board

    listening = listening_socket(options.host, options.port)
    port, token, backend = listening.getsockname()[1], secrets.token_urlsafe(32), backend or RunBackend()
    remember(token)
    actions = RunActions(options.configs, _start_function(options.runs_dir, backend), backend)
    consent = {"trust_remote_code": options.trust_remote_code, "allow_pickle": options.allow_pickle}
    board = Board(options.runs_dir, actions, functools.partial(stream_answer, **consent))
    app = AccessGuard(board.application(), token, allowed_hosts(options.host, port), f"scu_board_{port}")
    print(f"runs of {options.runs_dir}: http://{url_host(options.host)}:{port}/?token={token}")
    if not options.runs_dir.exists():
        near = nearest_folder_hint(str(options.runs_dir))
        print(f"{options.runs_dir} does not exist yet{near}; the first run that is started here creates it")
    print("anyone with this address can start programs here; Ctrl-C ends the board, runs continue", flush=True)
    (serve or _serve)(app, listening)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    check_address(options.host, options.port)
    if options.runs_dir.exists() and not options.runs_dir.is_dir():
        raise SettingsError(f"--runs_dir {options.runs_dir} is a file; give the directory that holds the runs")
    if is_every_address(options.host):
        raise SettingsError(f"--host {options.host} means every address of this machine; give one address to listen on")
    if not is_loopback(options.host) and not options.allow_network:
        raise SettingsError(f"--host {options.host} can be reached from other machines; add --allow_network, or "
        f"better keep {HOST} and connect with ssh -L {options.port}:{HOST}:{options.port}")  # fmt: skip


def _serve(app: Any, listening: socket.socket) -> None:
    import uvicorn

    # Requests are not logged, because the first URL holds the token.
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
    )
    uvicorn.Server(settings).run(sockets=[listening])


def _start_function(root: Path, backend: RunBackend) -> Callable[[Path, str, str, Sequence[str]], str]:
    """Return the function with which the board starts a run. It returns the name of the run."""
    from scu_trainer.cli.background.runs import parse_runs_words, start_runs

    def start(config: Path, name: str, device: str, flags: Sequence[str]) -> str:
        name_flags = [f"--name={name}"] if name else []
        options = parse_runs_words(["start", f"--config={config}", f"--root={root}", f"--device={device}", *name_flags])
        return start_runs(options, flags, backend)[0][0]

    return start


# -- answers -----------------------------------------------------------------------------------------------------------


def stream_answer(name: str, messages: Sequence[Mapping[str, str]], **consent: bool) -> Iterator[str]:
    """Yield an answer in pieces of text. ``name``: as for ``scu-trainer chat``. ``messages``: role and content, the
    newest last. ``consent``: trust_remote_code, allow_pickle. Raises UserError if the model cannot be loaded or run.
    Closing the iterator ends the generation."""
    from scu_trainer.talk.answers import AnswerSettings, fit_to_positions, stream

    with _loading:
        model = _loaded(name, **consent)
    settings = AnswerSettings(max_new_tokens=MAX_NEW_TOKENS)
    token_ids, dropped, settings = fit_to_positions(model, [dict(message) for message in messages], settings)
    if dropped:
        yield f"[the oldest {dropped} messages no longer fit and are left out]\n"
    yield from stream(model, token_ids, settings)


def _loaded(name: str, **consent: bool) -> Talker:
    status = Path(name) / STATUS_FILE
    return _cached_talker(name, status.stat().st_mtime_ns if status.is_file() else None, **consent)


@functools.lru_cache(maxsize=2)
def _cached_talker(name: str, changed_ns: Optional[int], **consent: bool) -> Talker:
    """Return a loaded model; the last two stay loaded. It is loaded again if its run has changed, because a run that
    continues or starts over in the same folder is another model."""
    resolved = subject_of(name)
    return talker(replace(resolved, name=Path(name).name, model=replace(resolved.model, **consent)))
