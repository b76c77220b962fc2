"""SIGTERM and Ctrl-C, once and twice, before, in and after training, and with a launcher that repeats them."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from scu_trainer.train.session import stopping as subject
from scu_trainer.train.session.stopping import LAUNCHERS_ECHO_S, StopCallback, StopRequest

TYPED = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*TYPED, signal.SIGHUP)


class Clock:
    """Seconds that pass when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _as_in_a_terminal():
    """Tests that run under nohup ignore SIGHUP, and a run leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def said() -> list[str]:
    return []


def request_in_training(said: list[str], **more) -> StopRequest:
    request = StopRequest(say=said.append, **more)
    request.is_training = True
    return request


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", TYPED, ids=lambda number: number.name)
def test_the_first_is_noted_and_the_second_ends_it(said, number):
    request = request_in_training(said)
    with request.listening():
        os.kill(os.getpid(), number)
        assert request.name == number.name
        assert len(said) == 1 and said[0].startswith(f"{number.name}: the run finishes this step")
        with pytest.raises(KeyboardInterrupt, match="second signal"):
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_without_a_step_to_finish_it_ends_at_once(said, number):
    request = StopRequest(say=said.append)
    with request.listening(), pytest.raises(KeyboardInterrupt, match=number.name):
        os.kill(os.getpid(), number)
    assert request.name is None and said == []


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_terminal_that_is_closed_is_no_second_wish(said, number):
    """A shell and the kernel may both say so, and closing a window after Ctrl-C is no hurry."""
    request = request_in_training(said)
    with request.listening():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.name == number.name and len(said) == 1


def test_handlers_are_as_before_afterwards(said):
    before = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest(say=said.append)
    with request.listening():
        assert [signal.getsignal(number) for number in SIGNALS] == [request.receive] * 3
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_only_the_main_thread_can_listen(said):
    entered = []

    def listen() -> None:
        with StopRequest(say=said.append).listening():
            entered.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert entered == [before]


@pytest.mark.parametrize(
    ("after_s", "is_launched", "ends"),
    [(0.1, True, False), (LAUNCHERS_ECHO_S, True, True), (0.1, False, True)],
    ids=["echo of the launcher", "a second wish", "no launcher"],
)
def test_a_launcher_repeats_what_the_terminal_sent(said, after_s, is_launched, ends):
    clock = Clock()
    request = request_in_training(said, is_launched=is_launched, clock=clock)
    request.receive(signal.SIGINT)
    clock.now_s += after_s
    if ends:
        with pytest.raises(KeyboardInterrupt):
            request.receive(signal.SIGTERM)
    else:
        request.receive(signal.SIGTERM)
    assert request.name == "SIGINT" and len(said) == 1


def test_a_forked_child_leaves_it_to_the_run(said):
    request = request_in_training(said)
    child = os.fork()
    if child == 0:
        request.receive(signal.SIGTERM)
        os._exit(0 if request.name is None and said == [] else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- the grace period --------------------------------------------------------------------------------------------------


class Ended(BaseException):
    """In place of the end of this process."""


def test_when_it_is_over_the_process_ends(said, monkeypatch):
    events = []

    def end(code: int) -> None:
        events.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(subject, "end_children", lambda: events.append("children"))
    request = request_in_training(said, grace_period_s=7.5)
    request.on_deadline = lambda: events.append("told")
    request.receive(signal.SIGTERM)
    timer = request._deadline
    try:
        assert timer.interval == 7.5 and timer.daemon and timer.args == [signal.SIGTERM]
        with pytest.raises(Ended):
            timer.function(*timer.args)
    finally:
        request.cancel_deadline()
    assert events == ["told", "children", 128 + signal.SIGTERM]
    assert "the grace period of 7.5 s is over" in said[-1]


def test_it_does_not_end_a_run_that_came_to_its_end(said):
    request = request_in_training(said, grace_period_s=600.0)
    with request.listening():
        request.receive(signal.SIGTERM)
        timer = request._deadline
        assert timer.is_alive()
    timer.join(10)
    assert not timer.is_alive() and request._deadline is None


def test_without_one_nothing_is_timed(said):
    request = request_in_training(said)
    request.receive(signal.SIGTERM)
    assert request._deadline is None


# -- the callback ------------------------------------------------------------------------------------------------------

STATE = SimpleNamespace(global_step=7)


def test_the_step_after_which_it_stops(said):
    request, told = StopRequest(say=said.append), []
    callback, control = StopCallback(request, world_size=1), TrainerControl()
    callback.on_stop = lambda: told.append("stopping")
    callback.on_train_begin(None, STATE, control)
    assert request.is_training
    callback.on_step_end(None, STATE, control)
    assert (callback.stopped_at, control.should_save, control.should_training_stop, told) == (None, False, False, [])
    request.receive(signal.SIGTERM)
    callback.on_step_end(None, STATE, control)
    assert (callback.stopped_at, control.should_save, control.should_training_stop) == (7, True, True)
    assert told == ["stopping"]


def test_a_signal_during_an_evaluation_is_seen_after_it(said):
    request = request_in_training(said)
    callback, control = StopCallback(request, world_size=1), TrainerControl()
    request.receive(signal.SIGTERM)
    callback.on_evaluate(None, STATE, control)
    assert callback.stopped_at == 7 and control.should_save and control.should_training_stop


def test_after_training_signals_end_the_process_and_no_deadline_does(said):
    request = StopRequest(grace_period_s=600.0, say=said.append)
    callback, control = StopCallback(request, world_size=1), TrainerControl()
    callback.on_train_begin(None, STATE, control)
    request.receive(signal.SIGTERM)
    callback.on_train_end(None, STATE, control)
    assert not request.is_training and request._deadline is None
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGTERM)
