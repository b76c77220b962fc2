"""Background runs of a tiny model: detached for real, each in a session of its own, forked from this process.

Only the start of the interpreter is left out, which would import torch for five seconds: everything after it is the
process that ``runs start`` makes (scu_trainer/runs/supervisor.py), with the real command as its training.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Optional

import psutil
import yaml

from scu_trainer.cli.background.supervisor import train
from scu_trainer.runs.control import RunBackend, StartRequest, resume, start, stop
from scu_trainer.runs.progress import START_LINE
from scu_trainer.runs.state import Report, report
from scu_trainer.runs.store import Options, Run
from scu_trainer.runs.supervisor import SupervisorBackend, supervise
from scu_trainer.train.checkpoints.findings import examine
from scu_trainer.train.checkpoints.format import checkpoints, step_of
from tests.faults import campaign
from tests.forked import act_as_child

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Forked:
    """As a Popen: of a process that is nobody's child here."""

    pid: int
    born_s: float

    def poll(self) -> Optional[int]:
        return None if lives(self) else 0


Train = Callable[[Sequence[str]], int]


def hang(words: Sequence[str]) -> int:
    """In place of training: does not end by itself, however long the process that has started it takes."""
    time.sleep(600)
    return 1


def spawn(words: Sequence[str], cwd: str, environment: Mapping[str, str], log: Path, trains: Train = train) -> Forked:
    """In place of ``spawn_detached``."""
    reader, writer = os.pipe()
    gc.freeze()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            _be_a_supervisor(Path(words[-1]), cwd, environment, log, trains)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    # What has been written, and not all until the end: the end comes when the last process that holds it has closed it.
    pid = int(os.read(reader, 32))
    os.close(writer)
    os.close(reader)
    try:
        return Forked(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return Forked(pid, -1.0)


def _be_a_supervisor(path: Path, cwd: str, environment: Mapping[str, str], log: Path, trains: Train) -> NoReturn:
    def act() -> int:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        return supervise(
            Run(path, path.name), SupervisorBackend(trains, sleep=lambda seconds: time.sleep(min(seconds, 0.02)))
        )

    act_as_child(act, log)


def hands() -> RunBackend:
    return RunBackend(spawn=spawn)


def lives(process: Forked) -> bool:
    """The truth, from the system and not from our files."""
    try:
        found = psutil.Process(process.pid)
        return found.create_time() == process.born_s and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_session(number: int) -> list[int]:
    """Processes of the session ``number`` that are no zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def configuration(model: Path, documents: Path, cache: Path, **more: object) -> str:
    """YAML of the run of tests/faults/campaign.py, without its place."""
    return yaml.safe_dump(campaign.settings(model, documents, cache, **more))


def write_documents(path: Path) -> Path:
    rows = [{"text": f"The cat sat on the mat and looked. Number {i}. " * (2 + i % 5)} for i in range(48)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole_step(run: Path) -> int:
    """Of the newest checkpoint that training itself takes for whole, hashes compared; 0: there is none."""
    return max((step_of(path) for path in checkpoints(run) if examine(path, 1).fault is None), default=0)


# -- the campaign ------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a campaign saw. ``wrong``: everything that should not have been."""

    events: Counter = field(default_factory=Counter)
    looks: int = 0
    longest_look_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Campaign:
    """Cycles of start, status, stop, kill and resume, two runs at a time: one trains, one waits behind it.

    After every event the status is compared with the truth; a checkpoint that was whole must not be lost.
    """

    def __init__(
        self, root: Path, config: str, chance: random.Random, longest_s: float, with_worker: float = 0.0
    ) -> None:
        """``longest_s``: between two events at most. ``with_worker``: share of runs with a loader process."""
        self.root, self.config, self.chance, self.longest_s = root, config, chance, longest_s
        self.with_worker = with_worker
        self.found = Found()
        self.alive: dict[str, Forked] = {}
        self.supervisors: list[Forked] = []
        self.names = 0
        self.had: dict[tuple[str, int], int] = {}
        self._hands = replace(hands(), spawn=self._spawn)
        self._spawned: Optional[Forked] = None
        self._trains: Train = train

    def _spawn(self, *arguments: Any) -> Forked:
        self._spawned = spawn(*arguments, trains=self._trains)
        self.supervisors.append(self._spawned)
        return self._spawned

    def cycle(self) -> None:
        """One run that trains and one that waits; something happens to each; then the status of both is asked for."""
        first, second = self._begin(), self._begin()
        self._sleep()
        self.look(first)
        self._happens(second, ("stop", "kill", "stop now", "nothing"))
        self._sleep()
        self._happens(first, ("stop", "kill", "stop now", "kill"))
        self.look(second)

    def kill_at_once(self) -> None:
        """One run is killed while it would train, so that there is one to resume: forks of a large process are slow,
        and the others may all have finished before anything happens to them."""
        self._trains = hang
        name = self._begin()
        self._trains = train
        self._happens(name, ("kill",))

    def finish(self) -> list[str]:
        """Every run is resumed until it is done. Returns their names."""
        names = [f"run_{number}" for number in range(self.names)]
        for name in names:
            for _ in range(20):
                seen = self.look(name)
                if seen.state.status == "finished" and not seen.state.is_alive:
                    break
                if not seen.state.is_alive:
                    self._resume(name)
                self._wait_for_end(name)
            else:
                self.found.wrong.append(f"{name} never finished: {self.look(name).state}")
        self._check_where_they_went_on()
        for supervisor in self.supervisors:
            if left := in_session(supervisor.pid):
                self.found.wrong.append(f"orphans of {supervisor.pid}: {left}")
        return names

    def _check_where_they_went_on(self) -> None:
        """What training printed at each start that came so far as to read its data."""
        for (name, number), had in self.had.items():
            said = self._run(name).console.read_text().partition(f"{START_LINE}{number},")[2].partition(START_LINE)[0]
            went_on = re.search(r"resuming from \S*checkpoint-(\d+)", said)
            if "documents:" in said and (int(went_on[1]) if went_on else 0) < had:
                self.found.wrong.append(f"{name} had checkpoint-{had} at start {number}: {said[:400]}")

    # -- events

    def _begin(self) -> str:
        """A new run, or one that was stopped or killed goes on."""
        ended = [name for name in map("run_{}".format, range(self.names)) if self._may_go_on(name)]
        if ended and self.chance.random() < 0.6:
            return self._resume(self.chance.choice(ended))
        name, self.names = f"run_{self.names}", self.names + 1
        flags = ("--dataloader_num_workers", "1") if self.chance.random() < self.with_worker else ()
        options = Options(nice=1, device="cpu", max_ram_percent=100)
        start(StartRequest(name, self.config, flags, options), self.root, self._hands)
        self.found.events["start"] += 1
        self.alive[name] = self._spawned
        return name

    def _may_go_on(self, name: str) -> bool:
        return not lives(self.alive[name]) and self.look(name).state.status in ("stopped", "killed")

    def _resume(self, name: str) -> str:
        before = whole_step(self.root / name)
        record, checkpoint = resume(self._run(name), self._hands)
        self.found.events["resume"] += 1
        self.alive[name] = self._spawned
        told = 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])
        if told != before:
            self.found.wrong.append(f"{name}: resume told of step {told}, whole is {before}")
        self.had[name, record.starts] = before
        return name

    def _happens(self, name: str, kinds: Sequence[str]) -> None:
        kind, run = self.chance.choice(kinds), self._run(name)
        if not lives(self.alive[name]):
            return
        was_queued = run.record().phase == "queued"
        had = whole_step(run.path)
        self.found.events[f"{kind} while {'queued' if was_queued else 'training'}"] += 1
        if kind == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.alive[name].pid, signal.SIGKILL)
            self._wait_for_end(name)
        elif kind != "nothing":
            stop(run, self._hands, PATIENCE_S, now=kind == "stop now")
            if lives(self.alive[name]) or in_session(self.alive[name].pid):
                self.found.wrong.append(f"{name} lives after {kind}")
        seen = self.look(name)
        allowed = ("stopped", "finished", "killed")[: 3 if kind == "kill" else 2]
        if kind != "nothing" and seen.state.status not in allowed:
            self.found.wrong.append(f"{name} after {kind}: {seen.state}")
        if whole_step(run.path) < had:
            self.found.wrong.append(f"{name} lost checkpoint-{had} by {kind}")

    def look(self, name: str) -> Report:
        """The status, compared with the truth; where that changed meanwhile either is right."""
        before = lives(self.alive[name])
        begun_s = time.monotonic()
        seen = report(self._run(name), self._hands.machine)
        self.found.longest_look_s = max(self.found.longest_look_s, time.monotonic() - begun_s)
        after = lives(self.alive[name])
        self.found.looks += 1
        if before == after != seen.state.is_alive:
            self.found.wrong.append(f"{name} is {'alive' if after else 'dead'}, told: {seen.state}")
        if not seen.state.is_alive and seen.state.status in ("queued", "starting", "running", "stopping"):
            self.found.wrong.append(f"{name} is dead, told: {seen.state}")
        training = [other for other in self.alive if lives(self.alive[other]) and self._phase(other) == "training"]
        if len(training) > 1:
            self.found.wrong.append(f"trained at once: {training}")
        return seen

    def _phase(self, name: str) -> str:
        return self._run(name).record().phase

    def _wait_for_end(self, name: str) -> None:
        begun_s = time.monotonic()
        while lives(self.alive[name]):
            if time.monotonic() - begun_s > PATIENCE_S:
                raise TimeoutError(f"{name} does not end: {self._run(name).console.read_text()[-2000:]}")
            time.sleep(0.01)

    def _sleep(self) -> None:
        time.sleep(self.chance.uniform(0, self.longest_s))

    def _run(self, name: str) -> Run:
        return Run(self.root / name, name)

    def end_all(self) -> None:
        """Whatever has happened: nothing of ours goes on."""
        for supervisor in self.supervisors:
            for pid in in_session(supervisor.pid) if lives(supervisor) else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
