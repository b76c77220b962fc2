"""Programs of the tests in processes of their own, without the ten seconds in which each would import torch.

A server process, one per test process, imports everything once and forks: every rank is a real process with a real
process group, its own environment and its own output. What must work where nobody has this project forks from a process
that has imported the libraries alone. A launcher is such a process too, and forks where it would start
Python: the processes that it starts are its children, as ever, and it waits for them, signals them and reads their exit
codes by its own code. What a launcher starts is also started from nothing by one test.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Optional

import psutil

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
    environments = [{**os.environ, **(environment or {}), **own} for own in _rank_variables(ranks)]
    return _run(program, environments, timeout, forks=False)


def launch(
    words: Sequence[object],
    *,
    environment: Optional[Mapping[str, str]] = None,
    timeout: float = 280.0,
    from_nothing: Optional[str] = None,
) -> Done:
    """``python WORDS`` from the root of the project: a script, ``-m`` and a module, or ``-c`` and code. Where it starts
    Python it forks. ``environment``: all of it; None: as here. ``from_nothing``: as for ``Started``."""
    environments = [dict(os.environ if environment is None else environment)]
    return _run(words, environments, timeout, forks=True, from_nothing=from_nothing)


def run_without_us(
    words: Sequence[object], *, environment: Optional[Mapping[str, str]] = None, timeout: float = 200.0
) -> Done:
    """``python WORDS`` from the root of the project, where nothing of it has been imported. ``environment``: as for
    ``launch``."""
    environments = [dict(os.environ if environment is None else environment)]
    return _run(words, environments, timeout, forks=False, kind="run without us")


def _run(
    words: Sequence[object],
    environments: list[dict[str, str]],
    timeout: float,
    forks: bool,
    kind: str = "run",
    from_nothing: Optional[str] = None,
) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(f"{folder}/{rank}.out", f"{folder}/{rank}.err") for rank in range(len(environments))]
        code = _ask(
            kind,
            words=list(map(str, words)),
            environments=environments,
            outputs=outputs,
            timeout=timeout,
            forks=forks,
            from_nothing=from_nothing,
        )
        said = [_joined(sorted(Path(folder).glob(f"*.{end}"))) for end in ("out", "err")]
    if code is None:
        raise TimeoutError(f"{words[0]} ran for more than {timeout} s: {said[1][-3000:]}")
    return Done(code, *said)


class Started(psutil.Process):
    """``python WORDS`` as ``launch`` runs it, while the test goes on; what it says goes to ``log``.

    ``from_nothing``: what is started with a word that ends so is no fork, but known to the system by its own words and
    environment. ``keyboard``: a file or a terminal that it reads; a terminal may be its ``log``, too."""

    def __init__(
        self,
        words: Sequence[object],
        log: Path,
        environment: Mapping[str, str],
        from_nothing: Optional[str] = None,
        keyboard: str = os.devnull,
    ) -> None:
        pid = _ask(
            "start",
            words=list(map(str, words)),
            environment=dict(environment),
            output=(str(log), str(log)),
            from_nothing=from_nothing,
            keyboard=keyboard,
        )
        super().__init__(pid)
        self._code: Optional[int] = None

    def poll(self) -> Optional[int]:
        """The exit code; None: it runs."""
        if self._code is None:
            self._code = _ask("poll", pid=self.pid)
        return self._code

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"process {self.pid} runs for more than {timeout} s")
            time.sleep(0.02)
        return code


def _ask(kind: str, **request: Any) -> Any:
    global _server
    if _server is None or _server.poll() is not None:
        _server = _start()
    _server.stdin.write(json.dumps({"kind": kind, **request}) + "\n")
    _server.stdin.flush()
    return json.loads(_server.stdout.readline())


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
    sys.path[0] = str(ROOT)  # and not the folder of this file
    gc.disable()  # what imports make is no garbage
    _import_libraries()
    kinds = {"run": _serve_run, "run without us": _without_us(), "start": _serve_start, "poll": _serve_poll}
    _import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(kinds[request.pop("kind")](**request)) + "\n")
        answers.flush()


def _import_libraries() -> None:
    import peft  # noqa: F401
    import PIL.Image  # noqa: F401
    import torch
    import transformers.generation
    import transformers.models.auto.image_processing_auto
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)


def _without_us() -> Callable[..., Optional[int]]:
    """``_serve_run`` of a fork of this process as it is now: what it is asked it does as this process would."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        gc.freeze()
        gc.enable()
        with theirs.makefile("rw") as asked:
            for line in asked:
                asked.write(json.dumps(_serve_run(**json.loads(line))) + "\n")
                asked.flush()
        os._exit(0)
    theirs.close()
    asked = ours.makefile("rw")

    def run(**request: Any) -> Optional[int]:
        asked.write(json.dumps(request) + "\n")
        asked.flush()
        return json.loads(asked.readline())

    return run


def _import_everything() -> None:
    import datasets  # noqa: F401
    import deepspeed
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import kornia.augmentation  # noqa: F401
    import pytest  # noqa: F401
    import rich._emoji_codes  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch.utils.serialization
    import torch.utils.tensorboard  # noqa: F401

    import scu_trainer.cli.comparison.seeds
    import scu_trainer.cli.configuration
    import scu_trainer.cli.publishing.sharing
    import scu_trainer.cli.train
    import scu_trainer.serve.running
    import scu_trainer.serve.transformers_server
    import scu_trainer.train.session.session
    import scu_trainer.train.tasks.images
    import scu_trainer.train.tasks.sensors
    import scu_trainer.train.tasks.text
    import scu_trainer.train.tasks.words  # noqa: F401
    from tests import tiny, warm  # noqa: F401 - and the models of transformers that it takes

    warm.make_what_is_kept()
    warm.make_once_what_stays_the_same()
    gc.freeze()  # the collections of the children need not walk over what was imported
    gc.enable()


def _serve_run(
    words: list[str],
    environments: list[dict[str, str]],
    outputs: list[list[str]],
    timeout: float,
    forks: bool,
    from_nothing: Optional[str],
) -> Optional[int]:
    """The exit code; None where time ran out."""
    children = {
        _fork(words, environment, output, forks, from_nothing)
        for environment, output in zip(environments, outputs, strict=True)
    }
    deadline_s, failed = time.monotonic() + timeout, 0
    while children:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                failed = failed or os.waitstatus_to_exitcode(status)
        if failed or time.monotonic() > deadline_s:
            _kill(children)
            return failed or None
        time.sleep(0.005)
    return failed


def _kill(children: set[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _serve_start(
    words: list[str], environment: dict[str, str], output: list[str], from_nothing: Optional[str], keyboard: str
) -> int:
    return _fork(words, environment, output, forks=True, from_nothing=from_nothing, keyboard=keyboard)


def _serve_poll(pid: int) -> Optional[int]:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(
    words: list[str],
    environment: dict[str, str],
    output: list[str],
    forks: bool,
    from_nothing: Optional[str] = None,
    keyboard: str = os.devnull,
) -> int:
    global _from_nothing
    pid = os.fork()
    if pid == 0:
        _from_nothing = from_nothing
        files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for path in output]
        _be(words, environment, str(ROOT), (os.open(keyboard, os.O_RDONLY), *files), forks)
    return pid


# -- a fork that is a program ------------------------------------------------------------------------------------------


def _be(words: list[str], environment: Mapping[str, str], cwd: str, files: Sequence[int], forks: bool) -> NoReturn:
    """Be what ``python WORDS`` is once it has imported everything. ``files``: its first three; -1: as here.

    ``forks``: also where it starts Python.
    """
    code = 1
    try:
        for number, descriptor in enumerate(files):
            if descriptor != -1:
                os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        before = _about_the_hub(os.environ)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        _forget_the_parent()
        if _about_the_hub(environment) != before:
            _tell_its_library()
        if forks:
            subprocess.Popen._execute_child = _fork_python
            os.execve = _become
        code = _main(words)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _about_the_hub(environment: Mapping[str, str]) -> dict[str, str]:
    """Where the Hub of Hugging Face is, whether it may be asked, and the like."""
    return {name: value for name, value in environment.items() if name.startswith("HF_")}


def _tell_its_library() -> None:
    """As if it were imported now: huggingface_hub reads its variables then, once, into a table from which some of its
    modules take copies. The client that it makes for all holds the address."""
    from huggingface_hub import constants, hf_api

    before = dict(vars(constants))
    importlib.reload(constants)
    changed = {name: value for name, value in vars(constants).items() if value != before.get(name)}
    for module in [module for name, module in sys.modules.items() if name.startswith("huggingface_hub.")]:
        vars(module).update({name: changed[name] for name in changed.keys() & vars(module).keys() if name.isupper()})
    hf_api.api.endpoint = constants.ENDPOINT


def _forget_the_parent() -> None:
    """What a program that was just started has not: signals are as they were, no file is there to be taken away."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    weakref.finalize._registry.clear()
    gc.freeze()  # and none of its files is closed here, by a number that is another file's by now


def _main(words: list[str]) -> int:
    """The exit code of ``python WORDS``."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    module = types.ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.path[:0] = [os.getcwd(), *places]
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return 0
        # Its globals are those of ``__main__``, so that what it defines can be pickled.
        sys.modules["__main__"] = module
        if words[0] == "-c":
            sys.path[:0] = ["", *places]
            sys.argv = ["-c", *words[2:]]
            exec(words[1], module.__dict__)
        else:
            sys.path[:0] = [str(Path(words[0]).resolve().parent), *places]
            sys.argv = words
            module.__file__ = words[0]
            exec(compile(Path(words[0]).read_text(), words[0], "exec"), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


_start_anything = subprocess.Popen._execute_child
_become_anything = os.execve

_from_nothing: Optional[str] = None
"""How a word ends that tells what this process, and all that it forks, starts from nothing."""


def _fork_python(popen: subprocess.Popen, args: Any, *others: Any) -> None:
    """In place of ``Popen._execute_child``: where that starts Python with all that this process has imported, fork."""
    given = inspect.signature(_start_anything).bind(popen, args, *others).arguments
    words = (
        [] if given["shell"] or isinstance(args, (str, bytes, os.PathLike)) else [os.fsdecode(word) for word in args]
    )
    is_python = len(words) > 1 and words[0] == sys.executable and given["executable"] in (None, words[0])
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    is_known = is_python and words and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
    is_excepted = _from_nothing is not None and any(word.endswith(_from_nothing) for word in words)
    if not is_known or is_excepted or given["preexec_fn"] or given["pass_fds"]:
        return _start_anything(popen, args, *others)
    sys.stdout.flush()
    sys.stderr.flush()
    popen.pid = os.fork()
    if popen.pid == 0:
        if given["start_new_session"]:
            os.setsid()
        environment = dict(os.environ if given["env"] is None else given["env"])
        files = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        _be(words, environment, os.fspath(given["cwd"] or os.getcwd()), files, forks=True)
    popen._child_created = True
    popen._close_pipe_fds(
        *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _become(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """In place of ``os.execve``: a script of this Python is run by this process as it is."""
    with open(path, "rb") as file:
        is_script = file.readline().decode(errors="ignore").strip() == f"#!{sys.executable}"
    if not is_script or _from_nothing is not None:
        _become_anything(path, words, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    _be([*words], dict(environment), os.getcwd(), (-1, -1, -1), forks=True)


if __name__ == "__main__":
    serve()
