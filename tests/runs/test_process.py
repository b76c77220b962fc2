"""Which process it is and whether it lives: dead, a zombie, another program, another boot, another machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from scu_trainer.errors import RequirementError
from scu_trainer.runs import process as subject
from scu_trainer.runs.process import (
    TOKEN_VARIABLE,
    Identity,
    ProcessInfo,
    System,
    check_process,
    is_alive,
    lower_priority,
    processes_of_run,
    send_signal,
    spawn_detached,
)

TOKEN = "0123456789abcdef"


class Laid(System):
    """A machine as a test lays it out. ``there``: processes by number."""

    def __init__(self, there=(), boot="boot-a", host="here") -> None:
        self.there, self._name, self._host = dict(there), boot, host

    def boot(self):
        return self._name

    def host(self):
        return self._host

    def process(self, pid):
        return self.there.get(pid)


RUN = Identity(7, 100.0, "boot-a", "here")


@pytest.mark.parametrize(
    ("machine", "fact"),
    [
        (Laid({7: ProcessInfo(100.0, "running")}), "alive"),
        (Laid({7: ProcessInfo(100.0, "suspended")}), "suspended"),
        (Laid({7: ProcessInfo(100.0, "zombie")}), "dead"),
        (Laid(), "dead"),
        (Laid({7: ProcessInfo(101.0, "running")}), "other program"),
        (Laid({7: ProcessInfo(100.0, "running")}, boot="boot-b"), "rebooted"),
        (Laid({7: ProcessInfo(100.0, "running")}, host="there"), "elsewhere"),
    ],
)
def test_facts(machine, fact):
    assert check_process(RUN, machine) == fact
    assert is_alive(RUN, machine) == (fact in ("alive", "suspended"))


def test_where_a_boot_has_only_a_time_a_set_clock_is_no_reboot():
    before = replace(RUN, boot="1700000000")
    assert check_process(before, Laid({7: ProcessInfo(100.0, "running")}, boot="1700000120")) == "alive"
    assert check_process(before, Laid({7: ProcessInfo(100.0, "running")}, boot="1700009999")) == "rebooted"


def test_this_process_is_alive_and_a_number_without_process_is_none():
    me = System().identity()
    assert me.pid == os.getpid() and check_process(me, System()) == "alive"
    with pytest.raises(ProcessLookupError, match="no process 99999999"):
        System().identity(99999999)


def test_elsewhere_than_on_linux_psutil_tells_the_same():
    found = subject._psutil_process(os.getpid())
    assert found.state == "running" and found.born == psutil.Process().create_time()
    assert subject._psutil_process(99999999) is None


@pytest.fixture
def sleeper():
    with started(["sleep", "600"]) as child:
        yield child


@contextlib.contextmanager
def started(words, **options):
    child = subprocess.Popen(words, **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def until(what, patience_s=20.0):
    begun_s = time.monotonic()
    while not what():
        assert time.monotonic() - begun_s < patience_s
        time.sleep(0.005)


def test_a_zombie_and_a_suspended_process_of_this_machine(sleeper):
    identity = System().identity(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: check_process(identity, System()) == "suspended")
    sleeper.kill()
    until(lambda: check_process(identity, System()) == "dead")  # nobody has waited for it yet
    assert psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE


# -- signals -----------------------------------------------------------------------------------------------------------


def test_a_signal_goes_to_the_process_and_to_none_that_has_its_number(sleeper):
    machine = System()
    identity = machine.identity(sleeper.pid)
    before = replace(identity, born=identity.born - 1)
    assert not any(send_signal(before, number, machine) for number in (signal.SIGTERM, signal.SIGKILL))
    assert check_process(identity, machine) == "alive"
    assert send_signal(identity, signal.SIGTERM, machine)
    assert sleeper.wait(20) == -signal.SIGTERM
    assert not send_signal(identity, signal.SIGKILL, machine)


def test_where_there_is_no_pidfd_too(sleeper, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    machine = System()
    identity = machine.identity(sleeper.pid)
    assert not send_signal(replace(identity, born=identity.born - 1), signal.SIGKILL, machine)
    assert check_process(identity, machine) == "alive"
    assert send_signal(identity, signal.SIGKILL, machine) and sleeper.wait(20) == -signal.SIGKILL


def test_a_process_of_another_user_is_one_message(sleeper, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(RequirementError, match="belongs to another user"):
        send_signal(System().identity(sleeper.pid), signal.SIGKILL, System())


# -- what belongs to a run ---------------------------------------------------------------------------------------------


def test_the_session_and_marked_children_outside_of_it_belong_to_a_run(tmp_path):
    script = "env -i sleep 600 & setsid sleep 601 & wait"
    log = tmp_path / "log"
    child = spawn_detached(["sh", "-c", script], tmp_path, {**os.environ, TOKEN_VARIABLE: TOKEN}, log)
    with started(["sleep", "602"]) as stranger:
        supervisor = System().identity(child.pid)

        def members():
            return {
                " ".join(psutil.Process(item.pid).cmdline()) for item in processes_of_run(supervisor, TOKEN, System())
            }

        try:
            until(lambda: members() == {f"sh -c {script}", "sleep 600", "sleep 601"})
            before = replace(supervisor, born=supervisor.born - 1)  # a run whose number and session another one has now
            assert processes_of_run(before, "another token", System()) == []
            child.kill()
            child.wait()
            assert members() == {"sleep 600", "sleep 601"}  # its supervisor is dead, they are not
            assert stranger.pid not in {item.pid for item in processes_of_run(supervisor, TOKEN, System())}
        finally:
            for item in processes_of_run(supervisor, TOKEN, System()):
                send_signal(item, signal.SIGKILL, System())
    until(lambda: not processes_of_run(supervisor, TOKEN, System()))


def test_a_detached_process_leads_a_session_reads_nothing_and_appends_to_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    program = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read())); sys.exit(5)"
    child = spawn_detached([sys.executable, "-c", program], tmp_path, os.environ, log)
    assert child.wait(20) == 5 and log.read_text() == "before\nTrue ''\n"


def test_a_lower_priority(tmp_path):
    program = (
        "import os, psutil; from scu_trainer.runs.process import lower_priority; before = os.nice(0); "
        "said = lower_priority(3); print(said, os.nice(0) - before, int(psutil.Process().ionice().value))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "3", "7"]


def test_what_is_not_possible_is_said(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "nice", refuse)
    monkeypatch.setattr(psutil.Process, "ionice", refuse)
    first, second = lower_priority(3)
    assert (
        first == "nice 3 was not possible: Operation not permitted" and "disk priority could not be lowered" in second
    )
    monkeypatch.delattr(psutil.Process, "ionice")
    assert lower_priority(3)[1] == "this system has no disk priority (ionice)"
