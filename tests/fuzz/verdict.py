"""One command, run under a time limit in a folder of its own, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import act_as_child

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
MEMORY_BYTES = 12 * 2**30
"""Address space of a command: a refusal that comes too late must not take the machine with it."""

ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed in training"
TRACEBACK, HANG, HALF_WRITTEN, SILENT, TORN = "TRACEBACK", "HANG", "HALF-WRITTEN", "NO MESSAGE", "TORN FILE"
OFFENCES = (TRACEBACK, HANG, HALF_WRITTEN, SILENT, TORN)
RUN_FILES = ("run.json", "training_config.json", "scu_config.json", "scu_history.json", "memory_history.json")
RUN_FILES += ("scu_metrics.json", "curriculum.json")


OF_A_RUN = re.compile(r"/(_run\.lock|run\.json|training_config\.json|[^/]*-[0-9]+)$")
"""What a run leaves in its folder, and the folder that it takes beside one that is in use."""


@dataclass(frozen=True)
class Verdict:
    """``what``: one of the words above. ``message``: the line that a person reads. ``said``: all that was printed."""

    what: str
    code: int
    message: str
    seconds: float
    said: str = field(repr=False, default="")

    @property
    def is_offence(self) -> bool:
        return self.what in OFFENCES


def run_case(words: list[str], folder: Path, *, forked: bool = True, patience_s: float = PATIENCE_S) -> Verdict:
    """``scu-trainer WORDS`` with ``folder`` as the working directory. Whatever was there before must be there after."""
    log = folder.parent / f"{folder.name}.log"
    log.touch()
    before, began_s = _tree(folder), time.monotonic()
    code = _forked(words, folder, log, patience_s) if forked else _started(words, folder, log, patience_s)
    seconds, said = time.monotonic() - began_s, log.read_text(errors="replace")
    verdict = Verdict(_judged(code, said, folder, before), code or 0, _message(said), seconds, said)
    log.unlink()
    return verdict


def _forked(words: list[str], folder: Path, log: Path, patience_s: float) -> int | None:
    from scu_trainer.cli.main import main

    def act() -> int:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        sys.argv = ["scu-trainer", *words]
        sys.stderr.reconfigure(errors="backslashreplace")  # as Python's own
        return _code_of(main, words)

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        act_as_child(act, log, truncate=True)
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _end_group(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    _end_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _code_of(main, words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as exit:  # argparse's own
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _started(words: list[str], folder: Path, log: Path, patience_s: float) -> int | None:
    command = [sys.executable, "-m", "scu_trainer.cli.main", *words]
    if words[:1] == ["train"]:
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return child.wait(patience_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(child.pid)
        child.wait()


def _judged(code: int | None, said: str, folder: Path, before: set[str]) -> str:
    if code is None:
        return HANG
    if code not in (0, 2) or "Traceback (most recent call last)" in said:
        return TRACEBACK
    if any(map(_is_torn, _run_files(folder))):
        return TORN
    if code == 0:
        return ACCEPTED
    if not _message(said):
        return SILENT
    if _tree(folder) == before:
        return REFUSED
    return FAILED if _says_failed(folder, before) else HALF_WRITTEN


def _message(said: str) -> str:
    lines = [line for line in said.splitlines() if "error: " in line]
    return (lines or said.strip().splitlines() or [""])[-1]


def _tree(folder: Path) -> set[str]:
    """All names below ``folder``, and those in the places where a wrong output_dir could put something."""
    inside = {os.path.join(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}
    elsewhere = (folder.parent, Path.home(), Path("/"), Path("/dev"))
    names = {os.path.join(place, name) for place in elsewhere for name in os.listdir(place)}
    return inside | {name for name in names if OF_A_RUN.search(name)}


def _run_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.json") if path.name in RUN_FILES and "given" not in path.parts]


def _is_torn(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return True
    return False


def _says_failed(folder: Path, before: set[str]) -> bool:
    """A run that had begun and ended by its own numbers, such as a loss that is none, says so in its run.json."""
    new = [path for path in folder.rglob("run.json") if str(path) not in before]
    return any(json.loads(path.read_text()).get("status") == "failed" for path in new)


def clear(folder: Path) -> None:
    """Remove a case's folder, also where it took its own permissions away."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(root, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
