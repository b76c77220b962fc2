"""Contenders that take turns: each in a process of its own, as its user would start it, a few optimizer steps at a
time.

Drift of the machine hits all contenders alike, and those that wait do nothing. A turn's time includes loading its
batches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Optional, TypeVar
from unittest.mock import patch

from tqdm import tqdm
from transformers import TrainerCallback

T = TypeVar("T")

WARM_UP_TURNS = 2
"""Left out at the start of each contender: caches, lazy set-up, micro-batches that a loop measures one by one."""


@dataclass(frozen=True)
class Contender:
    """``work(turns, *arguments)`` runs in a process of its own and returns what the contender says at its end."""

    name: str
    work: Callable[..., dict[str, Any]]
    arguments: tuple = ()
    environment: tuple[tuple[str, str], ...] = ()


class Turns:
    """A contender's part: ``steps_per_turn`` optimizer steps when it is asked."""

    def __init__(self, parent: Connection, steps_per_turn: int) -> None:
        self._parent, self._steps_per_turn = parent, steps_per_turn
        self._steps, self._begun_s = 0, 0.0

    def begin(self) -> None:
        """Wait to be asked. All is set up by now."""
        self._parent.send(None)
        self._go_on()

    def step(self) -> None:
        self._steps += 1
        if self._steps == self._steps_per_turn:
            self.end()
            self._go_on()

    def end(self) -> None:
        """Of the last turn, too: it may be short."""
        self._parent.send(time.perf_counter() - self._begun_s)

    def _go_on(self) -> None:
        self._parent.recv()
        self._steps, self._begun_s = 0, time.perf_counter()


class TakesTurns(TrainerCallback):
    """Of any Trainer: the step that ends the training ends no turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            self._turns.step()


@dataclass(frozen=True)
class Ended:
    """One contender of one round. ``seconds``: of its turns after the first ones."""

    seconds: list[float]
    said: dict[str, Any]


def in_turns(
    contenders: Sequence[Contender],
    steps_per_turn: int,
    warm_up_turns: int = WARM_UP_TURNS,
    on_turn: Callable[[str], object] = lambda name: None,
) -> dict[str, Ended]:
    """All contenders to their end. Processes start in the order of ``contenders``. ``on_turn`` gets the name of who
    has had a turn. Raises RuntimeError for a contender that fails."""
    started = {contender.name: _start(contender, steps_per_turn) for contender in contenders}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    said: dict[str, dict[str, Any]] = {}
    while len(said) < len(contenders):
        for name, (_, connection) in started.items():
            if name in said:
                continue
            connection.send(None)
            answer = _answer(name, connection)
            on_turn(name)
            if isinstance(answer, dict):
                said[name] = answer
            else:
                seconds[name].append(answer)
    for process, _ in started.values():
        process.join()
    return {name: Ended(turns[warm_up_turns:], said[name]) for name, turns in seconds.items()}


def rounds(contenders: Sequence[Contender], steps_per_turn: int, repeats: int, **given: int) -> list[dict[str, Ended]]:
    """``repeats`` times all contenders, each time another one first."""
    found = []
    for number in range(repeats):
        with shown(f"round {number + 1} of {repeats}") as on_turn:
            found.append(in_turns(another_first(contenders, number), steps_per_turn, on_turn=on_turn, **given))
    return found


@contextlib.contextmanager
def shown(title: str, turns: Optional[int] = None) -> Iterator[Callable[[str], None]]:
    """A bar that moves with each turn, which is said by the name of its contender."""
    with tqdm(total=turns, desc=title, unit="turn", mininterval=10) as bar:

        def on_turn(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield on_turn


def another_first(contenders: Sequence[T], number: int) -> list[T]:
    """The order of a round: which contender starts first matters on two cores."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _start(contender: Contender, steps_per_turn: int) -> tuple[multiprocessing.Process, Connection]:
    spawn = multiprocessing.get_context("spawn")
    connection, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(contender, steps_per_turn, theirs), daemon=True)
    with patch.dict(os.environ, dict(contender.environment)):
        process.start()
    theirs.close()  # so that the end of the process ends the waiting for it
    _answer(contender.name, connection)
    return process, connection


def _run(contender: Contender, steps_per_turn: int, parent: Connection) -> None:
    # Loaders have children, which a daemon may not, and make them as in a process of a user's own.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    parent.send(contender.work(Turns(parent, steps_per_turn), *contender.arguments))


def _answer(name: str, connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended without a result; its own message is above") from None


def values(found: Mapping[str, Ended], key: str) -> dict[str, Any]:
    """What each contender said under ``key``."""
    return {name: ended.said.get(key) for name, ended in found.items()}
