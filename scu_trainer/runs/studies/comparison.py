"""Execute the runs of a comparison: a few at a time, each as an ordinary training process with its own run directory.

A run that fails is reported, and the others continue. The first SIGTERM, SIGHUP or Ctrl-C stops all runs with a
checkpoint, the second one ends them at once. If a comparison is killed, its runs continue; the next start finds them by
their token and stops them first. A lock ensures that only one comparison per folder runs at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scu_trainer.errors import StorageError
from scu_trainer.runs.control import RunBackend
from scu_trainer.runs.launch import command, environment
from scu_trainer.runs.process import TOKEN_VARIABLE, processes_with_token, send_signal, spawn_detached
from scu_trainer.runs.progress import START_LINE
from scu_trainer.runs.queue import FileLock
from scu_trainer.runs.room import GPU, visible_devices
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan, run_name
from scu_trainer.runs.studies.comparison_state import ArmState, Key, failure_reason, is_finished
from scu_trainer.stop_signals import StopCounter, stop_signals_to

LOCK_FILE = "_compare.lock"
LOOK_EVERY_S, TELL_EVERY_S = 0.1, 1.0
TRAINED, CANNOT, FAULT = 0, 2, 1
"""Exit codes of training that do not just mean that it was stopped."""

Spawn = Callable[[Sequence[str], Mapping[str, str], Path], Any]


def spawn(words: Sequence[str], variables: Mapping[str, str], console: Path) -> Any:
    """Start a run in a new session: Ctrl-C in the terminal reaches only this process, which passes it on once."""
    with console.open("a") as output:
        output.write(f"{START_LINE}{time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    return spawn_detached(words, Path.cwd(), variables, console)


@dataclass(frozen=True)
class ComparisonBackend(RunBackend):
    """As for background runs. ``spawn`` gets no folder; ``say`` prints a line for the user."""

    spawn: Spawn = spawn
    say: Callable[[str], None] = lambda line: None


@dataclass
class Runner(StopCounter):
    """Executes the runs of a plan.

    ``devices``: one name for each run that may train at the same time, such as "cpu", "cpu" or "gpu-0", "gpu-1".
    ``changed`` is called with the states after each start and end of a run; ``looked`` is called then too, and about
    once a second.
    """

    plan: ComparisonPlan
    states: dict[Key, ArmState]
    devices: Sequence[str]
    changed: Callable[[Mapping[Key, ArmState]], None]
    looked: Callable[[Mapping[Key, ArmState]], None]
    backend: ComparisonBackend = field(default_factory=ComparisonBackend)

    def run(self) -> None:
        """Execute all missing runs, and return when they have ended, or have stopped on request."""
        waiting = [key for key in self.plan.runs if self.states[key].status == "missing"]
        running: dict[str, tuple[Key, Any]] = {}
        passed_on, looked_at_s = 0, -TELL_EVERY_S
        with stop_signals_to(self._receive, self._closed):
            try:
                while running or (waiting and not self.asked):
                    for place in self._free_places(running):
                        if waiting and not self.asked:
                            running[place] = self._start(waiting.pop(0), place)
                    passed_on = self._pass_on(running, passed_on)
                    for place in [name for name, (_, process) in running.items() if process.poll() is not None]:
                        self._record_end(*running.pop(place))
                    if self.backend.clock() - looked_at_s >= TELL_EVERY_S:
                        looked_at_s = self.backend.clock()
                        self.looked(self.states)
                    self.backend.sleep(LOOK_EVERY_S)
            finally:
                for _, process in running.values():  # after an error of our own: no run may continue unwatched
                    process.terminate()

    def _free_places(self, running: Mapping[str, Any]) -> list[str]:
        """Return the free places. A place is a number and a device, because several runs may share a device."""
        places = [f"{number}:{device}" for number, device in enumerate(self.devices)]
        return [place for place in places if place not in running][: len(self.devices) - len(running)]

    def _start(self, key: Key, place: str) -> tuple[Key, Any]:
        device = place.partition(":")[2]
        self._set_state(key, ArmState("running"))
        process = self.backend.spawn(words(self.plan, key), variables(self.plan, device), self.plan.console(*key))
        return key, process

    def _record_end(self, key: Key, process: Any) -> None:
        code = process.poll()
        state = state_after_exit(self.plan, key, code, was_asked=bool(self.asked))
        self._set_state(key, state)
        lines = {"finished": "finished", "failed": f"failed: {state.error}", "missing": str(state.error)}
        self.backend.say(f"{run_name(*key)}: {lines[state.status]}")

    def _set_state(self, key: Key, state: ArmState) -> None:
        self.states[key] = state
        self.changed(self.states)
        self.looked(self.states)

    def _pass_on(self, running: Mapping[str, tuple[Key, Any]], passed_on: int) -> int:
        """Pass new stop requests on to the runs, and return how many were passed on. The third one kills the runs."""
        if self.asked == passed_on:
            return passed_on
        if passed_on == 0 and running:
            self.backend.say("stopping: runs finish their step and write a checkpoint; a second signal ends them now")
        for _, process in running.values():
            process.terminate() if self.asked < 3 else process.kill()
        return self.asked


def state_after_exit(plan: ComparisonPlan, key: Key, code: int, was_asked: bool) -> ArmState:
    """Return the state of a run that has ended, judged by its files and exit code."""
    folder, console = plan.run_folder(*key), plan.console(*key)
    if is_finished(folder):
        return ArmState("finished")
    if code == TRAINED:
        return ArmState("failed", f"ended with exit code 0, but {folder} holds no finished run")
    if code == 3 or (was_asked and code not in (CANNOT, FAULT)):
        return ArmState("missing", "stopped; run the same command to continue")
    return ArmState("failed", failure_reason(console, code))


def words(plan: ComparisonPlan, key: Key) -> list[str]:
    """Return the command of a run, which resumes from its newest checkpoint if there is one."""
    arm, seed = key
    return training_command(plan.recipe(arm), seed, plan.run_folder(arm, seed))


def training_command(config: Path, seed: int, folder: Path, *more: str) -> list[str]:
    flags = ["--config", str(config.absolute()), "--seed", str(seed), *more]
    flags += ["--output_dir", str(folder.absolute()), "--resume_from_checkpoint", "auto"]
    return command("python", flags, 1, has_gpu=False)


def variables(plan: ComparisonPlan, device: str) -> dict[str, str]:
    own = {TOKEN_VARIABLE: comparison_token(plan.folder), "OMP_NUM_THREADS": str(plan.threads), "PYTHONUNBUFFERED": "1"}
    return {**environment(1, device.startswith(GPU)), **own, **visible_devices([device])}


def comparison_token(folder: Path) -> str:
    return f"comparison {folder.absolute()}"


@contextlib.contextmanager
def exclusive_comparison(folder: Path) -> Iterator[None]:
    """Lock ``folder``, created if needed, for one comparison. Raises StorageError if another one runs there."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        if not lock.acquire():
            raise StorageError(
                f"another comparison is running in {folder}; wait for it, stop it with Ctrl-C, or give another "
                "--output_dir"
            )
        yield
    finally:
        lock.release()


def stop_remaining_runs(folder: Path, backend: ComparisonBackend) -> None:
    """Stop the runs that a killed comparison left behind, and wait until they have ended."""
    left = processes_with_token(comparison_token(folder), backend.machine)
    supervisors = [process for process in left if _leads_session(process.pid)]
    if supervisors:
        backend.say(f"an earlier start was killed; its remaining runs write a checkpoint and stop: {len(supervisors)}")
    for process in supervisors:  # only once: a second signal would end them without a checkpoint
        send_signal(process, signal.SIGTERM, backend.machine)
    while left := processes_with_token(comparison_token(folder), backend.machine):
        if not any(_leads_session(process.pid) for process in left):  # data loader workers of a dead run
            for process in left:
                send_signal(process, signal.SIGKILL, backend.machine)
        backend.sleep(LOOK_EVERY_S)


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
