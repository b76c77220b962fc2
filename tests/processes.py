"""Programs of the tests in processes of their own, without the ten seconds in which each would import torch.

A server process, one per test process, imports everything once and forks: every rank is a real process with a real
process group, its own environment and its own output. Tests of the launchers themselves start the launchers.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Optional

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Done:
    """``returncode``: of the first process that failed, else 0. ``stdout``, ``stderr``: of all, one after the other."""

    returncode: int
    stdout: str
    stderr: str


def run(
    program: Sequence[object],
    *,
    ranks: Optional[int] = None,
    environment: Optional[Mapping[str, str]] = None,
    timeout: float = 200.0,
) -> Done:
    """Run the script ``program[0]`` with the arguments after it. ``ranks``: as that many processes that find each
    other; None: one process that knows of no others. When one fails the others are killed. Raises TimeoutError."""
    global _server
    if _server is None or _server.poll() is not None:
        _server = _start()
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "program": [str(word) for word in program],
            "environments": [{**os.environ, **(environment or {}), **own} for own in _rank_variables(ranks)],
            "folder": folder,
            "timeout": timeout,
        }
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        answer = _server.stdout.readline()
        outputs = [_joined(sorted(Path(folder).glob(f"*.{end}"))) for end in ("out", "err")]
    code = json.loads(answer)
    if code is None:
        raise TimeoutError(f"{program[0]} ran for more than {timeout} s: {outputs[1][-3000:]}")
    return Done(code, *outputs)


def _joined(files: Sequence[Path]) -> str:
    return "".join(file.read_text() for file in files)


def _rank_variables(ranks: Optional[int]) -> list[dict[str, str]]:
    if ranks is None:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    count = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    return [{**address, **count, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


_server: Optional[subprocess.Popen] = None


def _start() -> subprocess.Popen:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen) -> None:
    server.kill()
    server.wait()
    server.stdin.close()
    server.stdout.close()


# -- the server --------------------------------------------------------------------------------------------------------


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    sys.path.insert(0, str(ROOT))
    _import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_serve_one(request)) + "\n")
        answers.flush()


def _import_everything() -> None:
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    import scu_trainer.cli.configuration
    import scu_trainer.train.session.session  # noqa: F401

    torch.set_num_threads(1)


def _serve_one(request: dict[str, Any]) -> Optional[int]:
    """The exit code; None where time ran out."""
    children = {
        _fork(request["program"], environment, Path(request["folder"]) / str(rank)): rank
        for rank, environment in enumerate(request["environments"])
    }
    deadline_s, failed = time.monotonic() + request["timeout"], 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            del children[pid]
            failed = failed or os.waitstatus_to_exitcode(status)
            if failed:
                _kill(children)
        elif time.monotonic() > deadline_s:
            _kill(children)
            return None
        else:
            time.sleep(0.005)
    return failed


def _kill(children: Mapping[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(program: list[str], environment: dict[str, str], output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        _be(program, environment, output)
    return pid


def _be(program: list[str], environment: dict[str, str], output: Path) -> NoReturn:
    code = 1
    try:
        for number, end in ((1, "out"), (2, "err")):
            descriptor = os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        code = _script(program)
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _script(program: list[str]) -> int:
    """The exit code of a script. Its globals are those of ``__main__``, so that what it defines can be pickled."""
    import types

    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = program[0]
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(program[0]).read_text(), program[0], "exec"), module.__dict__)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    serve()
