"""Contenders that take turns: each runs in its own process, as its user would start it, a few optimizer steps at a
time.

Drift of the machine affects all contenders equally, and those that wait do nothing. The time of a turn includes loading
its batches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Optional, TypeVar
from unittest.mock import patch

from tqdm import tqdm
from transformers import TrainerCallback

T = TypeVar("T")

WARM_UP_TURNS = 2
"""Turns at the start of each contender that are not counted, because of caches, lazy set-up, and loops that measure
their first micro-batches one by one."""


@dataclass(frozen=True)
class Contender:
    """One contender. ``work(turns, *arguments)`` runs in its own process and returns the results of the contender."""

    name: str
    work: Callable[..., dict[str, Any]]
    arguments: tuple = ()
    environment: tuple[tuple[str, str], ...] = ()


class Turns:
    """The side of a contender: it takes ``steps_per_turn`` optimizer steps whenever it has its turn."""

    def __init__(self, parent: Connection, steps_per_turn: int) -> None:
        self._parent, self._steps_per_turn = parent, steps_per_turn
        self._steps, self._begun_s = 0, 0.0

    def begin(self) -> None:
        """Wait for the first turn, after everything is set up."""
        self._parent.send(None)
        self._wait_for_turn()

    def step(self) -> None:
        self._steps += 1
        if self._steps == self._steps_per_turn:
            self.end()
            self._wait_for_turn()

    def end(self) -> None:
        """Report the seconds of a turn. The last turn may have fewer steps."""
        self._parent.send(time.perf_counter() - self._begun_s)

    def _wait_for_turn(self) -> None:
        self._parent.recv()
        self._steps, self._begun_s = 0, time.perf_counter()


@dataclass
class StepSeconds:
    """Replaces turns: nothing waits, and every step except the last one is a turn."""

    seconds: list[float] = field(default_factory=list)
    _begun_s: float = 0.0

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def step(self) -> None:
        self.seconds.append(time.perf_counter() - self._begun_s)
        self.begin()


class TakesTurns(TrainerCallback):
    """Takes turns in any Trainer. The last step of the training does not end a turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            self._turns.step()


@dataclass(frozen=True)
class Ended:
    """The results of a contender in a round. ``seconds``: of each turn after the warm-up; ``said``: its own results."""

    seconds: list[float]
    said: dict[str, Any]


def in_turns(
    contenders: Sequence[Contender],
    steps_per_turn: int,
    warm_up_turns: int = WARM_UP_TURNS,
    on_turn: Callable[[str], object] = lambda name: None,
) -> dict[str, Ended]:
    """Run all contenders to their end. Their processes start in the order of ``contenders``. ``on_turn`` is called with
    the name of a contender after each of its turns. Raises RuntimeError if a contender fails."""
    started = {contender.name: _start(contender, steps_per_turn) for contender in contenders}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    said: dict[str, dict[str, Any]] = {}
    while len(said) < len(contenders):
        for name, (_, connection) in started.items():
            if name in said:
                continue
            connection.send(None)
            answer = _receive(name, connection)
            on_turn(name)
            if isinstance(answer, dict):
                said[name] = answer
            else:
                seconds[name].append(answer)
    for process, _ in started.values():
        process.join()
    return {name: Ended(turns[warm_up_turns:], said[name]) for name, turns in seconds.items()}


def rounds(contenders: Sequence[Contender], steps_per_turn: int, repeats: int, **given: int) -> list[dict[str, Ended]]:
    """Run all contenders ``repeats`` times, each time with another one first."""
    found = []
    for number in range(repeats):
        with shown(f"round {number + 1} of {repeats}") as on_turn:
            found.append(in_turns(another_first(contenders, number), steps_per_turn, on_turn=on_turn, **given))
    return found


@contextlib.contextmanager
def shown(title: str, turns: Optional[int] = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar that advances with each turn and displays the name of its contender."""
    with tqdm(total=turns, desc=title, unit="turn", mininterval=10) as bar:

        def on_turn(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield on_turn


def another_first(contenders: Sequence[T], number: int) -> list[T]:
    """Return the order of a round. It is rotated, because starting first makes a difference on two cores."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _start(contender: Contender, steps_per_turn: int) -> tuple[multiprocessing.Process, Connection]:
    spawn = multiprocessing.get_context("spawn")
    connection, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(contender, steps_per_turn, theirs), daemon=True)
    with patch.dict(os.environ, dict(contender.environment)):
        process.start()
    theirs.close()  # so that waiting for the process ends when the process ends
    _receive(contender.name, connection)
    return process, connection


def _run(contender: Contender, steps_per_turn: int, parent: Connection) -> None:
    # Data loaders start child processes, which a daemon may not, with the default method, as in a process of the user.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    parent.send(contender.work(Turns(parent, steps_per_turn), *contender.arguments))


def _receive(name: str, connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended without a result; its own message is above") from None


def values(found: Mapping[str, Ended], key: str) -> dict[str, Any]:
    """Return the result ``key`` of each contender."""
    return {name: ended.said.get(key) for name, ended in found.items()}
