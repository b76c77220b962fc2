"""Starts of the real command in forked processes, killed where one likes.

Everything heavy is imported once, before the fork: a start takes half a second instead of ten. A child is killed from
outside after a time, or kills itself at its n-th step on the disk (open for writing, rename, sync, remove) below the
run directory, so that every kill is repeatable and falls inside a checkpoint as often as wanted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.run_files import read_json, read_rows
from scu_trainer.train.checkpoints.format import checkpoints, fault_of_files
from tests.forked import act_as_child

WRITING = os.O_WRONLY | os.O_RDWR
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Ended:
    """``code``: exit code, or minus the number of the signal. ``said``: what it printed."""

    code: int
    said: str
    seconds: float


class Child:
    """``act`` in a fork of this process, its output in ``log``."""

    def __init__(self, act: Callable[[], int], log: Path) -> None:
        self.log, self._began_s = log, time.monotonic()
        log.write_bytes(b"")  # what an earlier child said there is not this one's
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the collections of the child need not walk over what the parent has imported
        self.pid = os.fork()
        if self.pid == 0:
            act_as_child(act, log, truncate=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, patience_s: float = PATIENCE_S) -> Ended:
        """Raises TimeoutError, the child being killed, if it does not end."""
        while time.monotonic() - self._began_s < patience_s:
            ended = self.poll()
            if ended is not None:
                return ended
            time.sleep(0.002)
        self.kill()
        os.waitpid(self.pid, 0)
        raise TimeoutError(f"still running after {patience_s} s: {self.log.read_text()[-2000:]}")

    def poll(self) -> Optional[Ended]:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        text = self.log.read_text(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), text, time.monotonic() - self._began_s)


def train(flags: list[str]) -> int:
    from scu_trainer.cli.train import main

    return main(flags)


def launch(act: Callable[[], int], ranks: int) -> int:
    """As a launcher does: ``act`` in so many forks that find each other. Returns when all have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return act()
    return max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks))


def at_step(number: int, act: Callable[[], object]) -> None:
    """``act`` in the middle of step ``number`` of this process."""
    from scu_trainer.train.trainer import SCUTrainer

    stock = SCUTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == number - 1 and trainer.accelerator.sync_gradients:
            act()
        return stock(trainer, *args, **kwargs)

    SCUTrainer.training_step = training_step


def until(child: Child, text: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for ``text`` in the output. Raises AssertionError if it ends or takes too long."""
    began_s = time.monotonic()
    while text not in child.log.read_text():
        ended = child.poll()
        assert ended is None, ended.said
        assert time.monotonic() - began_s < patience_s, child.log.read_text()
        time.sleep(0.005)


# -- the n-th step on the disk -----------------------------------------------------------------------------------------


def die_at_disk_step(number: int, below: Path) -> None:
    """Kill this process with SIGKILL just before its ``number``-th (from 1) change below ``below``."""

    def die(seen: int) -> None:
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _at_disk_steps(below, die)


def count_disk_steps(below: Path, into: Path) -> None:
    """A line in ``into`` before each change: the checkpoint that is being written, or nothing."""
    descriptor = os.open(str(into), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(seen: int) -> None:
        written = next(below.glob("staging-checkpoint-*"), None) if below.is_dir() else None
        os.write(descriptor, f"{'' if written is None else written.name}\n".encode())

    _at_disk_steps(below, note)


def _at_disk_steps(below: Path, act: Callable[[int], None]) -> None:
    """``act`` with the number, from 1, of each change below ``below`` that this process is about to make."""
    seen = 0

    def look(event: str, arguments: tuple) -> None:
        nonlocal seen
        if _changes(event, arguments, str(below)):
            seen += 1
            act(seen)

    sys.addaudithook(look)
    _announce_syncs(below)


def _changes(event: str, arguments: tuple, below: str) -> bool:
    if event == "open":
        path, _, flags = arguments
        return bool(flags & WRITING) and str(path).startswith(below)
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        return str(arguments[0]).startswith(below) or arguments[-1] != -1  # with an open folder in place of a path
    return event == "scu_tests.sync"


def _announce_syncs(below: Path) -> None:
    """``os.fsync`` raises no audit event of its own."""
    stock = os.fsync

    def fsync(descriptor: int) -> None:
        sys.audit("scu_tests.sync", descriptor)
        stock(descriptor)

    os.fsync = fsync


# -- a run that is killed again and again ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Campaign:
    """What became of one run. ``kills``: by where they fell; ``starts``: with the last, which finished; ``resumed``:
    starts that went on from a checkpoint; ``missed``: those that had a whole one to go on from, and did not.
    """

    kills: dict[str, int]
    starts: int
    resumed: int
    missed: int
    last: Ended


def killed_until_done(words: list[str], run: Path, log: Path, choose: Callable[[int], tuple[str, float]]) -> Campaign:
    """Start the command again and again. ``choose(start)`` -> ("disk", n-th step on the disk), ("time", seconds from
    the first output on), or ("none", 0) to let it be. Raises AssertionError where a start ends by itself, but well.
    """
    kills: dict[str, int] = {}
    resumed = missed = 0
    for start in range(10_000):
        # Killed after its last word a run is finished all the same: the command then begins another one beside.
        is_finished = (run / "run.json").is_file() and read_json(run / "run.json").get("status") == "finished"
        has_checkpoint = not is_finished and any(fault_of_files(path) is None for path in checkpoints(run))
        child = _start(words, run, log, *choose(start))
        ended = child.wait()
        went_on = "resuming from" in ended.said
        resumed += went_on
        missed += has_checkpoint and not went_on and "documents:" in ended.said  # said after what is gone on from
        if ended.code == 0:
            return Campaign(kills, start + 1, resumed, missed, ended)
        assert ended.code == -signal.SIGKILL, ended.said
        where = _place(run, ended)
        kills[where] = kills.get(where, 0) + 1
    raise AssertionError("the run never came to its end")


def _start(words: list[str], run: Path, log: Path, kind: str, when: float) -> Child:
    def act() -> int:
        if kind == "disk":
            die_at_disk_step(int(when), run)
        return train(words)

    child = Child(act, log)
    if kind == "time":
        _kill_after(child, when)
    return child


def _place(run: Path, ended: Ended) -> str:
    if any(run.glob("staging-*")):
        return "inside a checkpoint"
    if "documents:" not in ended.said:
        return "while starting"
    if "\ntrained " in ended.said:
        return "after the end of training"
    return "between steps" if "\nstep " in ended.said else "before the first step"


def _kill_after(child: Child, seconds: float) -> None:
    while not child.log.stat().st_size:
        time.sleep(0.002)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        child.kill()


HISTORIES = ("scu_history.json", "curriculum.json")


def differences(run: Path, whole: Path) -> list[str]:
    """In which of weights, histories and held-out figure a finished run is not, in every digit, the unbroken one."""
    found = [] if weights(run) == weights(whole) else ["weights"]
    found += [name for name in HISTORIES if read_rows(run / name) != read_rows(whole / name)]
    if _figure(run) != _figure(whole):
        found.append("held-out figure")
    return found


def _figure(run: Path) -> float:
    return read_json(run / "scu_metrics.json")["held_out_bpt_after"]


# -- a run with all three loops ----------------------------------------------------------------------------------------


def flags(model: Path, documents: Path, run: Path, cache: Path, **more: object) -> list[str]:
    options = settings(model, documents, cache, output_dir=run, **more).items()
    return [word for name, value in options for word in (f"--{name}", *([value] if isinstance(value, str) else value))]


def settings(model: Path, documents: Path, cache: Path, **more: object) -> dict[str, str | list[str]]:
    """Twelve steps of a tiny model with lambda, micro-batches, a curriculum, dropout and evaluations; saves after
    every 3."""
    options = {
        "model_name_or_path": model,
        "dataset": documents,
        "block_size": 64,
        "validation_split_percentage": 25,
        "packing": "false",
        "num_train_epochs": 3,
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lora_r": 32,  # so that a checkpoint takes more room than the model: test_disk.py
        "lora_target_modules": ["q_proj", "v_proj"],  # a tenth of a run less than with adapters everywhere
        "lora_dropout": 0.1,
        "token_cap": 96,
        "curriculum": "token_budget+noise_guard",
        "scu_target_s": 0.02,
        "scu_prior": "init",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "sample_max_new_tokens": 1,  # of 48, which took two fifths of a run
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "report_to": "none",
        "cache_dir": cache,
        "use_cpu": "true",
        "bf16": "false",  # a third of the time of a start
        "predict_memory": "false",
        **more,
    }
    return {name: value if isinstance(value, list) else str(value) for name, value in options.items()}


@contextlib.contextmanager
def never_left_behind(children: list[Child]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                child.kill()
                os.waitpid(child.pid, 0)


def weights(run: Path) -> bytes:
    """The adapter of a finished run, or of a checkpoint."""
    return (run / "adapter_model.safetensors").read_bytes()
