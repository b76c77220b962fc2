"""Run files survive a kill at any byte, a full disk, and a reader at any moment."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys

import numpy
import pytest
from safetensors.numpy import save_file

from scu_trainer import run_files
from scu_trainer.errors import StorageError
from scu_trainer.run_files import (
    History,
    RunStatus,
    apply_umask,
    free_bytes,
    read_json,
    read_rows,
    require_room,
    require_writable,
    write_json,
)

ROWS = [
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": 2.25, "reason": "grew é ] , }"},
    {"step": 3, "nested": {"a": [1]}},
]


def history_bytes(path) -> bytes:
    with History(path) as history:
        history.append_many(ROWS)
    return path.read_bytes()


def complete_rows(content: bytes, cut: int) -> list[dict]:
    """The rows whose last brace lies before ``cut``; one row per line, so a line's end is a row's end."""
    ends, position = [], 1
    for line in content.split(b"\n")[1:-1]:
        position += 1 + len(line)
        ends.append(position - line.endswith(b",") + 0)
    return [row for row, end in zip(ROWS, ends, strict=True) if end <= cut]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_history_is_valid_json_after_every_append(tmp_path):
    path = tmp_path / "history.json"
    with History(path) as history:
        assert json.loads(path.read_bytes()) == []
        for count, row in enumerate(ROWS, start=1):
            history.append(row)
            assert json.loads(path.read_bytes()) == ROWS[:count]


def test_an_append_is_one_write(tmp_path, monkeypatch):
    writes = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: writes.append(arguments[1]) or real(*arguments))
    with History(tmp_path / "history.json") as history:
        history.append(ROWS[0])
        history.append_many(ROWS[1:])
        history.append_many([])
    assert len(writes) == 2


def test_history_continues_an_existing_file(tmp_path):
    path = tmp_path / "history.json"
    for row in ROWS:
        with History(path) as history:
            history.append(row)
            assert history.torn_bytes == 0
    assert read_rows(path) == ROWS


def test_every_truncation_keeps_the_complete_rows(tmp_path):
    whole = history_bytes(tmp_path / "whole.json")
    path = tmp_path / "cut.json"
    new_row = {"step": 9}
    seen_counts = set()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        expected = complete_rows(whole, cut)
        assert read_rows(path) == expected, cut
        assert path.read_bytes() == whole[:cut], "a reader changed the file"
        with History(path) as history:
            history.append(new_row)
        assert json.loads(path.read_bytes()) == [*expected, new_row], cut
        seen_counts.add(len(expected))
    assert seen_counts == {0, 1, 2, 3}


def test_a_damaged_row_takes_no_other_with_it(tmp_path, caplog):
    path = tmp_path / "rows.json"
    rows = [{"step": step} for step in range(4)]
    with History(path) as history:
        history.append_many(rows)
    path.write_bytes(path.read_bytes().replace(b'{"step": 1', b'{"step\xff" 1'))
    assert read_rows(path) == [rows[0], *rows[2:]]
    assert "rows.json holds damaged rows (1" in caplog.text
    with History(path) as history:
        history.append({"step": 4})
    assert "rows.json held torn or damaged rows (1" in caplog.text
    caplog.clear()
    assert read_rows(path) == [rows[0], *rows[2:], {"step": 4}] == read_json(path) and not caplog.text


def test_torn_bytes_are_counted(tmp_path):
    path = tmp_path / "history.json"
    path.write_bytes(b'[\n{"step": 1},\n{"step"')
    with History(path) as history:
        assert history.torn_bytes == len(b'{"step"')
    assert json.loads(path.read_bytes()) == [{"step": 1}]


def test_a_file_in_another_layout_is_taken_over(tmp_path):
    path = tmp_path / "history.json"
    path.write_text(json.dumps(ROWS, indent=2) + "\n")
    with History(path) as history:
        history.append({"step": 4})
        assert history.torn_bytes == 0
    assert json.loads(path.read_bytes()) == [*ROWS, {"step": 4}]


@pytest.mark.parametrize("content", ['{"step": 1}', "[1, 2]", "hello", '[{"step": 1}] and more'])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "history.json"
    path.write_text(content)
    with pytest.raises(StorageError, match="not a history"):
        History(path)
    with pytest.raises(StorageError, match="not a history"):
        read_rows(path)
    assert path.read_text() == content


def test_truncate_after_drops_and_counts(tmp_path):
    path = tmp_path / "history.json"
    with History(path) as history:
        history.append_many([*ROWS, {"epoch": 1}])
        assert history.truncate_after(3) == 0
        assert history.truncate_after(1) == 2
        history.append({"step": 2})
    assert json.loads(path.read_bytes()) == [ROWS[0], {"epoch": 1}, {"step": 2}]


def test_truncating_everything_leaves_an_array_that_grows(tmp_path):
    path = tmp_path / "history.json"
    with History(path) as history:
        history.append_many(ROWS)
        assert history.truncate_after(0) == len(ROWS)
        history.append({"step": 1})
    assert json.loads(path.read_bytes()) == [{"step": 1}]


def test_not_a_number_becomes_null(tmp_path):
    path = tmp_path / "history.json"
    with History(path) as history:
        history.append({"step": 1, "loss": math.nan, "all": [math.inf, (-math.inf, 1.0)]})
    assert read_rows(path) == [{"step": 1, "loss": None, "all": [None, [None, 1.0]]}]


def test_full_disk_in_the_middle_of_an_append(tmp_path, monkeypatch):
    """The second write of a row fails after seven bytes; the file is valid before, after, and when room is back."""
    path = tmp_path / "history.json"
    real = os.pwrite
    calls = []

    def full_at_second_call(descriptor, content, offset):
        calls.append(len(content))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[:7] if len(calls) == 1 else content, offset)

    with History(path) as history:
        history.append(ROWS[0])
        monkeypatch.setattr(os, "pwrite", full_at_second_call)
        with pytest.raises(StorageError, match="disk is full"):
            history.append(ROWS[1])
        assert json.loads(path.read_bytes()) == ROWS[:1]
        history.append(ROWS[1])
    assert json.loads(path.read_bytes()) == ROWS[:2]


def test_a_value_that_is_not_json_changes_nothing(tmp_path):
    path = tmp_path / "history.json"
    with History(path) as history:
        history.append(ROWS[0])
        with pytest.raises(TypeError):
            history.append({"step": object()})
    assert json.loads(path.read_bytes()) == ROWS[:1]


WRITER = """
import sys
from scu_trainer.run_files import History, RunStatus
history, status = History(sys.argv[1]), RunStatus(sys.argv[2], min_interval_s=0.0)
for step in range(10**9):
    history.append({"step": step, "text": "x" * (step % 500)})
    status.update(step=step)
    if step == 50:
        print("going", flush=True)
"""


def test_sigkill_leaves_both_files_readable(tmp_path):
    for kill in range(3):
        history_path, status_path = tmp_path / f"history{kill}.json", tmp_path / f"run{kill}.json"
        command = [sys.executable, "-c", WRITER, str(history_path), str(status_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "going\n"
            writer.send_signal(signal.SIGKILL)
        rows = json.loads(history_path.read_bytes())
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert 0 <= len(rows) - 1 - read_json(status_path)["step"] <= 1


def test_write_json_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    write_json(path, {"old": math.nan})
    assert json.loads(path.read_text()) == {"old": None}

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_files.os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"disk is full.*free"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": None}
    assert os.listdir(tmp_path) == ["data.json"]


@pytest.mark.parametrize("read", [read_json, read_rows])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(StorageError, match="it is a pipe or a device, not a file"):
        read(tmp_path / "pipe.json")


def test_read_json_says_what_is_wrong(tmp_path):
    with pytest.raises(StorageError, match="cannot read"):
        read_json(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StorageError, match="not valid JSON"):
        read_json(tmp_path / "broken.json")
    with pytest.raises(StorageError, match="cannot read"):
        read_rows(tmp_path / "missing.json")


def test_a_number_that_no_float_can_hold_is_refused(tmp_path):
    """Arithmetic with it would raise an OverflowError, wherever the file is used."""
    path = tmp_path / "file.json"
    path.write_text(f'[\n{{"step": 1}},\n{{"step": {"9" * 400}}}\n]')
    with pytest.raises(StorageError, match=r"file\.json is not valid JSON \(it holds a whole number of 400 digits"):
        read_json(path)
    assert read_rows(path) == [{"step": 1}]


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000], ids=["nested", "digits"])
def test_json_that_python_cannot_hold_is_refused(tmp_path, value):
    """The json module raises a RecursionError for one, and a ValueError that is no JSONDecodeError for the other."""
    path = tmp_path / "file.json"
    path.write_text(f'[\n{{"step": 1}},\n{{"step": {value}')
    with pytest.raises(StorageError, match=r"file\.json is not valid JSON"):
        read_json(path)
    assert read_rows(path) == [{"step": 1}]


def test_an_update_refuses_a_status_that_is_no_object(tmp_path):
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(StorageError, match=r"run\.json does not hold an object"):
        RunStatus(tmp_path / "run.json").update(status="running")


def test_status_writes_progress_at_most_once_a_second(tmp_path):
    clock = FakeClock()
    status = RunStatus(tmp_path / "run.json", clock=clock)
    assert status.update(status="running", pid=7, step=0)
    clock.now_s += 0.5
    assert not status.update(step=1, loss=2.0)
    assert read_json(status.path)["step"] == 0
    clock.now_s += 0.5
    assert status.update(step=2)
    content = read_json(status.path)
    assert (content["step"], content["loss"], content["pid"]) == (2, 2.0, 7)
    assert list(content) == list(run_files.STATUS_FIELDS)
    assert content["started"] == "1970-01-12T13:46:40.000+00:00"
    assert content["updated"] == "1970-01-12T13:46:41.000+00:00"


def test_status_change_is_written_at_once_and_takes_pending_progress_along(tmp_path):
    status = RunStatus(tmp_path / "run.json", clock=FakeClock())
    status.update(status="running")
    assert not status.update(step=5)
    assert not status.update(status="running", step=6), "naming the same status again is no change"
    assert status.update(status="failed", error="out of memory")
    content = read_json(status.path)
    assert (content["status"], content["step"], content["error"]) == ("failed", 6, "out of memory")


def test_status_writes_again_when_the_clock_is_set_back(tmp_path):
    clock = FakeClock()
    status = RunStatus(tmp_path / "run.json", clock=clock)
    status.update(status="running")
    clock.now_s -= 3600
    assert status.update(step=1)


def test_flush_writes_what_was_held_back(tmp_path):
    status = RunStatus(tmp_path / "run.json", clock=FakeClock())
    status.update(status="running")
    assert not status.update(step=5)
    status.flush()
    assert read_json(status.path)["step"] == 5


def test_status_keeps_what_another_program_wrote(tmp_path):
    clock = FakeClock()
    status = RunStatus(tmp_path / "run.json", clock=clock)
    status.update(status="running")
    write_json(status.path, {**read_json(status.path), "status": "stopping", "command": "train"})
    clock.now_s += 2
    status.update(step=3)
    content = read_json(status.path)
    assert (content["status"], content["command"], content["step"]) == ("stopping", "train", 3)


def test_status_refuses_unknown_names(tmp_path):
    status = RunStatus(tmp_path / "run.json")
    with pytest.raises(ValueError, match="allowed: queued, running"):
        status.update(status="done")
    with pytest.raises(TypeError, match="no field speed"):
        status.update(speed=1)
    assert not status.path.exists()


def test_room(tmp_path):
    target = tmp_path / "not" / "yet" / "there"
    assert free_bytes(target) > 0
    require_room(target, 1)
    with pytest.raises(StorageError, match=r"has .* GiB free, .* GiB are needed; free .* set cache_dir"):
        require_room(target, 2**60, setting="cache_dir")
    assert os.listdir(tmp_path) == []


def test_writable_leaves_nothing(tmp_path):
    require_writable(tmp_path / "not" / "yet")
    require_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file where a directory is needed"):
        require_writable(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match="not writable"):
        require_writable("/proc/run")  # the one place where root cannot write either


# -- valid at every moment ---------------------------------------------------------------------------------------------


def test_a_history_is_valid_json_from_its_birth_on(tmp_path, monkeypatch):
    path, opened, seen = tmp_path / "history.json", os.open, []

    def watching(*arguments, **options):
        descriptor = opened(*arguments, **options)
        if path.exists():
            seen.append(json.loads(path.read_bytes()))
        return descriptor

    monkeypatch.setattr(os, "open", watching)
    with History(path) as history:
        history.append({"step": 1})
    assert seen and all(rows == [] for rows in seen)
    assert read_rows(path) == [{"step": 1}]


def test_run_json_says_its_last_words_on_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    status = RunStatus(path)
    status.update(status="running", pid=1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    status.update(status="failed", error="the disk is full: " + "x" * 300)
    assert read_json(path)["status"] == "failed" and "x" * 300 in read_json(path)["error"]
    status.update(error="y" * 10_000)
    assert read_json(path)["error"] == "the disk is full"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_run_json_that_never_was_cannot_be_written_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="the disk is full"):
        RunStatus(tmp_path / "run.json").update(status="running")


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_weights_may_be_read_by_those_who_may_read_the_other_files(tmp_path, mask):
    weights, other = tmp_path / "model.safetensors", tmp_path / "config.json"
    before = os.umask(mask)
    try:
        save_file({"a": numpy.zeros(2)}, weights)
        other.touch()
        apply_umask(tmp_path.iterdir())
        assert os.umask(mask) == mask, "the umask stays"
    finally:
        os.umask(before)
    assert weights.stat().st_mode == other.stat().st_mode


def test_weights_whose_mode_somebody_chose_keep_it(tmp_path):
    modes = {"read_only": 0o444, "group": 0o640, "linked": 0o600}
    for name, mode in modes.items():
        (tmp_path / name).touch(mode)
        (tmp_path / name).chmod(mode)
    (tmp_path / "weights").mkdir()
    for name in ("read_only", "group"):
        (tmp_path / name).rename(tmp_path / "weights" / f"{name}.safetensors")
    (tmp_path / "weights" / "linked.safetensors").symlink_to(tmp_path / "linked")
    apply_umask((tmp_path / "weights").iterdir())
    assert {name: (tmp_path / "weights" / f"{name}.safetensors").stat().st_mode & 0o777 for name in modes} == modes
