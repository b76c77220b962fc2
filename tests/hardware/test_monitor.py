"""Readings of a machine and of one run: whose memory, how it ends, and the rows of a CSV."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from scu_trainer.cli.machine import hardware
from scu_trainer.cli.machine.hardware import run_lines
from scu_trainer.errors import SettingsError, StorageError, UserError
from scu_trainer.hardware import probe
from scu_trainer.hardware.watching import monitor as subject
from scu_trainer.hardware.watching.monitor import (
    CsvLog,
    MemoryLevel,
    MonitorReading,
    RunReading,
    find_target,
    gpu_bytes,
    read_run,
    readings,
)

GIB = 2**30
RUN = RunReading(2, 3 * GIB, 2 * GIB, None, "running", 7, 100, 4, 512, 20 * GIB)
READING = MonitorReading(1000.5, (MemoryLevel("RAM", 5, 10, 6), MemoryLevel("cuda:0 A, card", 1, 4, 2)), RUN)


@pytest.fixture
def worker():
    """A process with a child, both asleep."""
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    yield process
    for child in psutil.Process(process.pid).children() if process.poll() is None else ():
        child.kill()
    process.kill()
    process.communicate()


def run_of(folder: Path, pid: int, status: str = "running", written_s: float | None = None, **more) -> str:
    folder.mkdir(exist_ok=True)
    updated = datetime.fromtimestamp(time.time() if written_s is None else written_s, UTC).isoformat()
    state = {"status": status, "pid": pid, "step": 3, "max_steps": 9, "updated": updated, "error": None, **more}
    (folder / "run.json").write_text(json.dumps(state))
    return str(folder)


def test_a_run_is_its_process_and_what_it_started(tmp_path, worker):
    name = run_of(tmp_path, worker.pid)
    rows = [
        {"step": 1, "rows_per_chunk": 8},
        {"step": 2, "rows_per_chunk": 4, "tokens_per_chunk": 99, "limit_bytes": 5},
    ]
    (tmp_path / "memory_history.json").write_text(json.dumps(rows))
    found = read_run(find_target(name))
    assert (found.processes, found.status, found.step, found.max_steps) == (2, "running", 3, 9)
    assert (found.rows_per_chunk, found.tokens_per_chunk, found.limit_bytes) == (4, 99, 5)
    alone = psutil.Process(worker.pid).memory_info().rss
    assert alone < found.rss_bytes < alone + 64 * 2**20 and 0 < found.pss_bytes < found.rss_bytes


def test_a_number_alone_is_a_process(worker):
    found = read_run(find_target(str(worker.pid)))
    assert found.processes == 2 and found.status is None


def test_a_process_that_took_over_the_number_is_not_the_run(tmp_path, worker):
    """It is younger than what the run wrote last."""
    name = run_of(tmp_path, worker.pid, written_s=psutil.Process(worker.pid).create_time() - 60)
    target = find_target(name)
    assert not target.is_alive and read_run(target) is None
    assert target.ending().startswith(
        f"run {name} is gone: its process {worker.pid} ended without a message at step 3 of 9"
    )


@pytest.mark.parametrize("status", ["finished", "stopped", "failed", "queued"])
def test_a_run_that_has_ended_is_said_so_whatever_lives_under_its_number(tmp_path, capsys, status):
    name = run_of(tmp_path, os.getpid(), status=status, error="no room" if status == "failed" else None)
    assert hardware.main(["monitor", name, "--interval", "0.01"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.startswith(f"run {name} is {status} at step 3 of 9, last written 20")
    assert ("no room" in printed) == (status == "failed")


def test_it_ends_with_the_run(tmp_path, worker, capsys):
    name, seen = run_of(tmp_path, worker.pid), []
    for reading in readings(None, 0.01, find_target(name)):
        seen.append(reading.run.processes)
        for child in psutil.Process(worker.pid).children():
            child.kill()
        worker.kill()
        worker.wait()
    assert seen == [2]


def test_ranks_of_one_launcher_belong_together(tmp_path):
    code = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen(['sleep', '60'], env={**os.environ, 'LOCAL_WORLD_SIZE': '2'}) for _ in range(2)]\n"
        "print(ranks[0].pid, flush=True); sys.stdin.read(); [rank.kill() for rank in ranks]"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        name = run_of(tmp_path, int(launcher.stdout.readline()), written_s=time.time() + 1)
        assert read_run(find_target(name)).processes == 2
    finally:
        launcher.communicate()


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "is not there"), (".", "holds no run.json"), ("4194304", "no process")]
)
def test_what_is_no_run_and_no_process_is_refused(name, message):
    with pytest.raises(SettingsError, match=message):
        find_target(name)


@pytest.mark.parametrize(
    "state",
    [{"a": 1}, {"status": "running", "pid": 1}, {"status": "running", "pid": 1, "updated": "x"}, [], {"status": 3}],
)
def test_a_run_json_of_another_program_is_refused(tmp_path, state):
    (tmp_path / "run.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"run\.json (is not what a run writes|does not hold an object|holds 3 as its)"):
        find_target(str(tmp_path))


def test_memory_of_gpus_by_process(monkeypatch):
    table = "GPU-a, 101, python, 2048\nGPU-b, 102, python, 512\nGPU-b, 103, python, [N/A]\n"
    monkeypatch.setattr(probe, "ask_driver", lambda words: table)
    assert gpu_bytes({101, 102, 103}) == 2560 * 2**20
    assert gpu_bytes({7}) is None, "inside of a container the driver knows other numbers"


def test_readings_keep_the_highest(monkeypatch):
    found = iter([[("RAM", 5, 10)], [("RAM", 3, 10)]])
    monkeypatch.setattr(subject, "memories", lambda: next(found))
    now_s = [0.0]
    seen = list(readings(1.0, 1.0, clock=lambda: now_s[0], sleep=lambda s: now_s.__setitem__(0, now_s[0] + s)))
    assert [(level.used_bytes, level.highest_bytes) for reading in seen for level in reading.levels] == [(5, 5), (3, 5)]


# -- what is shown and written -----------------------------------------------------------------------------------------


def test_what_a_person_reads():
    assert run_lines(RUN) == [
        "run: 2 processes, 2.00 GiB",
        "running, step 7 of 100",
        "micro-batches of 512 tokens (4 rows), limit 20.00 GiB",
    ]
    bare = RunReading(1, 3 * GIB, None, GIB)
    assert run_lines(bare) == ["run: 1 process, 3.00 GiB resident, GPU 1.00 GiB"]


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "m.csv"
    for _ in range(2):
        log = CsvLog(str(path))
        log.append(READING)
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and rows[0] == rows[1]
    assert rows[0]["time_s"] == "1000.500" and rows[0]["ram_used_bytes"] == "5" and rows[0]["cuda_0_total_bytes"] == "4"
    assert rows[0]["run_rss_bytes"] == str(3 * GIB) and rows[0]["run_gpu_bytes"] == "" and rows[0]["run_step"] == "7"


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_row_that_was_cut_by_a_kill_is_cut_off(tmp_path, kept):
    path = tmp_path / "m.csv"
    CsvLog(str(path)).append(READING)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[1][:kept])
    CsvLog(str(path)).append(READING)
    assert path.read_bytes() == whole + whole.splitlines(keepends=True)[1]


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(StorageError, match="has columns that do not match"):
        CsvLog(str(path)).append(READING)
    assert path.read_text() == "a,b\n1,2\n"


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path, capsys):
    path = tmp_path / "no" / "m.csv"
    assert hardware.main(["monitor", "--duration", "0.01", "--interval", "0.01", "--csv", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {path}: No such file")


def test_a_dash_prints_rows_and_nothing_else(capsys):
    assert hardware.main(["monitor", "--duration", "0.01", "--interval", "0.01", "--csv", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("time_s,ram_used_bytes,ram_total_bytes") and len(lines) == 2
