"""What is reported of a run, from what was read: a dead run is never reported as running, and what
ended it is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from scu_trainer.run_files import History, RunStatus, write_json
from scu_trainer.runs import state, words
from scu_trainer.runs.process import Identity, ProcessInfo, System
from scu_trainer.runs.progress import last_error, last_lines, last_row, last_warning, newest_checkpoint
from scu_trainer.runs.state import Evidence, RunState, judge, report
from scu_trainer.runs.store import ENDED_STATUSES, Options, Run, RunRecord

HERE = System()
FULL = "the disk is full: run.json cannot be written, 0.0 MiB are free; free some space"


def record(**changes) -> RunRecord:
    spawner = Identity(1, 1.0, HERE.boot(), HERE.host())
    values = {
        "token": "t",
        "directory": "gone",
        "flags": (),
        "options": Options(),
        "cwd": ".",
        "environment": {},
        "asked_s": 1000.0,
    }
    process = Identity(7, 100.0, HERE.boot(), HERE.host())
    return RunRecord(**{**values, "spawner": spawner, "process": process, "phase": "training", **changes})


def evidence(told: str, fact, **changes) -> Evidence:
    values = {"status": {"status": told}, "record": record(), "fact": fact, "spawner": "dead", "now_s": 1000.0}
    return Evidence(**{**values, **changes})


LAUNCHED = record(options=Options(launcher="accelerate"))


@pytest.mark.parametrize(
    ("seen", "status", "cause", "words"),
    [
        (evidence("running", "dead"), "killed", "killed", "while it was running"),
        (evidence("stopping", "dead"), "killed", "killed", "while it was stopping"),
        (evidence("queued", "dead", record=record(phase="queued")), "killed", "killed", "while it waited in the queue"),
        (evidence("queued", "dead"), "killed", "killed", "while it was starting"),
        (evidence("running", "other program"), "killed", "number re-used", "another program now"),
        (evidence("running", "rebooted"), "rebooted", "reboot", "restarted while it was running"),
        (evidence("running", "elsewhere"), "elsewhere", None, f"started on {HERE.host()}"),
        (evidence("running", "dead", error=FULL), "failed", "disk full", "the disk is full"),
        (evidence("running", "dead", free_bytes=100), "failed", "disk full", "so its last message could not"),
        (evidence("failed", "dead", status={"status": "failed", "error": FULL}), "failed", "disk full", FULL),
        (evidence("failed", "dead", status={"status": "failed", "error": "x"}), "failed", "error", "x"),
        (evidence("running", "dead", record=record(exit_code=2), error="wrong key"), "failed", "error", "wrong key"),
        (evidence("running", "dead", record=record(exit_code=1)), "failed", "error", "exit code 1"),
        (evidence("running", "dead", record=LAUNCHED, error="wrong"), "failed", "error", "wrong"),
        (evidence("running", "dead", error="an old one"), "killed", "killed", "without an error message"),
        (evidence("running", None, record=None), "killed", "killed", "none of its processes"),
        (evidence("queued", None, record=record(process=None), now_s=1010.0), "killed", "no start", "never came up"),
        (evidence("queued", None, record=record(process=None), now_s=900.0), "killed", "no start", "never came up"),
        (
            evidence("queued", None, record=record(process=None), now_s=1010.0, free_bytes=0),
            "failed", "disk full", "when it was started",
        ),
        (evidence("finished", "dead"), "finished", None, ""),
        (evidence("finished", "alive", record=None), "finished", None, ""),
        (evidence("finished", "alive", copied_from=Path("first")), "finished", None, ""),
        (evidence("running", "alive", copied_from=Path("first")), "copied", None, "a copy of first, last seen running"),
        (evidence("stopped", "rebooted"), "stopped", None, ""),
        (evidence("stopped", None), "stopped", None, ""),
    ],
)  # fmt: skip
def test_the_dead(seen, status, cause, words):
    found = judge(seen)
    assert (found.status, found.cause, found.is_alive) == (status, cause, False)
    assert words in found.detail


WAITING = record(phase="queued", waiting="for gpu-0")
COMING = record(process=None)


@pytest.mark.parametrize(
    ("seen", "status", "words"),
    [
        (evidence("running", "alive"), "running", ""),
        (evidence("running", "alive", is_asked_to_stop=True), "stopping", "the current step finishes first"),
        (evidence("running", "suspended"), "running", "kill -CONT"),
        (evidence("running", "alive", updated_s=1000.0 - 601), "running", "no news for 10 minutes"),
        (evidence("running", "alive", updated_s=1000.0 - 599), "running", ""),
        (evidence("queued", "alive"), "starting", "being loaded"),
        (evidence("queued", "alive", record=WAITING), "queued", "waits for gpu-0"),
        (evidence("queued", None, record=COMING, spawner="alive", now_s=2000.0), "starting", "coming up"),
        (evidence("queued", None, record=COMING, now_s=1002.0), "starting", "coming up"),
        (evidence("finished", "alive"), "finished", "just ending"),
    ],
)
def test_the_living(seen, status, words):
    found = judge(seen)
    assert (found.status, found.cause, found.is_alive) == (status, None, True)
    assert words in found.detail and bool(words) == bool(found.detail)


@pytest.mark.parametrize("fact", ["dead", "other program", "rebooted", None])
@pytest.mark.parametrize("status", ["queued", "running", "stopping", *ENDED_STATUSES])
@pytest.mark.parametrize("has_record", [True, False])
def test_no_dead_run_is_told_as_living(fact, status, has_record):
    found = judge(evidence(status, fact, record=record() if has_record else None, now_s=5000.0))
    assert not found.is_alive and found.status not in ("queued", "starting", "running", "stopping")


# -- from a directory --------------------------------------------------------------------------------------------------


class Laid(System):
    def __init__(self, **there) -> None:
        self.there = {int(pid.removeprefix("p")): seen for pid, seen in there.items()}

    def process(self, pid):
        return self.there.get(pid)


def laid_run(tmp_path, **changes) -> Run:
    run = Run(tmp_path, "a")
    run.folder.mkdir()
    run.write(record(**changes))
    RunStatus(tmp_path / "run.json").update(status="running", pid=7, step=20, max_steps=80, loss=2.5, eta_s=125.0)
    return run


def test_a_report_reads_the_ends_of_histories(tmp_path):
    run = laid_run(tmp_path, devices=("cpu",))
    with History(tmp_path / "scu_history.json") as history:
        history.append_many(
            {"step": step, "s_ema": 0.1 + step / 1e4, "s_target": 0.1, "lambda": 0.25} for step in range(999)
        )
    with History(tmp_path / "memory_history.json") as history:
        history.append(
            {"step": 1, "rows_per_chunk": 4, "tokens_per_chunk": 512, "peak_bytes": 2**30, "limit_bytes": 2**32}
        )
    found = report(run, Laid(p7=ProcessInfo(100.0, "running")))
    assert found.state == RunState("running", is_alive=True) and found.pid == 7
    facts = dict(words.facts(found))
    assert facts["S"] == "0.1998 of 0.1" and facts["lambda"] == "0.25" and facts["left"] == "2:05"
    assert (
        facts["micro-batch"] == "4 rows, 512 tokens" and "peak of a micro-batch 1.0 GiB of 4.0 GiB" in facts["memory"]
    )
    assert facts["step"] == "20/80" and facts["process"] == "7, cpu, nice 10"
    told = found.as_dict()
    assert told["lambda"] == 0.25 and told["status"] == "running" and told["cause"] is None
    line = words.line(found)
    assert (
        line.startswith("a: running  step 20/80  loss 3.607 bits per token  S 0.1998 of 0.1  lambda 0.25")
        and " -" not in line
    )


def test_one_that_registers_while_it_is_read_is_asked_again(tmp_path, monkeypatch):
    run = laid_run(tmp_path, process=None)
    stock, calls = Run.record, []

    def late(self):
        calls.append(1)
        if len(calls) == 2:
            self.write(record())
        return stock(self)

    monkeypatch.setattr(Run, "record", late)
    assert report(run, Laid(p7=ProcessInfo(100.0, "running"))).state.status == "running"


def test_a_torn_file_of_one_run_is_told_and_harms_no_other(tmp_path):
    run = laid_run(tmp_path)
    (tmp_path / "run.json").write_text('{"status": "run')
    found = report(run, System())
    assert found.state.status == "unreadable" and "not valid JSON" in found.state.detail and not found.state.is_alive
    (tmp_path / "run.json").write_text("[]")
    assert "does not hold an object" in report(run, System()).state.detail
    write_json(run.folder / "start.json", {"token": "t"})
    assert "not the record of a background run" in report(run, System()).state.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": "x"},
        {"asked_s": None},
        {"process": {"pid": 1, "born": None, "boot": "b", "host": "x"}},
        {"directory": 3},
        {"devices": [1]},
        {"notes": [["x"]]},
        {"process": {"pid": 1, "born": 1.0, "boot": 3, "host": "x"}},
        {"options": {"nice": None}},
    ],
    ids=str,
)
def test_a_record_with_a_value_of_another_type_is_told(tmp_path, changes):
    run = laid_run(tmp_path)
    path = run.folder / "start.json"
    write_json(path, {**json.loads(path.read_text()), **changes})
    assert "not the record of a background run" in report(run, System()).state.detail


@pytest.mark.parametrize("value", ["x", [], {"a": 1}, 10**400, "[" * 5000], ids=lambda value: str(value)[:9])
def test_values_that_no_run_writes_are_not_shown(tmp_path, value):
    run = laid_run(tmp_path)
    text = value if value == "[" * 5000 else json.dumps(value)
    row = ", ".join(f'"{name}": {text}' for name in ("s", "s_ema", "s_target", "lambda", "peak_bytes"))
    for name in ("scu_history.json", "memory_history.json"):
        (tmp_path / name).write_text(f"[\n{{{row}}}\n]")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}" if isinstance(value, list) else text)
    (tmp_path / "checkpoint-4" / "manifest.json").write_text(f'{{"files": {{"trainer_state.json": {text}}}}}')
    facts = dict(words.facts(report(run, System())))
    assert not {"S", "lambda", "memory", "checkpoint"} & {*facts} and facts["step"] == "20/80"


@pytest.mark.parametrize(
    ("pid", "age_s", "status"),
    [
        ("own", 0.0, "running"),
        ("none", 0.0, "killed"),
        ("own", 3600.0 * 24 * 365, "rebooted"),
        ("reused", 0.0, "killed"),
    ],
)
def test_a_run_that_was_started_by_hand(tmp_path, pid, age_s, status):
    """Its number is known and not when it was born: a process younger than the last news is another one."""
    now_s = time.time() - age_s
    if pid == "reused":
        now_s = max(psutil.Process().create_time() - 60, psutil.boot_time() + 1)
    number = 99999999 if pid == "none" else os.getpid()
    RunStatus(tmp_path / "run.json", clock=lambda: now_s).update(status="running", pid=number, step=1)
    found = report(Run(tmp_path, "a"), System())
    assert found.state.status == status, found.state
    assert found.state.is_alive == (status == "running")


def test_moments_are_read_back(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    RunStatus(tmp_path / "run.json", clock=now.timestamp).update(status="finished")
    assert report(Run(tmp_path, "a"), System()).progress.updated_s == now.timestamp()


# -- ends of files -----------------------------------------------------------------------------------------------------


def test_rows_that_are_being_written_are_passed_over(tmp_path):
    path = tmp_path / "rows.json"
    assert last_row(path) == {}
    with History(path) as history:
        assert last_row(path) == {}
        history.append({"step": 1})
        history.append({"step": 2, "text": "x" * 100_000})
    assert last_row(path)["step"] == 2
    path.write_bytes(path.read_bytes()[:-50_000])
    assert last_row(path) == {"step": 1}


def test_a_pipe_in_the_place_of_a_history_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "history.json")
    with pytest.raises(OSError, match="it is a pipe or a device"):
        last_row(tmp_path / "history.json")


def test_an_error_of_an_earlier_start_is_none_of_this_one(tmp_path):
    console = tmp_path / "console.log"
    console.write_text("---- start 1, now\nerror: wrong key\n")
    assert last_error(console) == "wrong key"
    console.write_text(f"{console.read_text()}---- start 2, now\nstep 1\n")
    assert last_error(console) is None
    console.write_text(f"{console.read_text()}Traceback (most recent call last):\n  File x\nValueError: no\n")
    assert last_error(console) == "ValueError: no"


def test_a_launcher_that_was_asked_to_end_tells_no_error(tmp_path):
    console = tmp_path / "console.log"
    signal = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"
    console.write_text(f"---- start 1, now\nTraceback (most recent call last):\n  File x\n{signal}")
    assert last_error(console) is None
    console.write_text(f"---- start 1, now\nerror: wrong key\nTraceback (most recent call last):\n{signal}")
    assert last_error(console) == "wrong key"


def test_last_lines_of_long_and_short_files(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path, 5) == []
    path.write_text("".join(f"line {number} {'é' * 50}\n" for number in range(5000)))
    found = last_lines(path, 2000)
    assert len(found) == 2000 and found[0].startswith("line 3000 ") and last_lines(path, 0) == []


def test_the_last_warning(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text(
        "2026-01-01 WARNING scu_trainer: first\n2026-01-01 INFO x: y\n2026-01-01 ERROR a.b: second one\nplain\n"
    )
    assert last_warning(Run(tmp_path)) == "second one"


def test_only_a_whole_checkpoint_is_named(tmp_path):
    def checkpoint(number, listed_bytes):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"1234")
        write_json(folder / "trainer_state.json", {"global_step": number})
        write_json(folder / "manifest.json", {"files": {"weights": {"bytes": listed_bytes}}})

    assert newest_checkpoint(tmp_path) is None
    for number, listed_bytes in ((9, 4), (10, 4), (20, 5)):
        checkpoint(number, listed_bytes)
    (tmp_path / "checkpoint-30").mkdir()
    assert newest_checkpoint(tmp_path) == "checkpoint-10"
    assert newest_checkpoint(tmp_path, step=9) == "checkpoint-9"
    (tmp_path / "checkpoint-20" / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path) == "checkpoint-20"  # as the stock Trainer leaves it


def test_the_rate_is_that_of_the_last_training_row(tmp_path):
    rows = [
        {"step": 1, "loss": 2.0, "throughput/samples_per_second": 7.0},
        {"step": 2, "loss": 1.0, "throughput/samples_per_second": 12.34},
        {"step": 2, "eval_loss": 1.5},
    ]
    (tmp_path / "log_history.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    RunStatus(tmp_path / "run.json").update(status="finished", step=2, max_steps=4)
    found = report(Run(tmp_path, "mine"), HERE)
    assert found.progress.samples_per_second == 12.34
    assert ("samples per second", "12.3") in list(words.facts(found)) and "samples/s 12.3" in words.line(found)


def test_the_memory_of_a_run_is_that_of_all_its_processes(tmp_path):
    """A launcher holds little, and its ranks the run."""
    RunStatus(tmp_path / "run.json").update(status="running", pid=os.getpid())
    alone = report(Run(tmp_path), HERE).resident_bytes
    words = [sys.executable, "-c", "held = bytes([1]) * 2**27; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert report(Run(tmp_path), HERE).resident_bytes - alone > 2**26
        child.communicate(b"\n")


def test_memory_is_looked_at_only_where_somebody_asks(tmp_path, monkeypatch):
    """It takes 20 ms per GB, and ``runs logs -f`` asks four times a second whether the run is alive."""
    asked = []
    monkeypatch.setattr(state, "held_bytes", lambda process: asked.append(process.pid) or 3)
    RunStatus(tmp_path / "run.json").update(status="running", pid=os.getpid())
    found = report(Run(tmp_path), HERE)
    assert found.state.is_alive and asked == []
    assert (found.resident_bytes, found.as_dict()["resident_bytes"]) == (3, 3) and asked == [os.getpid()]
